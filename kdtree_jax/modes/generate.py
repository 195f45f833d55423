"""`--mode=generate`: continue a prompt by several methods, as JSON lines."""

import dataclasses
import json
import sys
from typing import Any

from kdtree_jax import api, generation
from kdtree_jax.decode import GenerateResult
from kdtree_jax.errors import UserError
from kdtree_jax.io.results import write_jsonl
from kdtree_jax.modes import serving, texts
from kdtree_jax.modes.loading import (
  check_target,
  drafted_rounds,
  ends_early,
  load_target,
  mismatch,
)
from kdtree_jax.modes.run_config import (
  RunConfig,
  check_budgets,
  check_output,
  integers,
  numbers,
  status,
)

FLAGS = (
  'target',
  'config',
  'layers',
  'drafter',
  'hit_rate',
  'methods',
  'drafter_attention_factor',
  'prompt_ids',
  'prompt',
  'prompts',
  'chat',
  'parse_special_in_messages',
  'max_new_tokens',
  'block_size',
  'tree_budget',
  'tree_policy',
  'dtype',
  'weights',
  'stop_ids',
  'ignore_eos',
  'stop_strings',
  'temperature',
  'top_k',
  'top_p',
  'min_p',
  'seed',
  'chain_seed',
  'stream',
  'batch_size',
  'capacity',
  'prefill_chunk',
  'kernels',
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
  check_target(config)
  methods = _methods(config)
  options = _options(config)
  tokenizer = texts.tokenizer_of(config)
  # Wrong flags show before a long load.
  last = options['seed'] + len(texts.talks(config, tokenizer)) - 1
  generation.GenerateOptions(**options).sampling([last])
  target = load_target(config)
  with status('loading the drafter'):
    drafter = _drafter(config, target, methods)
  records = []
  warning = None
  for item in _plan(config, methods, drafter):
    used = drafter if item.method != 'ar' else None
    fields = options | {
      'tree_budget': item.tree_budget,
      'tree_policy': item.tree_policy,
    }
    talks = texts.talks(config, tokenizer)
    lines = {}
    for turn in range(max(max(1, len(talk.prompt.turns)) for talk in talks)):
      jobs = [
        serving.Job(i, texts.next_ids(talk, turn, tokenizer, bool(config.chat)))
        for i, talk in enumerate(talks)
        if turn < max(1, len(talk.prompt.turns))
      ]
      limit = target.config.max_position_embeddings
      size = config.batch_size or 1
      for capacity, batch in serving.batches(jobs, size, fields, limit):
        named = fields | {'capacity': capacity}
        label = f'{item.method}, budget {item.tree_budget}, turn {turn}: '
        with status(
          f'{label}{len(lines)} done, {len(batch)} at capacity {capacity}'
        ):
          found = serving.results(config, target, used, tokenizer, batch, named)
        for job, result in zip(batch, found, strict=True):
          talk = talks[job.index]
          seeded = fields | {'seed': fields['seed'] + job.index}
          text = texts.answer(talk, result, tokenizer, config.stop_strings)
          lines[job.index, turn] = record(item, result, used, seeded) | {
            'id': talk.prompt.id,
            'turn': turn,
            'text': text,
          }
        warning = warning or mismatch(used, found)
        warning = warning or ends_early(target, used, found)
    records += [lines[key] for key in sorted(lines)]
  if warning is not None:
    print(warning, file=sys.stderr)
  if config.output is None:
    for line in records:
      print(json.dumps(line))
  else:
    write_jsonl(config.output, records)
  return 0


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
    'draft_forwards': drafted_rounds(drafter, result)
    if item.tree_budget
    else 0,
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
  unused = []
  if 'ddtree' not in methods:
    unused += ['tree_budget', 'tree_policy', 'chain_seed']
  if set(methods) == {'ar'}:
    unused += ['drafter', 'block_size', 'drafter_attention_factor', 'hit_rate']
  for flag in unused:
    if getattr(config, flag) is not None:
      raise UserError(f'--{flag} is not used by --methods={",".join(methods)}')
  return tuple(methods)


def _drafter(
  config: RunConfig, target: api.Target, methods: tuple[str, ...]
) -> api.LoadedDrafter | None:
  if set(methods) == {'ar'}:
    return None
  name = config.drafter
  if name is None:
    raise UserError(f'--methods={",".join(methods)} needs --drafter')
  return api.load_drafter(
    name,
    target,
    config.block_size,
    config.drafter_attention_factor,
    config.hit_rate,
  )


def _options(config: RunConfig) -> dict[str, Any]:
  """The fields of `GenerateOptions` that do not differ between runs."""
  defaults = generation.GenerateOptions
  names = (
    'max_new_tokens',
    'capacity',
    'prefill_chunk',
    'kernels',
    'chain_seed',
    'top_k',
    'top_p',
    'min_p',
    'seed',
  )
  options = {}
  for name in names:
    value = getattr(config, name)
    options[name] = getattr(defaults, name) if value is None else value
  options['temperature'] = defaults.temperature
  if config.temperature is not None:
    temperatures = numbers(config.temperature, 'temperature')
    if len(temperatures) != 1:
      raise UserError('--temperature takes one value in --mode=generate')
    (options['temperature'],) = temperatures
  if config.ignore_eos:
    if config.stop_ids is not None:
      raise UserError('--ignore_eos and --stop_ids exclude each other')
    options['stop_ids'] = ()
  elif config.stop_ids is not None:
    options['stop_ids'] = tuple(integers(config.stop_ids, 'stop_ids'))
  check_budgets(config)
  check_output(config.output)
  if '' in (config.stop_strings or ()):
    raise UserError('--stop_strings holds an empty string')
  if config.stream and config.dump_trees:
    raise UserError('--stream and --dump_trees exclude each other')
  if config.dump_trees and config.stop_strings:
    raise UserError('--dump_trees and --stop_strings exclude each other')
  if config.batch_size is not None and config.batch_size < 1:
    raise UserError(f'--batch_size={config.batch_size} is below 1')
  if (config.batch_size or 1) > 1 and (config.stream or config.dump_trees):
    raise UserError('--stream and --dump_trees take one prompt at a time')
  return options
