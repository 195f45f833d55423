"""`--mode=bench`: what AR and rounds cost, beside the bytes they must move."""

import dataclasses
import json
import sys
from typing import Any

import jax
import rich.console

from kdtree_jax import api
from kdtree_jax.benchmark import machine, report
from kdtree_jax.benchmark.end_to_end import HIT_RATE, end_to_end
from kdtree_jax.benchmark.subject import PREFILL, Subject, random_drafter
from kdtree_jax.benchmark.sweep import Step, Sweep
from kdtree_jax.errors import UserError
from kdtree_jax.io.files import file_kind
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.results import read_jsonl, write_jsonl
from kdtree_jax.modes.loading import check_target, load_target
from kdtree_jax.modes.run_config import (
  RunConfig,
  check_budgets,
  integers,
)

FLAGS = (
  'target',
  'config',
  'layers',
  'weights',
  'dtype',
  'drafter',
  'drafter_attention_factor',
  'block_size',
  'tree_budget',
  'context',
  'kernels',
  'end_to_end',
  'hit_rate',
  'max_new_tokens',
  'output',
)
BUDGETS = (0, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 2048, 8192, 32768)
BLOCK_SIZE = 16
END_TO_END_BUDGETS = (16, 64)
END_TO_END_TOKENS = 128
# Rows behind the longest context: no measurement commits more.
ROOM = 64


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What the flags ask for."""

  budgets: tuple[int, ...]
  contexts: tuple[int, ...]
  tokens: int

  @property
  def room(self) -> int:
    return ROOM + self.tokens

  @property
  def capacity(self) -> int:
    return max(self.contexts) + self.room


def run(config: RunConfig) -> int:
  """Measures what the output does not hold yet; 0 when all is there."""
  if config.dtype is None:
    gpu = jax.default_backend() == 'gpu'
    dtype = 'bfloat16' if gpu else 'float32'
    config = dataclasses.replace(config, dtype=dtype)
  plan = _plan(config)
  records = _earlier(config.output, _settings(config))
  missing = [step for step in _steps(plan) if not any(map(step.is_of, records))]
  if missing or config.end_to_end:
    try:
      _measure(config, plan, missing, records)
    finally:
      if _once(config.output):
        _write(config.output, records)
  report.show(records)
  return 0


def _steps(plan: _Plan) -> list[Step]:
  # Context by context: an interrupted run has whole tables.
  return [
    Step(context, budget)
    for context in plan.contexts
    for budget in (None, *plan.budgets)
  ]


def _plan(config: RunConfig) -> _Plan:
  check_target(config)
  check_budgets(config)
  check_output(config.output)
  budgets, contexts = BUDGETS, CONTEXTS
  if config.tree_budget is not None:
    budgets = integers(config.tree_budget, 'tree_budget')
  if config.context is not None:
    contexts = integers(config.context, 'context')
  if not contexts or min(contexts) < 1:
    raise UserError('--context needs positive integers')
  tokens = 0
  if config.end_to_end:
    tokens = config.max_new_tokens
    tokens = END_TO_END_TOKENS if tokens is None else tokens
    if tokens < 1:
      raise UserError(f'--max_new_tokens={tokens} is below 1')
  else:
    for flag in ('hit_rate', 'max_new_tokens'):
      if getattr(config, flag) is not None:
        raise UserError(f'--{flag} is not used without --end_to_end')
  if not 0 <= (config.hit_rate or 0) <= 1:
    raise UserError(f'--hit_rate={config.hit_rate} is not in 0..1')
  return _Plan(tuple(dict.fromkeys(budgets)), tuple(contexts), tokens)


def _settings(config: RunConfig) -> dict[str, Any]:
  """What must be equal for two runs to share a file."""
  return {
    'name': config.config or config.target,
    'weights': 'random weights' if config.config else 'checkpoint',
    'layers': config.layers or 'all',
    'dtype': config.dtype,
    'stored': config.weights or 'as_stored',
    'drafter': config.drafter or 'random dflash',
    'block_size': config.block_size,
    'kernels': config.kernels or 'auto',
    'device': jax.devices()[0].device_kind,
  }


def _earlier(path: str | None, settings: dict[str, Any]) -> list[dict]:
  """The records of a file to go on with; none if there is no file."""
  # What is no regular file is only written.
  if path is None or file_kind(path) != 'file':
    return []
  try:
    records = [record for _, record in read_jsonl(path)]
    found = [r['settings'] for r in records if r['kind'] == 'run']
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(
      f'--output={path} is no file of --mode=bench: {error}'
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
  config: RunConfig, plan: _Plan, missing: list[Step], records: list[dict]
) -> None:
  """Appends to `records`, and writes a file of them after each that is new."""
  progress = _progress()

  def add(record: dict[str, Any]) -> None:
    records.append(record)
    if not _once(config.output):
      _write(config.output, records)

  progress('measuring the ceilings')
  ceilings = machine.ceilings()
  head = machine.describe(ceilings)
  add({'kind': 'run', 'settings': _settings(config)} | head)
  progress('making or loading weights')
  subject = _subject(config, plan)
  if missing:
    sweep = Sweep(subject, ceilings, progress)
    for record in sweep.run(missing):
      add(record)
      progress(json.dumps({k: record[k] for k in record if k != 'computed'}))
    del sweep
  if config.end_to_end:
    budgets = END_TO_END_BUDGETS
    if config.tree_budget is not None:
      budgets = [budget for budget in plan.budgets if budget]
    rate = HIT_RATE if config.hit_rate is None else config.hit_rate
    for record in end_to_end(
      subject, plan.contexts[0], budgets, plan.tokens, rate, progress
    ):
      add(record)


def _once(path: str | None) -> bool:
  """Whether a device or a pipe is written, where nothing can be replaced."""
  return path is not None and file_kind(path) == 'special'


def _write(path: str | None, records: list[dict]) -> None:
  if path is not None:
    write_jsonl(path, [*records, *report.computed(records)])


def _progress():
  """A line on standard error for each step of long work."""
  console = rich.console.Console(stderr=True, width=200)
  quiet = not sys.stderr.isatty() and jax.default_backend() != 'gpu'

  def say(message: str) -> None:
    if not quiet:
      console.log(message[:160], highlight=False, markup=False)

  return say


def _subject(config: RunConfig, plan: _Plan) -> Subject:
  """The pair, at a capacity that holds the longest context.

  Random weights have no trained positions: their limit is lifted.
  """
  target = load_target(config)
  limit = target.config.max_position_embeddings
  block = config.block_size or BLOCK_SIZE
  positions = plan.capacity + block
  if config.config is not None:
    lifted = dataclasses.replace(
      target.config, max_position_embeddings=max(limit, positions)
    )
    target = dataclasses.replace(target, config=lifted)
  elif plan.capacity > limit:
    raise UserError(
      f'--context={max(plan.contexts)} and {plan.room} tokens behind it exceed '
      f'the max_position_embeddings={limit} of the target'
    )
  if config.drafter is None:
    drafter = random_drafter(target, block, positions)
  else:
    drafter = api.load_drafter(
      config.drafter,
      target,
      config.block_size,
      config.drafter_attention_factor,
    )
    if drafter.drafter.needs_golden:
      raise UserError(
        f'--drafter={config.drafter} needs an answer; --end_to_end has it'
      )
  chunk = max(drafter.block_size, min(PREFILL, max(plan.contexts)))
  return Subject(
    target,
    drafter,
    capacity=plan.capacity,
    room=plan.room,
    prefill_chunk=chunk,
    kernels=config.kernels or 'auto',
  )
