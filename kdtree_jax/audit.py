"""A check that an engine is still lossless: AR against DDTree.

Rows of different shapes round differently, so in bfloat16 the outputs of two
exact engines may differ from a near-tie on. A divergence is therefore compared
with noise that is measured without the engine under test: AR at N = 1 against
AR padded to the tree's N rows, on the same prefix. Equal tokens alone could
hide a fault that both engines share, or one that only costs acceptance. So the
audit also compares the decoded cache with a forward that reads no cache, the
drafter's context with a fresh prefill, and the acceptance of an oracle with
full acceptance.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from kdtree_jax import api, checks, generation
from kdtree_jax.decode import DecodeState
from kdtree_jax.decode import round as stages
from kdtree_jax.decode.compilation import Call, compile_all, start_compiling
from kdtree_jax.decode.prefill import prefill
from kdtree_jax.decode.state import HostState
from kdtree_jax.divergence import Divergence, judge
from kdtree_jax.drafters.null import NullDrafter
from kdtree_jax.errors import UserError
from kdtree_jax.observation import Observation, observe, observed_calls
from kdtree_jax.options import GenerateKeywords, GenerateOptions

# The largest relative error, or, but for float32, this many times the measured
# noise: a model in which experts change at every rounding is noisy. A fault
# changes values by as much as the values themselves, so noise above NOISIEST
# could hide one.
TOLERANCE = {'float32': 1e-3, 'bfloat16': 0.1}
TIMES_NOISE = 3
NOISIEST = 0.25


@dataclasses.dataclass(frozen=True)
class AuditReport:
  """The findings for one prompt.

  Attributes:
    prompt_ids: the prompt.
    output_ids: AR's output.
    divergence: DDTree's divergence from AR, or None if they are identical.
    acceptance_length: the mean of the engine under test.
    oracle_divergence: the divergence with an oracle, which knows AR's output.
    oracle_acceptance_length: the mean with the oracle.
    full_acceptance_length: the mean that the oracle must reach if there is no
      divergence; None for tree policies that need not contain its whole draft.
    cache_error: logits of committed rows over the decoded cache, against a
      forward over the same text that reads no cache; relative, the worst of
      AR, DDTree and DDTree with the oracle.
    cache_noise: the change of AR's logits by padding, relative as well.
    context_error: the draft after decoding, against the draft after a prefill
      of the same text; relative to the largest logit.
    context_noise: how far that changes if the prefill takes smaller chunks.
    failures: one line each; empty if the audit passes.
  """

  prompt_ids: list[int]
  output_ids: list[int]
  divergence: Divergence | None
  acceptance_length: float
  oracle_divergence: Divergence | None
  oracle_acceptance_length: float
  full_acceptance_length: float | None
  cache_error: float
  cache_noise: float
  context_error: float
  context_noise: float
  failures: list[str]


def check_room(prompt: Sequence[int], capacity: int) -> None:
  """Raises a UserError for a prompt that fills the capacity."""
  if len(prompt) >= capacity:
    raise UserError(
      f'the prompt has {len(prompt)} tokens and the capacity is {capacity}: '
      'nothing is left to decode'
    )


def audit(
  target: api.Target,
  drafter: api.LoadedDrafter,
  prompt_ids: Sequence[int],
  **options: Unpack[GenerateKeywords],
) -> AuditReport:
  """Audits greedy decoding of one prompt.

  Args:
    target: the target.
    drafter: the drafter of the engine under test.
    prompt_ids: at least one token id.
    **options: fields of `GenerateOptions`; stop ids are ignored.

  Raises:
    UserError: bad input.
  """
  return audit_prompt(target, drafter, prompt_ids, GenerateOptions(**options))


def audit_prompt(
  target: api.Target,
  drafter: api.LoadedDrafter,
  prompt_ids: Sequence[int],
  options: GenerateOptions,
) -> AuditReport:
  """`audit` for callers that have a `GenerateOptions`."""
  options = dataclasses.replace(options, stop_ids=())
  if options.temperature > 0:
    raise UserError('the audit is greedy: samples are equal if logits are')
  api.check_pair(target, drafter)
  prompt = checks.integers(prompt_ids, 'prompt_ids')
  capacity = options.capacity or target.config.max_position_embeddings
  check_room(prompt, capacity)
  # The oracle's last round looks beyond the last token.
  longer = dataclasses.replace(
    options, max_new_tokens=options.further(drafter.block_size)
  )
  # One capacity for all: attention splits the cache by it.
  engine = generation.make_engine(target, None, len(prompt), longer)
  options, longer = (
    dataclasses.replace(each, capacity=engine.decode.capacity)
    for each in (options, longer)
  )
  found = _observe_all(target, drafter, prompt, options, longer)
  errors = [
    _cache_error(target, prompt, each, options.kernels)
    for each in (found.ar, found.tested, found.oracle)
  ]
  full = None
  if options.tree_policy in ('best_first', 'chain'):
    assert isinstance(options.tree_budget, int)
    horizon = min(drafter.block_size - 1, options.tree_budget)
    full = _full_acceptance(found.oracle, found.golden, horizon)
  context_error, context_noise = _context_error(
    target, drafter, found.tested.state, options
  )
  report = AuditReport(
    prompt_ids=prompt,
    output_ids=found.ar.output_ids,
    divergence=judge(target, prompt, found.ar, found.tested, found.padded),
    acceptance_length=float(np.mean(found.tested.accepted)),
    oracle_divergence=judge(
      target, prompt, found.ar, found.oracle, found.padded
    ),
    oracle_acceptance_length=float(np.mean(found.oracle.accepted)),
    full_acceptance_length=full,
    cache_error=float(np.max(errors)),
    cache_noise=_relative(found.padded.logits, found.ar.logits, target.dtype),
    context_error=context_error,
    context_noise=context_noise,
    failures=[],
  )
  dtype = jnp.dtype(target.dtype).name
  return dataclasses.replace(report, failures=_failures(report, dtype))


def _failures(report: AuditReport, dtype: str) -> list[str]:
  """The failures that a report's figures show, a line each."""
  found = []
  for name in ('divergence', 'oracle_divergence'):
    divergence = getattr(report, name)
    if divergence is not None and not divergence.near_tie:
      found.append(
        f'{name.replace("_", " ")} at position {divergence.position} is no '
        f'near-tie: gap {divergence.gap:.3g}, noise {divergence.noise:.3g}'
      )
  full = report.full_acceptance_length
  short = full is not None and report.oracle_acceptance_length < full
  if report.oracle_divergence is None and short:
    found.append(
      f'the oracle was accepted {report.oracle_acceptance_length:.2f} a round '
      f'instead of {report.full_acceptance_length:.2f}'
    )
  for name in ('cache', 'context'):
    error = getattr(report, f'{name}_error')
    noise = getattr(report, f'{name}_noise')
    allowed = TOLERANCE[dtype]
    if dtype != 'float32':
      allowed = max(allowed, TIMES_NOISE * noise)
      if not noise <= NOISIEST:
        found.append(f'{name} noise {noise:.3g}: too much to judge by')
    if not error <= allowed:
      found.append(f'{name} error {error:.3g}, noise {noise:.3g}')
  return found


