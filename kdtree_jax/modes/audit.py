"""`--mode=audit`: checks that this engine, or a fork of it, is lossless."""

import contextlib
import dataclasses
import itertools
from typing import Any

from kdtree_jax.audit import (
  AuditReport,
  Divergence,
  audit_prompt,
  check_room,
)
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.results import JsonLines
from kdtree_jax.modes import texts
from kdtree_jax.modes.loading import check_config, load_drafter, target_of
from kdtree_jax.modes.options import AuditFlags
from kdtree_jax.modes.status import status


def run(flags: AuditFlags) -> int:
  """Prints a verdict for every budget; returns 1 if one fails."""
  check_config(flags)
  tokenizer = texts.tokenizer_of(flags)
  dialogues = texts.dialogues(flags, tokenizer)
  # First turns only: later ones would depend on the engine's answers.
  prompts = texts.first_ids(dialogues, tokenizer, flags.chat)
  check_output(flags.output)
  # Before a long load, so that wrong flags fail early.
  options = flags.options
  target = target_of(flags, flags.dtype)
  drafter = load_drafter(flags, flags.drafter, target, flags.acceptance_rate)
  texts.check_first(dialogues, prompts, target, None)
  for dialogue, prompt in zip(dialogues, prompts, strict=True):
    with texts.naming(dialogue.prompt.where, dialogue.prompt.id):
      check_room(prompt, target.config.max_position_embeddings)
  failed = False
  with contextlib.ExitStack() as stack:
    lines = None
    if flags.output is not None:
      lines = stack.enter_context(JsonLines(flags.output))
    for (dialogue, prompt), budget in itertools.product(
      zip(dialogues, prompts, strict=True), flags.tree_budget
    ):
      with status(f'auditing prompt {dialogue.prompt.id}, budget {budget}'):
        each = dataclasses.replace(options, tree_budget=budget)
        report = audit_prompt(target, drafter, prompt, each)
      text = f'prompt {dialogue.prompt.id}, budget {budget}: {verdict(report)}'
      print(text, flush=True)
      if lines is not None:
        lines.write(
          {'id': dialogue.prompt.id, 'tree_budget': budget} | _json(report)
        )
      failed = failed or bool(report.failures)
  return 1 if failed else 0


def _json(report: AuditReport) -> dict[str, Any]:
  """The fields of a report; null for NaN, which JSON lacks."""
  return {
    name: None if value != value else value
    for name, value in dataclasses.asdict(report).items()
  }


def verdict(report: AuditReport) -> str:
  """A report as a few lines of text."""
  full = report.full_acceptance_length
  full = 'what its policy allows' if full is None else f'{full:.2f}'
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
  """A divergence in words: its place, its size, and the verdict."""
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
