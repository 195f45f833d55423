"""Is an engine still lossless? AR against DDTree, with a fair judge.

Rows of different shapes round differently, so in bfloat16 two exact engines
may part at a near-tie. A divergence is therefore judged by noise that is
measured without the engine under test: AR at N = 1 against AR padded to the
tree's N rows, on the same prefix. Equal tokens alone could hide a fault that
both share, or that only costs acceptance. So the audit also compares the
decoded cache with a forward that reads no cache, the drafter's context with a
fresh prefill, and the acceptance of an oracle with full acceptance.
"""

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdtree_jax import api, checks, generation
from kdtree_jax.decode import DecodeState, Engine, drivers
from kdtree_jax.decode import round as stages
from kdtree_jax.decode.compilation import Call, compile_all, start_compiling
from kdtree_jax.decode.engine import Params
from kdtree_jax.decode.state import HostState, all_done
from kdtree_jax.divergence import Divergence, Seen, judge
from kdtree_jax.drafters.null import NullDrafter
from kdtree_jax.errors import UserError
from kdtree_jax.options import GenerateKeywords, GenerateOptions

# A relative error may be as large as this or, but for float32, as so many times
# the noise that the audit measures: where experts flip at every rounding, a
# model is noisy. What a fault leaves is of the order of the values themselves,
# so that more noise than NOISIEST could hide it.
TOLERANCE = {'float32': 1e-3, 'bfloat16': 0.1}
TIMES_NOISE = 3
NOISIEST = 0.25

# Prefill and rounds, being compiled.
_Programs = Sequence[concurrent.futures.Future[jax.stages.Compiled]]


@dataclasses.dataclass(frozen=True)
class AuditReport:
  """What was found for one prompt.

  Attributes:
    prompt_ids: the prompt.
    output_ids: AR's.
    divergence: of DDTree from AR, or None: identical.
    acceptance_length: mean of the engine under test.
    oracle_divergence: the same with a drafter that knows AR's output.
    oracle_acceptance_length: mean with the oracle.
    full_acceptance_length: what the oracle must reach where it is identical;
      None for tree policies that need not contain its whole proposal.
    cache_error: logits of committed rows over the decoded cache, against a
      forward over the same text that reads no cache; relative, the worst of
      AR, DDTree and DDTree with the oracle.
    cache_noise: how far padding moves AR's logits, relative likewise.
    context_error: the draft after decoding, against the draft after a prefill
      of the same text; relative to the largest logit.
    context_noise: how far that moves if the prefill takes smaller chunks.
    failures: in words; empty if all is well.
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
  """Refuses a prompt after which nothing can be decoded."""
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
    target: the model.
    drafter: of the engine under test.
    prompt_ids: at least one token id.
    **options: fields of `GenerateOptions`; stop ids are ignored.

  Raises:
    UserError: bad input.
  """
  given = GenerateOptions(**options)
  return audit_prompt(target, drafter, prompt_ids, given)


def audit_prompt(
  target: api.Target,
  drafter: api.LoadedDrafter,
  prompt_ids: Sequence[int],
  options: GenerateOptions,
) -> AuditReport:
  """`audit` for callers that have a `GenerateOptions`."""
  fields = dataclasses.replace(options, stop_ids=())
  if fields.temperature > 0:
    raise UserError('the audit is greedy: draws are equal if logits are')
  api.check_pair(target, drafter)
  prompt = checks.integers(prompt_ids, 'prompt_ids')
  limit = fields.capacity or target.config.max_position_embeddings
  check_room(prompt, limit)
  # The oracle's last round looks beyond the last token.
  longer = dataclasses.replace(
    fields, max_new_tokens=fields.further(drafter.block_size)
  )
  # One capacity for all: how a cache is cut for attention depends on it.
  engine = generation.make_engine(target, None, len(prompt), longer)
  fields, longer = (
    dataclasses.replace(each, capacity=engine.decode.capacity)
    for each in (fields, longer)
  )
  oracle = api.load_drafter('oracle', target, drafter.block_size)
  requests = [
    _request(target, None, prompt, longer),
    _request(target, drafter, prompt, fields, [prompt]),
    _request(target, oracle, prompt, fields, [prompt]),
    _padding(target, drafter, prompt, fields),
  ]
  # An audit of a large model is mostly compilation. What a drafter is told
  # changes no shape, so that nothing waits for AR's output.
  calls_of = [_calls(request) for request in requests]
  calls = itertools.chain.from_iterable(calls_of)
  futures = iter(start_compiling(calls))
  programs = [list(itertools.islice(futures, len(c))) for c in calls_of]
  ar = _observe(requests[0], programs[0])
  golden = [[*prompt, *ar.output_ids]]
  ar = _first(ar, fields.max_new_tokens)
  tested, known = (
    _observe(_request(target, which, prompt, fields, golden), compiled)
    for which, compiled in zip((drafter, oracle), programs[1:3], strict=True)
  )
  padded = _padded(requests[3], programs[3], ar.output_ids)
  errors = [
    _cache_error(target, prompt, seen, fields.kernels)
    for seen in (ar, tested, known)
  ]
  full = None
  if fields.tree_policy in ('best_first', 'chain'):
    full = _full_acceptance(known, golden[0], drafter, fields)
  context_error, context_noise = _context_error(target, drafter, tested, fields)
  report = AuditReport(
    prompt_ids=prompt,
    output_ids=ar.output_ids,
    divergence=judge(target, prompt, ar, tested, padded),
    acceptance_length=float(np.mean(tested.accepted)),
    oracle_divergence=judge(target, prompt, ar, known, padded),
    oracle_acceptance_length=float(np.mean(known.accepted)),
    full_acceptance_length=full,
    cache_error=float(np.max(errors)),
    cache_noise=_relative(padded.logits, ar.logits, target.dtype),
    context_error=context_error,
    context_noise=context_noise,
    failures=[],
  )
  dtype = jnp.dtype(target.dtype).name
  return dataclasses.replace(report, failures=_failures(report, dtype))


