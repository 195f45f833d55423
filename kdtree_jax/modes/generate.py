"""`--mode=generate`: continue a prompt by several methods, as JSON lines."""

import dataclasses
import json
from typing import Any

from kdtree_jax import api
from kdtree_jax.decode import GenerateResult
from kdtree_jax.errors import UserError
from kdtree_jax.io.results import write_jsonl
from kdtree_jax.modes.run_config import (
  RunConfig,
  integers,
  required,
  status,
)

FLAGS = (
  'target',
  'drafter',
  'methods',
  'prompt_ids',
  'max_new_tokens',
  'block_size',
  'tree_budget',
  'tree_policy',
  'dtype',
  'stop_ids',
  'capacity',
  'prefill_chunk',
  'output',
  'dump_trees',
)
METHODS = ('ar', 'chain', 'ddtree')


@dataclasses.dataclass(frozen=True)
class Run:
  """One line of the output."""

  method: str
  tree_budget: int
  tree_policy: str


def run(config: RunConfig) -> int:
  """Runs every method and budget; 0 when all are written."""
  target_path = required(config.target, 'target', 'generate')
  prompt = integers(
    required(config.prompt_ids, 'prompt_ids', 'generate'), 'prompt_ids'
  )
  methods = _methods(config)
  with status(f'loading {target_path}'):
    target = api.load_target(target_path, config.dtype or 'float32')
    drafter = _drafter(config, target, methods)
  options: dict[str, Any] = {
    'max_new_tokens': _or(config.max_new_tokens, 128),
    'capacity': config.capacity,
    'prefill_chunk': _or(config.prefill_chunk, api.PREFILL_CHUNK),
  }
  if config.stop_ids is not None:
    options['stop_ids'] = integers(config.stop_ids, 'stop_ids')
  golden = None
  records = []
  for item in _plan(config, methods, drafter):
    used = drafter if item.method != 'ar' else None
    if used is not None and used.drafter.needs_golden and golden is None:
      with status('finding the golden continuation for the drafter'):
        golden = _golden(target, prompt, used, options)
    with status(f'{item.method}, budget {item.tree_budget}'):
      result = api.generate(
        target,
        used,
        prompt,
        tree_budget=item.tree_budget,
        tree_policy=item.tree_policy,
        golden_ids=golden,
        record_rounds=bool(config.dump_trees),
        **options,
      )
    records.append(record(item, result, used))
  if config.output is None:
    for line in records:
      print(json.dumps(line))
  else:
    write_jsonl(config.output, records)
  return 0


def record(
  item: Run, result: GenerateResult, drafter: api.LoadedDrafter | None
) -> dict[str, Any]:
  """One JSON object; every list is in the order of the rounds."""
  line = {
    'method': item.method,
    'tree_budget': item.tree_budget,
    'block_size': drafter.block_size if drafter else 1,
    'drafter': drafter.name if drafter else None,
    'prompt_ids': result.prompt_ids,
    'output_ids': result.output_ids,
    'acceptance_lengths': result.acceptance_lengths,
    'target_forwards': result.target_forwards,
    'draft_forwards': result.target_forwards if drafter else 0,
    'stop_reason': result.stop_reason,
    'seconds': {
      'prefill': result.seconds.prefill,
      'decode': result.seconds.decode,
    },
  }
  if result.rounds is not None:
    line['trees'] = [
      {
        'node_token_ids': tree.node_token_ids,
        'node_depths': tree.node_depths,
        'parents': tree.parents,
        'accepted_indices': tree.accepted_indices,
      }
      for tree in result.rounds
    ]
  return line


def _plan(
  config: RunConfig,
  methods: tuple[str, ...],
  drafter: api.LoadedDrafter | None,
) -> list[Run]:
  """The runs in order: one an AR or chain, one a budget for DDTree."""
  budgets = [api.DEFAULT_TREE_BUDGET]
  if config.tree_budget is not None:
    budgets = integers(config.tree_budget, 'tree_budget')
  if min(budgets, default=0) < 0:
    raise UserError(f'--tree_budget={min(budgets)} is negative')
  plan = []
  for method in methods:
    if method == 'ar':
      plan.append(Run('ar', 0, 'best_first'))
    elif method == 'chain':
      plan.append(Run('chain', drafter.block_size - 1, 'chain'))
    else:
      policy = config.tree_policy or 'best_first'
      plan += [Run('ddtree', budget, policy) for budget in budgets]
  return plan


def _methods(config: RunConfig) -> tuple[str, ...]:
  methods = config.methods
  if methods is None:
    methods = METHODS if config.drafter is not None else ('ar',)
  for method in methods:
    if method not in METHODS:
      raise UserError(f'--methods={method} is none of {", ".join(METHODS)}')
  if not methods:
    raise UserError(f'--methods is empty; choose from {", ".join(METHODS)}')
  unused = ('block_size', 'tree_budget', 'tree_policy')
  if set(methods) == {'ar'}:
    for flag in ('drafter', *unused):
      if getattr(config, flag) is not None:
        raise UserError(f'--{flag} is not used by --methods=ar')
  return tuple(methods)


def _drafter(
  config: RunConfig, target: api.Target, methods: tuple[str, ...]
) -> api.LoadedDrafter | None:
  if set(methods) == {'ar'}:
    return None
  name = config.drafter
  if name is None:
    raise UserError(f'--methods={",".join(methods)} needs --drafter')
  return api.load_drafter(name, target, config.block_size)


def _golden(
  target: api.Target,
  prompt: list[int],
  drafter: api.LoadedDrafter,
  options: dict[str, Any],
) -> list[int]:
  """As far as any round can look: one block beyond the last token."""
  count = options['max_new_tokens'] + drafter.block_size
  return api.golden_continuation(
    target, prompt, count, capacity=options['capacity']
  )


def _or(value: int | None, default: int) -> int:
  return default if value is None else value
