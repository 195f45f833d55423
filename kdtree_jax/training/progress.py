"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.progress


class Progress:
  """A context that shows steps on standard error."""

  def __init__(self, title: str, steps: int, done: int):
    self._title, self._steps = title, steps
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

  def __enter__(self) -> 'Progress':
    self._bar.start()
    return self

  def __exit__(self, *_: Any) -> None:
    self._bar.stop()

  def show(self, step: int, *, loss: float, tokens_per_second: float) -> None:
    """Moves the bar."""
    note = f'loss {loss:.3f}, {tokens_per_second / 1e3:.0f}k tokens/s'
    self._note = note
    self._bar.update(self._task, completed=step, note=note)

  def say(self, step: int, metrics: Mapping[str, Any]) -> None:
    """One line that stays."""
    parts = [
      f'{name} {value:.4g}'
      for name, value in metrics.items()
      if isinstance(value, float)
    ]
    note = getattr(self, '_note', '')
    text = f'{self._title} {step}/{self._steps}: {"; ".join([*parts, note])}'
    if self._bar.disable:
      print(text, file=sys.stderr, flush=True)
    else:
      self._bar.console.print(text)
