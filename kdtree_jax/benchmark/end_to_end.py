"""Whole runs: AR against DDTree with a drafter whose acceptance is set."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kdtree_jax import generation
from kdtree_jax.api import LoadedDrafter
from kdtree_jax.benchmark.priced import PricedDrafter
from kdtree_jax.benchmark.subject import Subject
from kdtree_jax.decode.compilation import compile_all
from kdtree_jax.decode.drivers import loop_calls
from kdtree_jax.drafters.acceptance_rate import AcceptanceRateDrafter
from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.drafters.oracle import OracleDrafter
from kdtree_jax.options import GenerateOptions

# Of what a drafter is told; each moves the first mistake further back.
MAX_REVISIONS = 32


def expected_acceptance_length(acceptance_rate: float, depth: int) -> float:
  """1 + the sum of p^k for k = 1..depth."""
  return 1 + sum(acceptance_rate**k for k in range(1, depth + 1))


def end_to_end(
  subject: Subject,
  context: int,
  budgets: Sequence[int],
  max_new_tokens: int,
  acceptance_rate: float,
  progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
  """Decodes a random prompt by AR, then by DDTree with oracle and set rate.

  The oracle's answer is first the AR run of the same device. Rows of other
  shapes round otherwise in bfloat16, so at a near-tie the texts may part
  (`--mode=audit` judges the place), and a drafter that is told AR's text would
  be wrong from there on: what it is told is revised, by the text that the
  engine under test wrote, until that is what it writes. Every round pays for
  the real drafter.

  Yields:
    One record a drafter and budget.
  """
  target, real = subject.target, subject.drafter
  rng = np.random.default_rng(1)
  prompt = rng.integers(0, target.config.vocab_size, context).tolist()
  options = GenerateOptions(
    # The oracle's last round looks beyond the last token.
    max_new_tokens=max_new_tokens + real.block_size,
    stop_ids=(),
    capacity=subject.capacity,
    prefill_chunk=subject.prefill_chunk,
    kernels=subject.kernels,
  )

  def decode(drafter, options):
    # Once to warm up, once to time.
    for _ in range(2):
      (result,) = generation.continue_prompts(
        target, drafter, [prompt], options
      )
    return result

  sizes = target.config.vocab_size, real.block_size
  cases = list(
    itertools.product(
      (
        OracleDrafter(*sizes),
        AcceptanceRateDrafter(*sizes, acceptance_rate=acceptance_rate),
      ),
      budgets,
    )
  )
  progress(f'compiling {1 + len(cases)} loops')
  asked = [(_priced(subject, *case, prompt), case[1]) for case in cases]
  requests = [
    generation.prepare(target, drafter, [prompt], each)
    for drafter, each in (
      (None, options),
      *((drafter, _at(options, budget)) for drafter, budget in asked),
    )
  ]
  compile_all(
    [
      call
      for each in requests
      for call in loop_calls(each.engine, each.params, each.state)
    ]
  )
  progress('decoding by AR')
  ar = decode(None, options)
  for stub, budget in cases:
    progress(f'decoding with {_name(stub)} at budget {budget}')

    longer = _at(options, budget)
    fields = dataclasses.replace(longer, max_new_tokens=max_new_tokens)

    def write(told, stub=stub, budget=budget, longer=longer):
      drafter = _priced(subject, stub, budget, told)
      result = decode(drafter, longer)
      return [*prompt, *result.output_ids]

    told, revisions = revised([*prompt, *ar.output_ids], write)
    drafter = _priced(subject, stub, budget, told)
    result = decode(drafter, fields)
    rate = acceptance_rate if isinstance(stub, AcceptanceRateDrafter) else 1.0
    yield {
      'kind': 'end_to_end',
      'drafter': drafter.name,
      'context': context,
      'tree_budget': budget,
      'max_new_tokens': max_new_tokens,
      'measured': _measured(result, ar) | {'revisions': revisions},
      'computed': {
        'expected_acceptance_length': expected_acceptance_length(
          rate, min(real.block_size - 1, budget)
        ),
      },
    }


def _at(options: GenerateOptions, budget: int) -> GenerateOptions:
  return dataclasses.replace(options, tree_budget=budget)


def _measured(
  result: generation.GenerateResult, ar: generation.GenerateResult
) -> dict[str, Any]:
  """What one run was, beside AR's of the same prompt."""
  pairs = zip(result.output_ids, ar.output_ids, strict=False)
  differs = [i for i, (a, b) in enumerate(pairs) if a != b]
  rate, ar_rate = (
    len(run.output_ids) / run.seconds.decode for run in (result, ar)
  )
  return {
    'tokens_per_second': rate,
    'ar_tokens_per_second': ar_rate,
    'acceptance_length': result.mean_acceptance_length,
    'first_difference': differs[0] if differs else None,
  }


def revised(
  told: list[int], write: Callable[[list[int]], list[int]]
) -> tuple[list[int], int]:
  """Tells what was written until nothing changes; with the revisions made.

  Runs are repeated exactly, so what was right stays right: every revision
  moves the first mistake back.
  """
  for revision in range(MAX_REVISIONS):
    wrote = write(told)
    if wrote == told:
      return told, revision
    told = wrote
  return told, MAX_REVISIONS


def _name(stub: StubDrafter) -> str:
  if isinstance(stub, AcceptanceRateDrafter):
    return f'acceptance_rate {stub.acceptance_rate:g}'
  return 'oracle'


def _priced(
  subject: Subject, stub: StubDrafter, budget: int, golden: list[int]
) -> LoadedDrafter:
  params = generation.golden_params(subject.engine(budget), [golden])
  return LoadedDrafter(
    _name(stub),
    PricedDrafter(subject.drafter.drafter, stub),
    params | {'real': subject.drafter.params},
  )
