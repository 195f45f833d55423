"""Progress of training: a bar on a terminal, lines elsewhere."""

import sys
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.progress


class TrainingProgress:
  """A context that shows the steps done on standard error."""

  def __init__(self, title: str, steps: int, done: int):
    self._title, self._steps, self._note = title, steps, ''
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn('{task.description}'),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeRemainingColumn(),
      rich.progress.TextColumn('{task.fields[note]}'),
      console=rich.console.Console(stderr=True),
      disable=not sys.stderr.isatty(),
    )
    self._task = self._bar.add_task(title, total=steps, completed=done, note='')

  def __enter__(self) -> 'TrainingProgress':
    self._bar.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.stop()

  def show(self, step: int, *, loss: float, tokens_per_second: float) -> None:
    """Moves the bar."""
    note = f'loss {loss:.3f}, {tokens_per_second / 1e3:.0f}k tokens/s'
    self._note = note
    self._bar.update(self._task, completed=step, note=note)

  def print_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Prints a line of metrics above the bar."""
    parts = [
      f'{name} {value:.4g}'
      for name, value in metrics.items()
      if isinstance(value, float)
    ]
    parts = '; '.join([*parts, self._note])
    text = f'{self._title} {step}/{self._steps}: {parts}'
    if self._bar.disable:
      print(text, file=sys.stderr, flush=True)
    else:
      self._bar.console.print(text)