def _failures(report: AuditReport, dtype: str) -> list[str]:
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


def _observed_round(engine: Engine, params: Params, state: DecodeState):
  """One round, and what the target saw along the committed path."""
  state, trace = stages.decode_round(engine, params, state)

  def along_path(x):
    path = trace.committed.path
    return jnp.take_along_axis(x, path[:, :, None], axis=1)[0]

  routing = [
    (along_path(layer.choice), along_path(layer.ids))
    for layer in trace.verified.out.routing
  ]
  return state, along_path(trace.verified.logits), routing


def _request(
  target: api.Target,
  drafter: api.LoadedDrafter | None,
  prompt: list[int],
  options: GenerateOptions,
  golden: list[list[int]] | None = None,
) -> generation.Request:
  """A request before prefill."""
  return generation.prepare(target, drafter, [prompt], options, golden)


def _calls(request: generation.Request) -> list[Call]:
  """A request's prefill and its observed rounds."""
  return drivers.round_calls(
    _observed_round, request.engine, request.params, request.state, donate=False
  )


def _observe(request: generation.Request, programs: _Programs) -> Seen:
  """Decodes round by round and keeps the rows of committed tokens."""
  fill, *steps = (program.result() for program in programs)
  step = drivers.round_step(request.engine, steps)
  state, rounds = fill(request.params, request.state), []
  while not all_done(state):
    state, logits, routing = step(request.params, state)
    rounds.append(_rows(logits, routing, _last_accepted(state)))
  return _seen(state, rounds)


def _padding(
  target: api.Target,
  drafter: api.LoadedDrafter,
  prompt: list[int],
  options: GenerateOptions,
) -> generation.Request:
  """A request of the tree's N rows, all but the root padding."""
  null = NullDrafter(target.config.vocab_size, drafter.block_size)
  options = dataclasses.replace(
    options, tree_policy='best_first', keep_top1_chain=False
  )
  drafter = api.LoadedDrafter('null', null, {})
  return _request(target, drafter, prompt, options)


def _padded(
  request: generation.Request, programs: _Programs, output_ids: list[int]
) -> Seen:
  """AR at the tree's N rows, with these output tokens in place of its own."""
  fill, *steps = (program.result() for program in programs)
  step = drivers.round_step(request.engine, steps)
  state, rounds = fill(request.params, request.state), []
  start = (0, int(HostState.of(state).prompt_length[0]))
  given = jnp.asarray(output_ids, jnp.int32)[None]
  while not all_done(state):
    state = state.replace(
      tokens=lax.dynamic_update_slice(state.tokens, given, start)
    )
    state, logits, routing = step(request.params, state)
    rounds.append(_rows(logits, routing, 1))
  return _seen(state, rounds)


def _last_accepted(state: DecodeState) -> int:
  accepted = np.asarray(state.stats.acceptance_length)
  return int(accepted[0, int(state.stats.rounds) - 1])


def _rows(logits, routing, count: int):
  """The committed rows of one round, on the host."""
  # Cut there: on the device every count would compile a program.
  logits, routing = jax.device_get((logits, routing))
  choice = [scores[:count] for scores, _ in routing]
  experts = [ids[:count] for _, ids in routing]
  return logits[:count], choice, experts


