"""`--mode=generate`: continue a prompt by several methods, as JSON lines."""

import dataclasses
import json
import sys
from typing import Any

from kdtree_jax import api, generation
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
  'ignore_eos',
  'temperature',
  'top_k',
  'top_p',
  'min_p',
  'seed',
  'chain_seed',
  'stream',
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
  methods = _methods(config)
  ids = required(config.prompt_ids, 'prompt_ids', 'generate')
  prompts = [integers(ids, 'prompt_ids')]
  options = _options(config)
  with status(f'loading {target_path}'):
    target = api.load_target(target_path, config.dtype or 'float32')
    drafter = _drafter(config, target, methods)
  records = []
  for item in _plan(config, methods, drafter):
    used = drafter if item.method != 'ar' else None
    fields = options | {
      'tree_budget': item.tree_budget,
      'tree_policy': item.tree_policy,
    }
    with status(f'{item.method}, budget {item.tree_budget}'):
      for result in _results(config, target, used, prompts, fields):
        records.append(record(item, result, used, options))
  if config.output is None:
    for line in records:
      print(json.dumps(line))
  else:
    write_jsonl(config.output, records)
  return 0


def _results(
  config: RunConfig,
  target: api.Target,
  drafter: api.LoadedDrafter | None,
  prompts: list[list[int]],
  options: dict[str, Any],
) -> list[GenerateResult]:
  """Every prompt by one method, in order."""
  if config.dump_trees:
    return [
      generation.generate(
        target,
        drafter,
        prompt,
        record_rounds=True,
        **_seeded(options, i),
      )
      for i, prompt in enumerate(prompts)
    ]
  if config.stream:
    return [
      _streamed(target, drafter, prompt, _seeded(options, i))
      for i, prompt in enumerate(prompts)
    ]
  return generation.generate_batch(target, drafter, prompts, **options)


def _seeded(options: dict[str, Any], prompt: int) -> dict[str, Any]:
  """The seed that a prompt has in a batch."""
  return options | {'seed': options['seed'] + prompt}


def _streamed(
  target: api.Target,
  drafter: api.LoadedDrafter | None,
  prompt: list[int],
  options: dict[str, Any],
) -> GenerateResult:
  """Shows tokens as they are committed; Ctrl-C keeps what is there."""
  stream = generation.Stream(target, drafter, [prompt], **options)
  try:
    for update in stream:
      print(*update.new_ids[0], end=' ', file=sys.stderr, flush=True)
  except KeyboardInterrupt:
    pass
  print(file=sys.stderr)
  return stream.results()[0]


def record(
  item: Run,
  result: GenerateResult,
  drafter: api.LoadedDrafter | None,
  options: dict[str, Any],
) -> dict[str, Any]:
  """One JSON object; every list is in the order of the rounds."""
  line = {
    'method': item.method,
    'tree_budget': item.tree_budget,
    'block_size': drafter.block_size if drafter else 1,
    'drafter': drafter.name if drafter else None,
    'temperature': options['temperature'],
    'seed': options['seed'],
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
  budgets = [generation.GenerateOptions.tree_budget]
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
  unused = ('block_size', 'tree_budget', 'tree_policy', 'chain_seed')
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


def _options(config: RunConfig) -> dict[str, Any]:
  """The fields of `GenerateOptions` that do not differ between runs."""
  defaults = generation.GenerateOptions
  names = (
    'max_new_tokens',
    'capacity',
    'prefill_chunk',
    'chain_seed',
    'temperature',
    'top_k',
    'top_p',
    'min_p',
    'seed',
  )
  options = {}
  for name in names:
    value = getattr(config, name)
    options[name] = getattr(defaults, name) if value is None else value
  if config.ignore_eos:
    if config.stop_ids is not None:
      raise UserError('--ignore_eos and --stop_ids exclude each other')
    options['stop_ids'] = ()
  elif config.stop_ids is not None:
    options['stop_ids'] = tuple(integers(config.stop_ids, 'stop_ids'))
  if config.stream and config.dump_trees:
    raise UserError('--stream and --dump_trees exclude each other')
  generation.GenerateOptions(**options).sampling(1)
  return options