class _Observations(NamedTuple):
  """The decoded rows that an audit compares.

  Attributes:
    golden: the prompt and AR's output, a block longer than `ar`.
    ar: AR.
    tested: DDTree with the drafter under test.
    oracle: DDTree with the oracle.
    padded: AR's tokens in rows that are padded to the tree's.
  """

  golden: list[int]
  ar: Observation
  tested: Observation
  oracle: Observation
  padded: Observation


def _observe_all(
  target: api.Target,
  drafter: api.LoadedDrafter,
  prompt: list[int],
  options: GenerateOptions,
  longer: GenerateOptions,
) -> _Observations:
  """Decodes a prompt by AR (with `longer`), DDTree, an oracle and padded AR."""
  oracle = api.load_drafter('oracle', target, drafter.block_size)
  null = NullDrafter(target.config.vocab_size, drafter.block_size)
  padding = dataclasses.replace(
    options, tree_policy='best_first', keep_top1_chain=False
  )
  requests = [
    _request(target, None, prompt, longer),
    _request(target, drafter, prompt, options, prompt),
    _request(target, oracle, prompt, options, prompt),
    _request(target, api.LoadedDrafter('null', null, {}), prompt, padding),
  ]
  # An audit of a large model is mostly compilation. Golden tokens change no
  # shape, so that all programs are compiled before AR's output is known.
  calls_of = [observed_calls(each) for each in requests]
  futures = iter(start_compiling(itertools.chain.from_iterable(calls_of)))
  programs = [list(itertools.islice(futures, len(c))) for c in calls_of]
  ar = observe(requests[0], programs[0])
  golden = [*prompt, *ar.output_ids]
  ar = ar.first(options.max_new_tokens)
  return _Observations(
    golden,
    ar,
    *(
      observe(_request(target, each, prompt, options, golden), compiled)
      for each, compiled in zip((drafter, oracle), programs[1:3], strict=True)
    ),
    padded=observe(requests[3], programs[3], ar.output_ids),
  )


