"""`--mode=bench`: times of AR and rounds, beside the bytes they must move."""

import dataclasses
import itertools
import json
import sys
from typing import Any

import jax
import rich.console

from kdtree_jax.benchmark import machine, report
from kdtree_jax.benchmark.end_to_end import end_to_end
from kdtree_jax.benchmark.model_pair import (
  PREFILL,
  ModelPair,
  random_drafter,
)
from kdtree_jax.benchmark.sweep import Sweep, SweepPoint
from kdtree_jax.errors import UserError
from kdtree_jax.io.files import file_kind
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.results import read_jsonl, write_jsonl
from kdtree_jax.modes.loading import check_config, load_drafter, target_of
from kdtree_jax.modes.options import BenchFlags

BUDGETS = (0, 4, 8, 16, 32, 64, 128, 256, 512)
BLOCK_SIZE = 16
END_TO_END_BUDGETS = (16, 64)
# Cache rows after the longest context; no measurement commits more.
ROOM = 64


@dataclasses.dataclass(frozen=True)
class _Ranges:
  """The measurements that the flags ask for."""

  budgets: tuple[int, ...]
  contexts: tuple[int, ...]
  tokens: int

  @property
  def steps(self) -> list[SweepPoint]:
    # By context, so that an interrupted run has complete tables.
    pairs = itertools.product(self.contexts, (None, *self.budgets))
    return [SweepPoint(*pair) for pair in pairs]

  @property
  def room(self) -> int:
    return ROOM + self.tokens

  @property
  def capacity(self) -> int:
    return max(self.contexts) + self.room


def run(flags: BenchFlags) -> int:
  """Measures what is missing in the output and prints the tables."""
  check_config(flags)
  check_output(flags.output)
  ranges = _ranges(flags)
  records = _earlier(flags.output, _settings(flags))
  missing = [step for step in ranges.steps if not any(map(step.is_of, records))]
  if missing or flags.end_to_end:
    try:
      _measure(flags, ranges, missing, records)
    finally:
      if _once(flags.output):
        _write(flags.output, records)
  report.show(records)
  return 0


def _ranges(flags: BenchFlags) -> _Ranges:
  budgets = BUDGETS if flags.tree_budget is None else flags.tree_budget
  return _Ranges(
    tuple(dict.fromkeys(budgets)),
    flags.context,
    flags.max_new_tokens if flags.end_to_end else 0,
  )


def _settings(flags: BenchFlags) -> dict[str, Any]:
  """The settings that all runs in one file share."""
  return {
    'name': flags.config or flags.target,
    'weights': 'random weights' if flags.config else 'checkpoint',
    'layers': flags.layers or 'all',
    'dtype': _dtype(flags),
    'stored': flags.weights,
    'drafter': flags.drafter or 'random dflash',
    'block_size': flags.block_size,
    'kernels': flags.kernels,
    'device': jax.devices()[0].device_kind,
  }


def _dtype(flags: BenchFlags) -> str:
  if flags.dtype is not None:
    return flags.dtype
  return 'bfloat16' if jax.default_backend() == 'gpu' else 'float32'


def _earlier(
  path: str | None, settings: dict[str, Any]
) -> list[dict[str, Any]]:
  """The records of a file that is continued; none without a file."""
  # Other kinds of files are only written.
  if path is None or file_kind(path) != 'file':
    return []
  try:
    records = [record for _, record in read_jsonl(path)]
    found = [r['settings'] for r in records if r['kind'] == 'run']
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(
      f'--output={path} is not a file of --mode=bench: {error}'
    ) from None
  for other in found:
    for name, value in settings.items():
      if other.get(name) != value:
        raise UserError(
          f'--output={path} holds {name}={other.get(name)}, not {value}; name '
          'another file'
        )
  return [r for r in records if r['kind'] != 'computed']


def _measure(
  flags: BenchFlags,
  ranges: _Ranges,
  missing: list[SweepPoint],
  records: list[dict[str, Any]],
) -> None:
  """Measures and appends to `records`; rewrites the file after each."""
  progress = _progress()

  def add(record: dict[str, Any]) -> None:
    records.append(record)
    if not _once(flags.output):
      _write(flags.output, records)

  progress('measuring the ceilings')
  ceilings = machine.ceilings()
  head = machine.describe(ceilings)
  add({'kind': 'run', 'settings': _settings(flags)} | head)
  progress('making or loading weights')
  pair = _model_pair(flags, ranges)
  if missing:
    sweep = Sweep(pair, ceilings, progress)
    for record in sweep.run(missing):
      add(record)
      progress(json.dumps({k: record[k] for k in record if k != 'computed'}))
    del sweep
  if flags.end_to_end:
    budgets = END_TO_END_BUDGETS
    if flags.tree_budget is not None:
      budgets = [budget for budget in ranges.budgets if budget]
    for record in end_to_end(
      pair,
      ranges.contexts[0],
      budgets,
      ranges.tokens,
      flags.acceptance_rate,
      progress,
    ):
      add(record)


def _once(path: str | None) -> bool:
  """Whether the output is a device or a pipe, which is written once."""
  return path is not None and file_kind(path) == 'special'


def _write(path: str | None, records: list[dict[str, Any]]) -> None:
  if path is not None:
    write_jsonl(path, [*records, *report.computed(records)])


def _progress():
  """A function that logs a line on standard error."""
  console = rich.console.Console(stderr=True, width=200)
  quiet = not sys.stderr.isatty() and jax.default_backend() != 'gpu'

  def log(message: str) -> None:
    if not quiet:
      console.log(message[:160], highlight=False, markup=False)

  return log


def _model_pair(flags: BenchFlags, ranges: _Ranges) -> ModelPair:
  """Target and drafter, with a capacity for the longest context.

  Random weights have no trained positions, so they get as many as needed.
  """
  target = target_of(flags, _dtype(flags))
  max_length = target.config.max_position_embeddings
  block = flags.block_size or BLOCK_SIZE
  positions = ranges.capacity + block
  if flags.config is not None:
    lifted = dataclasses.replace(
      target.config, max_position_embeddings=max(max_length, positions)
    )
    target = dataclasses.replace(target, config=lifted)
  elif ranges.capacity > max_length:
    raise UserError(
      f'--context={max(ranges.contexts)} and {ranges.room} tokens after it '
      f'exceed the max_position_embeddings={max_length} of the target'
    )
  if flags.drafter is None:
    drafter = random_drafter(target, block, positions)
  else:
    drafter = load_drafter(flags, flags.drafter, target)
    if drafter.drafter.needs_golden:
      raise UserError(
        f'--drafter={flags.drafter} needs the output first; use --end_to_end'
      )
  chunk = max(drafter.block_size, min(PREFILL, max(ranges.contexts)))
  return ModelPair(
    target,
    drafter,
    capacity=ranges.capacity,
    room=ranges.room,
    prefill_chunk=chunk,
    kernels=flags.kernels,
  )
