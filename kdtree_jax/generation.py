"""The public functions that generate: one prompt or a batch."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.api import LoadedDrafter, Target, check_pair
from kdtree_jax.benchmark.cost_measurement import resolve_costs
from kdtree_jax.calibrations import read_calibration
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
from kdtree_jax.decode.budget import init_budget
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
AUTO_WIDTHS = (16, 64)

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
    drafter: None decodes autoregressively, without the tree options.
    prompt_ids: at least one token id.
    golden_ids: prompt and continuation, for drafters that need them; default:
      decoded autoregressively first.
    record_rounds: keep the tree of every round; decodes round by round.
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

  Each row has its own tree, length, stop and seed; a finished row activates
  no expert. Arguments as in `generate`; `seeds`, one per prompt, replace the
  default of `seed` plus the prompt's index. `sampling`, one per prompt,
  replaces the seeds and all sampling options: temperatures may be mixed.
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
  """`generate_batch` with its options as a `GenerateOptions`."""
  request = prepare(target, drafter, prompts, options, golden, seeds, sampling)
  return _recorded(request) if record_rounds else finished(request)


@dataclasses.dataclass
class Request:
  """Everything that the drivers need, made of validated input."""

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
  """Validates prompts and options and makes a request of them."""
  check_pair(target, drafter)
  prompts = ids_of(target, prompts, 'prompts')
  if not prompts:
    raise UserError('no prompts')
  batch = len(prompts)
  longest = max(len(prompt) for prompt in prompts)
  if golden is not None:
    golden = ids_of(target, golden, 'golden')
  seeds, sampling = _sampling(options, batch, seeds, sampling)
  counted = {'seeds': seeds, 'golden': golden, 'sampling': sampling}
  for name, given in counted.items():
    if given is not None and len(given) != batch:
      raise UserError(f'{len(given)} {name} for {batch} prompts')
  sample = any(one.temperature > 0 for one in sampling)
  engine = make_engine(target, drafter, longest, options, sample)
  stops = target.stop_ids if options.stop_ids is None else options.stop_ids
  lengths = [options.max_new_tokens] * batch
  state = init_state(engine, prompts, lengths, stops, target.dtype, sampling)
  params = {'target': target.params, 'drafter': {}}
  if drafter is not None:
    params['drafter'] = drafter.params
    if drafter.drafter.needs_golden:
      if golden is None:
        golden = golden_continuations(
          target, drafter, prompts, options, sampling
        )
      params['drafter'] = golden_params(engine, golden)
  if engine.chooses:
    assert drafter is not None
    calibration = None
    if options.calibration is not None:
      calibration = read_calibration(options.calibration, drafter)
    params['costs'] = resolve_costs(options.costs, engine, params, state)
    budget = init_budget(params['costs'], calibration)
    state = state.replace(budget=budget)
  return Request(engine, params, state, options)


def ids_of(target: Target, rows: Any, name: str) -> list[list[int]]:
  """Rows of token ids, checked.

  Raises:
    UserError: a row is not a sequence of ids in the vocabulary.
  """
  rows = [
    integers(row, f'{name}[{i}]') for i, row in enumerate(sequence(rows, name))
  ]
  for row in rows:
    check_ids(row, target.config.vocab_size, name.removesuffix('s'))
  return rows


def _sampling(
  options: GenerateOptions,
  batch: int,
  seeds: Sequence[int] | None,
  sampling: Sequence[SamplingConfig] | None,
) -> tuple[list[int], list[SamplingConfig]]:
  """The seeds and sampling that are given, else those of the options."""
  if seeds is None:
    seeds = range(options.seed, options.seed + batch)
  seeds = integers(seeds, 'seeds')
  if sampling is None:
    return seeds, options.sampling(seeds)
  sampling = sequence(sampling, 'sampling')
  for i, one in enumerate(sampling):
    if not isinstance(one, SamplingConfig):
      raise UserError(f'sampling[{i}]={show(one)} is not a SamplingConfig')
  return seeds, sampling


def finished(request: Request) -> list[GenerateResult]:
  """Decodes to the end and leaves the last state in `request`."""
  request.state, seconds = drivers.decode_to_end(
    request.engine, request.params, request.state
  )
  return results(request.state, request.options, seconds)


def _recorded(request: Request) -> list[GenerateResult]:
  """Decodes round by round and keeps the trees; times include the host."""
  operands = (request.engine, request.params, request.state)
  compiled = drivers.traced_programs(*operands)[2]
  steps = drivers.traced(*operands)
  state, seconds, rounds, _ = collect(steps, len(request.state.done))
  seconds = seconds._replace(compile=compiled)
  return results(state, request.options, seconds, rounds)


Rounds = list[list[RoundRecord]]


def results(
  state: DecodeState,
  options: GenerateOptions,
  seconds: drivers.Seconds,
  rounds: Rounds | None = None,
) -> list[GenerateResult]:
  """The results of the rows of a last state, perhaps with their rounds."""
  host, count = HostState.of(state), options.max_new_tokens
  return [
    drivers.result_of(
      host, row, count, seconds, rounds[row] if rounds else None
    )
    for row in range(len(host.done))
  ]


def collect(
  steps: Iterable[tuple[DecodeState, RoundTrace | None]],
  batch: int,
) -> tuple[DecodeState, drivers.Seconds, Rounds, Rounds]:
  """Takes all steps and keeps the rounds of each row.

  Args:
    steps: states, the first after prefill and without a trace.
    batch: B.

  Returns:
    The last state, the times, and for every row two lists of rounds: with the
    path that was committed, and with the one along the target's own tokens.
  """
  committed, own = ([[] for _ in range(batch)] for _ in range(2))
  active = np.zeros(batch, np.bool_)
  begin = middle = time.perf_counter()
  for state, trace in steps:
    if trace is None:
      middle = time.perf_counter()
    else:
      # One transfer for all rows, without the largest array.
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
  sample: bool | None = None,
) -> Engine:
  """The static description of the program for a request.

  Args:
    target: the model.
    drafter: None decodes autoregressively.
    prompt_length: tokens of the longest prompt.
    options: how to generate.
    sample: whether a row has a temperature; default: whether the options do.

  Raises:
    UserError: no program has these options.
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
    sample=options.temperature > 0 if sample is None else sample,
  )
  if drafter is None:
    return Engine(target.config, None, decode)
  budget, widths = options.tree_budget, ()
  if isinstance(budget, str):
    budget, widths = 0, _widths(drafter, options)
  decode = dataclasses.replace(
    decode,
    draft_depth=drafter.block_size - 1,
    tree_budget=widths[-1] if widths else budget,
    widths=widths,
    tree_policy=options.tree_policy,
    keep_top1_chain=options.keep_top1_chain,
  )
  return Engine(target.config, drafter.drafter, decode)