def _seen(state: DecodeState, rounds: list) -> Seen:
  host = HostState.of(state)
  start, length = int(host.prompt_length[0]), int(host.length[0])
  count = length - start

  def stacked(index: int) -> np.ndarray:
    layers = len(rounds[0][index]) if rounds else 0
    if not layers:
      return np.zeros((count, 0, 1))
    return np.stack(
      [
        np.concatenate([taken[index][layer] for taken in rounds])[:count]
        for layer in range(layers)
      ],
      axis=1,
    )

  accepted = host.stats.acceptance_length[0]
  return Seen(
    output_ids=host.tokens[0, start:length].tolist(),
    logits=np.concatenate([taken[0] for taken in rounds])[:count],
    choice=stacked(1),
    experts=stacked(2),
    accepted=accepted[accepted > 0].tolist(),
    state=state,
  )


def _first(seen: Seen, count: int) -> Seen:
  """What was seen of the first `count` tokens, one of each round."""
  return seen._replace(
    output_ids=seen.output_ids[:count],
    logits=seen.logits[:count],
    choice=seen.choice[:count],
    experts=seen.experts[:count],
    accepted=seen.accepted[:count],
  )


def _full_acceptance(
  known: Seen,
  golden: list[int],
  drafter: api.LoadedDrafter,
  options: GenerateOptions,
) -> float:
  """Mean of what an oracle must reach: all it proposes, as far as it knows.

  Near the last position it knows less than a block.
  """
  horizon = min(drafter.block_size - 1, options.tree_budget)
  length = int(np.asarray(known.state.prompt_length)[0])
  wanted = []
  for accepted in known.accepted:
    wanted.append(1 + max(0, min(horizon, len(golden) - 1 - length)))
    length += accepted
  return float(np.mean(wanted))


def _relative(logits: np.ndarray, wanted: np.ndarray, dtype: Any) -> float:
  """How far `[n, V]` logits are from others, relative to the largest.

  The worst position in float32. In bfloat16 the median one: an expert that
  flips at a near-tie changes single positions as much as a fault would change
  all of them.
  """
  errors = np.abs(logits - wanted).max(axis=1) / np.abs(wanted).max()
  return float(errors.max() if dtype == jnp.float32 else np.median(errors))


def _cache_error(
  target: api.Target, prompt: list[int], seen: Seen, kernels: str
) -> float:
  """Decoded logits against one forward over the whole text in one chunk."""
  text = [*prompt, *seen.output_ids]
  whole = generation.forward_logits(
    target, text, prefill_chunk=len(text), kernels=kernels
  )
  return _relative(seen.logits, whole[len(prompt) :], target.dtype)


def _context_error(
  target: api.Target,
  drafter: api.LoadedDrafter,
  tested: Seen,
  options: GenerateOptions,
) -> tuple[float, float]:
  """The next draft of the decoded state, against that of a fresh prefill.

  And the same for a prefill in smaller chunks, as the noise.
  """
  state = tested.state
  host = HostState.of(state)
  text = host.tokens[0, : int(host.length[0])].tolist()
  capacity = state.stats.acceptance_length.shape[1]
  options = dataclasses.replace(options, capacity=capacity)
  golden = None
  if drafter.drafter.needs_golden:
    golden = [host.tokens[0, : len(text) + 1].tolist()]

  chunk = options.prefill_chunk
  half = max(1, min(chunk, len(text)) // 2)
  requests = [
    _request(
      target,
      drafter,
      text,
      dataclasses.replace(options, prefill_chunk=size),
      golden,
    )
    for size in (chunk, half)
  ]
  (fill, draft, fill_half, draft_half), _ = compile_all(
    [
      Call(function, engine, request.params, request.state)
      for request in requests
      for function, engine in (
        (stages.prefill, request.engine.for_prefill()),
        (stages.draft, request.engine),
      )
    ]
  )

  def filled(
    request: generation.Request, fill: jax.stages.Compiled
  ) -> DecodeState:
    fresh = fill(request.params, request.state)
    # Prefill may have chosen another root at a near-tie.
    tokens = np.array(fresh.tokens)
    tokens[0, len(text)] = host.tokens[0, len(text)]
    return fresh.replace(tokens=jnp.asarray(tokens))

  drafts = (
    draft(requests[0].params, filled(requests[0], fill)),
    draft(requests[0].params, state),
    draft_half(requests[1].params, filled(requests[1], fill_half)),
  )
  wanted, *others = (
    np.where(np.isneginf(logits), 0, logits)
    for logits in (np.asarray(drafted[0]) for drafted in drafts)
  )
  scale = np.abs(wanted).max(initial=1e-30)
  error, noise = (np.abs(x - wanted).max(initial=0) / scale for x in others)
  return float(error), float(noise)