def _request(
  target: api.Target,
  drafter: api.LoadedDrafter | None,
  prompt: list[int],
  options: GenerateOptions,
  golden: list[int] | None = None,
) -> generation.Request:
  """A request before prefill; only an oracle uses `golden`."""
  sequences = None if golden is None else [golden]
  return generation.prepare(target, drafter, [prompt], options, sequences)


def _full_acceptance(
  oracle: Observation, golden: list[int], horizon: int
) -> float:
  """The mean acceptance length of an oracle whose drafts are all accepted.

  It drafts `horizon` tokens, and fewer where its golden tokens end.
  """
  length = int(np.asarray(oracle.state.prompt_length)[0])
  wanted = []
  for accepted in oracle.accepted:
    wanted.append(1 + max(0, min(horizon, len(golden) - 1 - length)))
    length += accepted
  return float(np.mean(wanted))


def _relative(
  logits: Float[np.ndarray, 'tokens V'],
  wanted: Float[np.ndarray, 'tokens V'],
  dtype: DTypeLike,
) -> float:
  """The error of logits, relative to the largest.

  In float32 that of the worst position. In bfloat16 the median: at a near-tie
  another expert changes single positions as much as a fault would change all
  of them.
  """
  errors = np.abs(logits - wanted).max(axis=1) / np.abs(wanted).max()
  return float(errors.max() if dtype == jnp.float32 else np.median(errors))


def _cache_error(
  target: api.Target, prompt: list[int], found: Observation, kernels: str
) -> float:
  """The error of decoded logits against one forward over the whole text."""
  text = [*prompt, *found.output_ids]
  whole = generation.forward_logits(
    target, text, prefill_chunk=len(text), kernels=kernels
  )
  return _relative(found.logits, whole[len(prompt) :], target.dtype)


def _context_error(
  target: api.Target,
  drafter: api.LoadedDrafter,
  state: DecodeState,
  options: GenerateOptions,
) -> tuple[float, float]:
  """The error of the next draft against that after a fresh prefill, and noise.

  The noise is the error of a prefill in smaller chunks.
  """
  host = HostState.of(state)
  length = int(host.length[0])
  text, root = host.tokens[0, :length].tolist(), host.tokens[0, length]
  golden = [*text, int(root)] if drafter.drafter.needs_golden else None
  chunk = options.prefill_chunk
  requests = [
    _request(
      target,
      drafter,
      text,
      dataclasses.replace(
        options,
        capacity=state.stats.acceptance_length.shape[1],
        prefill_chunk=size,
      ),
      golden,
    )
    for size in (chunk, max(1, min(chunk, length) // 2))
  ]
  calls = [
    Call(function, engine, each.params, each.state)
    for each in requests
    for function, engine in (
      (prefill, each.engine.for_prefill()),
      (stages.draft, each.engine),
    )
  ]
  programs, _ = compile_all(calls)

  def fresh_draft(request, fill, draft):
    fresh = fill(request.params, request.state)
    # Prefill may have chosen another root at a near-tie.
    tokens = np.array(fresh.tokens)
    tokens[0, length] = root
    return draft(request.params, fresh.replace(tokens=jnp.asarray(tokens)))

  drafts = (
    fresh_draft(requests[0], *programs[:2]),
    programs[1](requests[0].params, state),
    fresh_draft(requests[1], *programs[2:]),
  )
  wanted, *others = (
    np.where(np.isneginf(logits), 0, logits)
    for logits in (np.asarray(each[0]) for each in drafts)
  )
  scale = np.abs(wanted).max(initial=1e-30)
  error, noise = (np.abs(x - wanted).max(initial=0) / scale for x in others)
  return float(error), float(noise)