def _widths(
  drafter: LoadedDrafter, options: GenerateOptions
) -> tuple[int, ...]:
  """The numbers of nodes that there is a program for if rounds choose.

  Few nodes cost as much in a program for 16 as in a smaller one, and 64 are
  more than pays on any model that was measured.
  """
  depth = drafter.block_size - 1
  if depth == 0:
    return ()
  return (depth,) if options.tree_policy == 'chain' else AUTO_WIDTHS


def golden_continuations(
  target: Target,
  drafter: LoadedDrafter,
  prompts: Prompts,
  options: GenerateOptions,
  sampling: Sequence[SamplingConfig] | None = None,
) -> list[list[int]]:
  """The prompts with the target's output, as far as any round drafts.

  Sampled as the request itself will be, since keys depend on positions only.
  """
  options = dataclasses.replace(
    options,
    max_new_tokens=options.further(drafter.block_size),
    stop_ids=(),
  )
  results = continue_prompts(target, None, prompts, options, sampling=sampling)
  return [[*result.prompt_ids, *result.output_ids] for result in results]


def golden_params(engine: Engine, sequences: Prompts) -> dict[str, jax.Array]:
  """The parameters of a drafter that needs golden sequences, one per row.

  Raises:
    UserError: an id is outside the vocabulary; int32 might wrap it.
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
  """`[T, V]` float32 logits of a causal forward over T ids.

  Uses the cache and the attention of decoding, chunk by chunk.

  Args:
    target: the model.
    ids: T token ids.
    prefill_chunk: tokens per step.
    kernels: `auto` or one implementation for all.
  """
  check_pair(target, None)
  ids = integers(ids, 'ids')
  prefill_chunk = integer(prefill_chunk, 'prefill_chunk', 1)
  max_length = target.config.max_position_embeddings
  check_prompt(ids, target.config.vocab_size, max_length)
  capacity = bucket(len(ids), max_length)
  decode = DecodeConfig(
    tree_budget=0,
    draft_depth=0,
    capacity=capacity,
    # A larger step would be padding.
    prefill_chunk=min(prefill_chunk, capacity),
    kernels=kernels,
  )
  engine = Engine(target.config, None, decode)
  state = init_state(engine, [ids], [1], (), target.dtype)
  params = {'target': target.params, 'drafter': {}}
  call = Call(drivers.forward_logits, engine, params, state)
  (program,), _ = compile_all([call])
  return np.asarray(program(params, state)[: len(ids)])


def bucket(num_tokens: int, max_length: int) -> int:
  """The capacity for a sequence: a power of two, at most `max_length`."""
  power = 1 << max(num_tokens - 1, MIN_CAPACITY - 1).bit_length()
  return min(power, max_length)
