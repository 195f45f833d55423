"""Whole runs: AR against DDTree with stubs of a set acceptance rate."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kdtree_jax import generation
from kdtree_jax.api import LoadedDrafter
from kdtree_jax.benchmark import Record
from kdtree_jax.benchmark.costed_drafter import CostedDrafter
from kdtree_jax.benchmark.model_pair import ModelPair
from kdtree_jax.decode.compilation import compile_all
from kdtree_jax.decode.drivers import decode_calls
from kdtree_jax.drafters.acceptance_rate import AcceptanceRateDrafter
from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.drafters.oracle import OracleDrafter
from kdtree_jax.options import GenerateOptions

# Of a golden sequence; each moves its first wrong token further back.
MAX_REVISIONS = 32


def expected_acceptance_length(acceptance_rate: float, depth: int) -> float:
  """1 + the sum of p^k for k = 1..depth."""
  return 1 + sum(acceptance_rate**k for k in range(1, depth + 1))


def end_to_end(
  pair: ModelPair,
  context: int,
  budgets: Sequence[int],
  max_new_tokens: int,
  acceptance_rate: float,
  progress: Callable[[str], None],
) -> Iterator[Record]:
  """Decodes a random prompt by AR, then by DDTree with each stub and budget.

  The stubs are the oracle and one of a set acceptance rate. Their golden
  sequence is AR's output at first. In bfloat16, rows of other shapes round
  differently, so at a near-tie the engine's output may differ from AR's
  (`--mode=audit` judges the place), and the golden sequence would be wrong from
  there on. So it is replaced by the engine's own output until the two agree.
  Every round runs the real drafter too, so that its cost counts.

  Yields:
    One record a drafter and budget.
  """
  vocab_size, block_size = pair.target.config.vocab_size, pair.block_size
  rng = np.random.default_rng(1)
  prompt = rng.integers(0, vocab_size, context).tolist()
  options = GenerateOptions(
    # The oracle's last round looks beyond the last token.
    max_new_tokens=max_new_tokens + block_size,
    stop_ids=(),
    capacity=pair.capacity,
    prefill_chunk=pair.prefill_chunk,
    kernels=pair.kernels,
  )
  rates: dict[StubDrafter, float] = {
    OracleDrafter(vocab_size, block_size): 1.0,
    AcceptanceRateDrafter(vocab_size, block_size, acceptance_rate): (
      acceptance_rate
    ),
  }
  cases = [
    (stub, budget, dataclasses.replace(options, tree_budget=budget))
    for stub, budget in itertools.product(rates, budgets)
  ]
  progress(f'compiling {1 + len(cases)} loops')
  _compile(pair, prompt, options, cases)
  progress('decoding by AR')
  ar = _timed(pair, None, prompt, options)
  for stub, budget, longer in cases:
    progress(f'decoding with {_name(stub)} at budget {budget}')
    first = [*prompt, *ar.output_ids]
    golden, revisions = _settled_golden(
      pair, stub, budget, prompt, longer, first
    )
    drafter = _costed(pair, stub, budget, golden)
    shorter = dataclasses.replace(longer, max_new_tokens=max_new_tokens)
    result = _timed(pair, drafter, prompt, shorter)
    depth = min(block_size - 1, budget)
    expected = expected_acceptance_length(rates[stub], depth)
    yield {
      'kind': 'end_to_end',
      'drafter': drafter.name,
      'context': context,
      'tree_budget': budget,
      'max_new_tokens': max_new_tokens,
      'measured': _measured(result, ar) | {'revisions': revisions},
      'computed': {'expected_acceptance_length': expected},
    }


def _compile(
  pair: ModelPair,
  prompt: list[int],
  options: GenerateOptions,
  cases: list[tuple[StubDrafter, int, GenerateOptions]],
) -> None:
  """Compiles the loops of AR and of all cases, side by side."""
  drafters: list[tuple[LoadedDrafter | None, GenerateOptions]] = [
    (_costed(pair, stub, budget, prompt), each) for stub, budget, each in cases
  ]
  requests = [
    generation.prepare(pair.target, drafter, [prompt], each)
    for drafter, each in [(None, options), *drafters]
  ]
  compile_all(
    call
    for request in requests
    for call in decode_calls(request.engine, request.params, request.state)
  )


def _timed(
  pair: ModelPair,
  drafter: LoadedDrafter | None,
  prompt: list[int],
  options: GenerateOptions,
) -> generation.GenerateResult:
  """The second of two runs; the first one warms up."""
  for _ in range(2):
    (result,) = generation.continue_prompts(
      pair.target, drafter, [prompt], options
    )
  return result


def _settled_golden(
  pair: ModelPair,
  stub: StubDrafter,
  budget: int,
  prompt: list[int],
  options: GenerateOptions,
  golden: list[int],
) -> tuple[list[int], int]:
  """The golden sequence that the engine reproduces, and its revisions."""

  def generate(golden: list[int]) -> list[int]:
    drafter = _costed(pair, stub, budget, golden)
    return [*prompt, *_timed(pair, drafter, prompt, options).output_ids]

  return settled(golden, generate)


def _measured(
  result: generation.GenerateResult, ar: generation.GenerateResult
) -> Record:
  """The figures of one run, beside AR's of the same prompt."""
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


def settled(
  golden: list[int], generate: Callable[[list[int]], list[int]]
) -> tuple[list[int], int]:
  """A golden sequence that an engine reproduces, and how often it changed.

  Each sequence is replaced by what the engine generates when it is golden. Runs
  are exactly repeatable, so what is right stays right, and every revision moves
  the first wrong token back.
  """
  for revision in range(MAX_REVISIONS):
    generated = generate(golden)
    if generated == golden:
      return golden, revision
    golden = generated
  return golden, MAX_REVISIONS


def _name(stub: StubDrafter) -> str:
  if isinstance(stub, AcceptanceRateDrafter):
    return f'acceptance_rate {stub.acceptance_rate:g}'
  return 'oracle'


def _costed(
  pair: ModelPair, stub: StubDrafter, budget: int, golden: list[int]
) -> LoadedDrafter:
  """The stub at the cost of the pair's drafter, with a golden sequence."""
  params = generation.golden_params(pair.engine(budget), [golden])
  return LoadedDrafter(
    _name(stub),
    CostedDrafter(pair.drafter.drafter, stub),
    params | {'real': pair.drafter.params},
  )
