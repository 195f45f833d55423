"""`--mode=audit`: is this engine, or this fork of it, still lossless?"""

import dataclasses
import itertools

from kdtree_jax import api, generation
from kdtree_jax.audit import AuditReport, Divergence, audit
from kdtree_jax.io.results import write_jsonl
from kdtree_jax.modes import texts
from kdtree_jax.modes.loading import check_target, load_target
from kdtree_jax.modes.run_config import (
  RunConfig,
  check_budgets,
  check_output,
  integers,
  required,
  status,
)

FLAGS = (
  'target',
  'config',
  'layers',
  'drafter',
  'hit_rate',
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
  'chain_seed',
  'dtype',
  'weights',
  'kernels',
  'output',
)


def run(config: RunConfig) -> int:
  """Prints a verdict for every budget; 1 if one fails."""
  check_target(config)
  name = required(config.drafter, 'drafter', 'audit')
  tokenizer = texts.tokenizer_of(config)
  talks = texts.talks(config, tokenizer)
  defaults = generation.GenerateOptions
  check_budgets(config)
  check_output(config.output)
  budgets = [defaults.tree_budget]
  if config.tree_budget is not None:
    budgets = integers(config.tree_budget, 'tree_budget')
  count = config.max_new_tokens
  options = {
    'max_new_tokens': defaults.max_new_tokens if count is None else count,
    'tree_policy': config.tree_policy or defaults.tree_policy,
    'chain_seed': bool(config.chain_seed),
    'kernels': config.kernels or defaults.kernels,
  }
  # Wrong flags show before a long load.
  generation.GenerateOptions(**options)
  target = load_target(config)
  with status('loading the drafter'):
    drafter = api.load_drafter(
      name,
      target,
      config.block_size,
      config.drafter_attention_factor,
      config.hit_rate,
    )
  reports = []
  # Of a talk the first turn: what follows would depend on the engine.
  prompts = [
    texts.next_ids(talk, 0, tokenizer, bool(config.chat)) for talk in talks
  ]
  for (talk, prompt), budget in itertools.product(
    zip(talks, prompts, strict=True), budgets
  ):
    with status(f'auditing prompt {talk.prompt.id}, budget {budget}'):
      report = audit(target, drafter, prompt, tree_budget=budget, **options)
    print(f'prompt {talk.prompt.id}, budget {budget}: {verdict(report)}')
    # JSON has no NaN; a failure says it in words.
    fields = {
      name: None if value != value else value
      for name, value in dataclasses.asdict(report).items()
    }
    reports.append({'id': talk.prompt.id, 'tree_budget': budget} | fields)
  if config.output is not None:
    write_jsonl(config.output, reports)
  return 1 if any(report['failures'] for report in reports) else 0


def verdict(report: AuditReport) -> str:
  """A few lines for people."""
  full = report.full_acceptance_length
  full = 'what its policy holds' if full is None else f'{full:.2f}'
  lines = [
    'FAILED: ' + '; '.join(report.failures) if report.failures else 'passed',
    f'  DDTree: {describe(report.divergence)}; acceptance length '
    f'{report.acceptance_length:.2f}',
    f'  oracle: {describe(report.oracle_divergence)}; acceptance length '
    f'{report.oracle_acceptance_length:.2f} of {full}',
    f'  cache against a forward without one: {report.cache_error:.2g} (noise '
    f'{report.cache_noise:.2g}); draft against that of a prefill: '
    f'{report.context_error:.2g} (noise {report.context_noise:.2g})',
  ]
  return '\n'.join(lines)


def describe(divergence: Divergence | None) -> str:
  """Identical, or where, by how much and why that is excused or not."""
  if divergence is None:
    return 'identical to AR'
  d = divergence
  text = (
    f"differs at position {d.position}: {d.ddtree_token} for AR's "
    f'{d.ar_token}, logit gap {d.gap:.3g}, noise {d.noise:.3g}'
  )
  if d.layer is not None:
    text += (
      f', other experts in MoE layer {d.layer}: margin '
      f'{d.router_margin:.3g}, noise {d.router_noise:.3g}'
    )
  return f'{text}: {"a near-tie" if d.near_tie else "NO near-tie"}'
