"""Generating as a user calls it: one prompt or a batch."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.api import LoadedDrafter, Target, check_pair
from kdtree_jax.checks import integer, integers, sequence
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decode import (
  DecodeState,
  Engine,
  GenerateResult,
  RoundRecord,
  SamplingConfig,
  drivers,
  init_state,
)
from kdtree_jax.decode.compilation import Call, compile_all
from kdtree_jax.decode.round import RoundTrace
from kdtree_jax.decode.state import (
  HostState,
  check_ids,
  check_prompt,
  token_slots,
)
from kdtree_jax.errors import UserError, show
from kdtree_jax.options import (
  PREFILL_CHUNK,
  GenerateKeywords,
  GenerateOptions,
)

MIN_CAPACITY = 64

Prompts = Sequence[Sequence[int]]


def generate(
  target: Target,
  drafter: LoadedDrafter | None,
  prompt_ids: Sequence[int],
  *,
  golden_ids: Sequence[int] | None = None,
  record_rounds: bool = False,
  **options: Unpack[GenerateKeywords],
) -> GenerateResult:
  """Continues one prompt.

  Args:
    target: the model.
    drafter: None decodes autoregressively, and the tree options are not used.
    prompt_ids: at least one token id.
    golden_ids: for drafters that need it, prompt and continuation; default:
      found by decoding autoregressively first.
    record_rounds: keep every round's tree; decodes round by round.
    **options: fields of `GenerateOptions`.

  Raises:
    UserError: bad input, before anything is compiled.
  """
  prompt_ids = integers(prompt_ids, 'prompt_ids')
  golden = None
  if golden_ids is not None:
    golden = [integers(golden_ids, 'golden_ids')]
  (result,) = continue_prompts(
    target,
    drafter,
    [prompt_ids],
    GenerateOptions(**options),
    golden=golden,
    record_rounds=record_rounds,
  )
  return result


def generate_batch(
  target: Target,
  drafter: LoadedDrafter | None,
  prompts: Prompts,
  *,
  golden: Prompts | None = None,
  seeds: Sequence[int] | None = None,
  sampling: Sequence[SamplingConfig] | None = None,
  record_rounds: bool = False,
  **options: Unpack[GenerateKeywords],
) -> list[GenerateResult]:
  """Continues B prompts in one loop; each row equals its single run.

  Rows have their own tree, length, stop and seed; a finished row costs no
  expert. Arguments as in `generate`; `seeds`, one a prompt, replace the
  default of `seed` plus the prompt's index. `sampling`, one a prompt,
  replaces seeds and all options of drawing: temperatures may be mixed.
  """
  return continue_prompts(
    target,
    drafter,
    prompts,
    GenerateOptions(**options),
    golden=golden,
    seeds=seeds,
    sampling=sampling,
    record_rounds=record_rounds,
  )


def continue_prompts(
  target: Target,
  drafter: LoadedDrafter | None,
  prompts: Prompts,
  options: GenerateOptions,
  *,
  golden: Prompts | None = None,
  seeds: Sequence[int] | None = None,
  sampling: Sequence[SamplingConfig] | None = None,
  record_rounds: bool = False,
) -> list[GenerateResult]:
  """`generate_batch` for callers that have a `GenerateOptions`."""
  request = prepare(target, drafter, prompts, options, golden, seeds, sampling)
  return _recorded(request) if record_rounds else finished(request)


@dataclasses.dataclass(frozen=True)
class ForcedResult:
  """One text, followed by `force`.

  Attributes:
    by_text: the walks along the text; its output is the text itself.
    by_target: the walks along the target's own tokens, from the same roots.
  """

  by_text: GenerateResult
  by_target: GenerateResult


def force(
  target: Target,
  drafter: LoadedDrafter,
  texts: Prompts,
  prompt_length: int,
  **options: Unpack[GenerateKeywords],
) -> list[ForcedResult]:
  """Follows B texts: every round commits what the text says.

  Args:
    target: the model.
    drafter: one that needs no golden continuation.
    texts: B sequences of at least `prompt_length + max_new_tokens` ids.
    prompt_length: tokens of each that are the prompt.
    **options: fields of `GenerateOptions`; nothing stops a text.

  Raises:
    UserError: a text is too short, or bad input.
  """
  given = GenerateOptions(**options)
  return follow_texts(target, drafter, texts, prompt_length, given)


def follow_texts(
  target: Target,
  drafter: LoadedDrafter,
  texts: Prompts,
  prompt_length: int,
  options: GenerateOptions,
) -> list[ForcedResult]:
  """`force` for callers that have a `GenerateOptions`."""
  options = dataclasses.replace(options, stop_ids=())
  check_pair(target, drafter)
  if drafter is None or drafter.drafter.needs_golden:
    name = drafter and drafter.name
    raise UserError(f'drafter {name} cannot follow a text; give a DFlash one')
  prompt_length = integer(prompt_length, 'prompt_length', 1)
  texts = _ids_of(target, texts, 'texts')
  least = prompt_length + options.max_new_tokens
  if min((len(text) for text in texts), default=least) < least:
    raise UserError(f'a text to follow has fewer than {least} tokens')
  prompts = [text[:prompt_length] for text in texts]
  request = prepare(target, drafter, prompts, options)
  text = golden_params(request.engine, texts)['golden']
  steps = drivers.traced(request.engine, request.params, request.state, text)
  state, seconds, along, own = _collect(steps, len(texts))
  host, results = HostState.of(state), []
  for row, (by_text, by_target) in enumerate(zip(along, own, strict=True)):
    count = options.max_new_tokens
    result = drivers.result_of(host, row, count, seconds, by_text)
    walks = [len(seen.accepted_indices) for seen in by_target]
    other = dataclasses.replace(
      result, acceptance_lengths=walks, rounds=by_target
    )
    results.append(ForcedResult(result, other))
  return results


@dataclasses.dataclass
class Request:
  """Validated prompts and options: all that the drivers need."""

  engine: Engine
  params: Any
  state: DecodeState
  options: GenerateOptions


def prepare(
  target: Target,
  drafter: LoadedDrafter | None,
  prompts: Prompts,
  options: GenerateOptions,
  golden: Prompts | None = None,
  seeds: Sequence[int] | None = None,
  sampling: Sequence[SamplingConfig] | None = None,
) -> Request:
  """Validates a request and builds all that the drivers need."""
  check_pair(target, drafter)
  prompts = _ids_of(target, prompts, 'prompts')
  if not prompts:
    raise UserError('no prompts')
  batch = len(prompts)
  longest = max(len(prompt) for prompt in prompts)
  if golden is not None:
    golden = _ids_of(target, golden, 'golden')
  seeds, sampling = _draws(options, batch, seeds, sampling)
  counted = {'seeds': seeds, 'golden': golden, 'sampling': sampling}
  for name, given in counted.items():
    if given is not None and len(given) != batch:
      raise UserError(f'{len(given)} {name} for {batch} prompts')
  drawn = any(one.temperature > 0 for one in sampling)
  engine = make_engine(target, drafter, longest, options, drawn)
  stops = target.stop_ids if options.stop_ids is None else options.stop_ids
  limits = [options.max_new_tokens] * batch
  state = init_state(engine, prompts, limits, stops, target.dtype, sampling)
  params = {'target': target.params, 'drafter': {}}
  if drafter is not None:
    params['drafter'] = drafter.params
    if drafter.drafter.needs_golden:
      if golden is None:
        golden = golden_continuations(
          target, drafter, prompts, options, sampling
        )
      params['drafter'] = golden_params(engine, golden)
  return Request(engine, params, state, options)


def _ids_of(target: Target, rows: Any, name: str) -> list[list[int]]:
  """Rows of token ids, checked.

  Raises:
    UserError: what is no sequence of integers, or outside the vocabulary.
  """
  rows = [
    integers(row, f'{name}[{i}]') for i, row in enumerate(sequence(rows, name))
  ]
  for row in rows:
    check_ids(row, target.config.vocab_size, name.removesuffix('s'))
  return rows


def _draws(
  options: GenerateOptions,
  batch: int,
  seeds: Sequence[int] | None,
  sampling: Sequence[SamplingConfig] | None,
) -> tuple[list[int], list[SamplingConfig]]:
  """Seeds and requests as they were given, or as the options say."""
  if seeds is None:
    seeds = range(options.seed, options.seed + batch)
  seeds = integers(seeds, 'seeds')
  if sampling is None:
    return seeds, options.sampling(seeds)
  sampling = sequence(sampling, 'sampling')
  for i, one in enumerate(sampling):
    if not isinstance(one, SamplingConfig):
      raise UserError(f'sampling[{i}]={show(one)} is no SamplingConfig')
  return seeds, sampling


def finished(request: Request) -> list[GenerateResult]:
  """Runs a request to its end; leaves the last state in `request`."""
  request.state, seconds = drivers.decode_to_end(
    request.engine, request.params, request.state
  )
  host, count = HostState.of(request.state), request.options.max_new_tokens
  return [
    drivers.result_of(host, row, count, seconds)
    for row in range(len(host.done))
  ]


def _recorded(request: Request) -> list[GenerateResult]:
  """Drives round by round and keeps the trees; times include the host."""
  operands = (request.engine, request.params, request.state)
  compiled = drivers.traced_programs(*operands)[2]
  steps = drivers.traced(*operands)
  state, seconds, rounds, _ = _collect(steps, len(request.state.done))
  seconds = seconds._replace(compile=compiled)
  host, count = HostState.of(state), request.options.max_new_tokens
  return [
    drivers.result_of(host, row, count, seconds, seen)
    for row, seen in enumerate(rounds)
  ]


_Rounds = list[list[RoundRecord]]


def _collect(
  steps: Iterable[tuple[DecodeState, RoundTrace | None]],
  batch: int,
) -> tuple[DecodeState, drivers.Seconds, _Rounds, _Rounds]:
  """Drives to the end.

  Args:
    steps: states, the first after prefill and without a trace.
    batch: B.

  Returns:
    The last state, the times, and for every row the rounds with the walk that
    was committed and those with the walk along the target's own tokens.
  """
  committed, own = ([[] for _ in range(batch)] for _ in range(2))
  active = np.zeros(batch, np.bool_)
  begin = time.perf_counter()
  for state, trace in steps:
    if trace is None:
      middle = time.perf_counter()
    else:
      # Once for all rows, and without the largest array.
      bits = np.zeros((*trace.tree.tokens.shape, 0), np.uint32)
      tree = trace.tree.replace(ancestors=bits)
      trace = jax.device_get(trace.replace(tree=tree))
      for row in np.flatnonzero(active).tolist():
        committed[row].append(RoundRecord.of(trace.tree, trace.committed, row))
        own[row].append(RoundRecord.of(trace.tree, trace.acceptance, row))
    # A copy: the next step consumes the state.
    active = ~np.array(state.done)
  end = time.perf_counter()
  seconds = drivers.Seconds(middle - begin, end - middle, 0.0)
  return state, seconds, committed, own


def make_engine(
  target: Target,
  drafter: LoadedDrafter | None,
  prompt_length: int,
  options: GenerateOptions,
  drawn: bool | None = None,
) -> Engine:
  """The description of the program that a request runs on.

  `drawn`: some row has a temperature; default: what the options say.
  """
  if options.kernels == 'mosaic_gpu' and target.dtype == jnp.float32:
    raise UserError(
      'kernels=mosaic_gpu needs dtype=bfloat16: tensor cores would round '
      'float32'
    )
  capacity = options.capacity
  if capacity is None:
    capacity = bucket(
      prompt_length + options.max_new_tokens,
      target.config.max_position_embeddings,
    )
  decode = DecodeConfig(
    draft_depth=0,
    tree_budget=0,
    capacity=capacity,
    prefill_chunk=min(options.prefill_chunk, capacity),
    kernels=options.kernels,
    sample=options.temperature > 0 if drawn is None else drawn,
  )
  if drafter is None:
    return Engine(target.config, None, decode)
  decode = dataclasses.replace(
    decode,
    draft_depth=drafter.block_size - 1,
    tree_budget=options.tree_budget,
    tree_policy=options.tree_policy,
    keep_top1_chain=options.keep_top1_chain,
  )
  return Engine(target.config, drafter.drafter, decode)


def golden_continuations(
  target: Target,
  drafter: LoadedDrafter,
  prompts: Prompts,
  options: GenerateOptions,
  sampling: Sequence[SamplingConfig] | None = None,
) -> list[list[int]]:
  """Prompts and what the target will say, as far as a round can look.

  Drawn like the request itself: the draws are keyed by position.
  """
  options = dataclasses.replace(
    options,
    max_new_tokens=options.further(drafter.block_size),
    stop_ids=(),
  )
  results = continue_prompts(target, None, prompts, options, sampling=sampling)
  return [[*result.prompt_ids, *result.output_ids] for result in results]


def golden_params(engine: Engine, sequences: Prompts) -> dict[str, jax.Array]:
  """Parameters of a drafter that needs golden sequences, one for each row.

  Raises:
    UserError: an id outside the vocabulary, which int32 might wrap.
  """
  vocab_size = engine.config.vocab_size
  for token in itertools.chain.from_iterable(sequences):
    if not 0 <= token < vocab_size:
      raise UserError(
        f'golden id {token} is outside the vocabulary of {vocab_size}'
      )
  golden = np.full((len(sequences), token_slots(engine)), -1, np.int32)
  for row, ids in zip(golden, sequences, strict=True):
    count = min(len(ids), len(row))
    row[:count] = ids[:count]
  return {'golden': jnp.asarray(golden)}


def forward_logits(
  target: Target,
  ids: Sequence[int],
  *,
  prefill_chunk: int = PREFILL_CHUNK,
  kernels: str = 'auto',
) -> np.ndarray:
  """`[T, V]` float32 logits of a full causal forward over T ids.

  Goes through the cache and the attention of decoding, chunk by chunk.

  Args:
    target: the model.
    ids: T token ids.
    prefill_chunk: tokens a step.
    kernels: `auto` or one implementation for all.
  """
  check_pair(target, None)
  ids = integers(ids, 'ids')
  prefill_chunk = integer(prefill_chunk, 'prefill_chunk', 1)
  limit = target.config.max_position_embeddings
  check_prompt(ids, target.config.vocab_size, limit)
  decode = DecodeConfig(
    tree_budget=0,
    draft_depth=0,
    capacity=bucket(len(ids), limit),
    # A larger step would be padding.
    prefill_chunk=min(prefill_chunk, bucket(len(ids), limit)),
    kernels=kernels,
  )
  engine = Engine(target.config, None, decode)
  state = init_state(engine, [ids], [1], (), target.dtype)
  params = {'target': target.params, 'drafter': {}}
  call = Call(drivers.forward_logits, engine, params, state)
  (program,), _ = compile_all([call])
  return np.asarray(program(params, state)[: len(ids)])


def bucket(num_tokens: int, limit: int) -> int:
  """The next power of two, within what the positions allow."""
  power = 1 << max(num_tokens - 1, MIN_CAPACITY - 1).bit_length()
  return min(power, limit)
