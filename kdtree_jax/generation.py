"""Generating as a user calls it: one prompt, a batch, a stream, a talk."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax import registry
from kdtree_jax.api import LoadedDrafter, Target
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decode import (
  DecodeState,
  Engine,
  GenerateResult,
  RoundRecord,
  SamplingConfig,
  init_state,
)
from kdtree_jax.decode import generate as drivers
from kdtree_jax.decode.programs import PROGRAMS
from kdtree_jax.decode.state import (
  check_prompt,
  extend,
  token_slots,
  truncate,
)
from kdtree_jax.errors import UserError

MIN_CAPACITY = 64
PREFILL_CHUNK = 64

Prompts = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
  """How to generate; every field is a keyword of the functions here.

  Attributes:
    max_new_tokens: at least 1; the output has exactly so many tokens unless a
      stop token or the capacity ends it.
    tree_budget: draft nodes a round, the root not counted.
    tree_policy: `best_first` (DDTree) or `chain` (DFlash); see the registry.
    chain_seed: keep the most probable chain in the tree whatever its score.
    stop_ids: tokens that end the output; None: the checkpoint's.
    capacity: most tokens of prompt and output; None: the next power of two
      that holds both. One program serves every prompt within a capacity.
    prefill_chunk: prompt tokens a prefill step.
    kernels: `auto` or one implementation for all.
    temperature: 0 is greedy; see `SamplingConfig` for this and the next four.
    top_k: likewise.
    top_p: likewise.
    min_p: likewise.
    seed: of the first prompt; prompt i of a batch has seed + i.
  """

  max_new_tokens: int = 128
  tree_budget: int = 64
  tree_policy: str = 'best_first'
  chain_seed: bool = False
  stop_ids: tuple[int, ...] | None = None
  capacity: int | None = None
  prefill_chunk: int = PREFILL_CHUNK
  kernels: str = 'auto'
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def sampling(self, seeds: Sequence[int]) -> list[SamplingConfig]:
    """One request for each seed."""
    return [
      SamplingConfig(
        temperature=self.temperature,
        top_k=self.top_k,
        top_p=self.top_p,
        min_p=self.min_p,
        seed=seed,
      )
      for seed in seeds
    ]


def generate(
  target: Target,
  drafter: LoadedDrafter | None,
  prompt_ids: Sequence[int],
  *,
  golden_ids: Sequence[int] | None = None,
  record_rounds: bool = False,
  **options: Any,
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
  golden = None if golden_ids is None else [golden_ids]
  run = _prepare(target, drafter, [prompt_ids], golden, options)
  if record_rounds:
    return _recorded(run)
  return _finished(run)[0]


def generate_batch(
  target: Target,
  drafter: LoadedDrafter | None,
  prompts: Prompts,
  *,
  golden: Prompts | None = None,
  seeds: Sequence[int] | None = None,
  **options: Any,
) -> list[GenerateResult]:
  """Continues B prompts in one loop; each row equals its single run.

  Rows have their own tree, length, stop and seed; a finished row costs no
  expert. Arguments as in `generate`; `seeds`, one a prompt, replace the
  default of `seed` plus the prompt's index.
  """
  return _finished(_prepare(target, drafter, prompts, golden, options, seeds))


@dataclasses.dataclass(frozen=True)
class StreamUpdate:
  """What one step committed.

  Attributes:
    new_ids: B lists of tokens.
    rounds: rounds taken so far.
  """

  new_ids: list[list[int]]
  rounds: int


class Stream:
  """Iterates over `StreamUpdate`s; `results()` is what there is so far.

  An interrupted loop keeps its tokens: rows that are not done then have the
  stop reason `interrupted`.
  """

  def __init__(
    self,
    target: Target,
    drafter: LoadedDrafter | None,
    prompts: Prompts,
    *,
    rounds_per_step: int = 1,
    golden: Prompts | None = None,
    seeds: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    **options: Any,
  ):
    """Prepares and compiles; see `generate` for what is not named here.

    Args:
      target: the model.
      drafter: see `generate`.
      prompts: B prompts.
      rounds_per_step: rounds between two updates, through one program.
      golden: B golden sequences for drafters that need them.
      seeds: see `generate_batch`.
      stop_strings: a row ends with the token that completes one of them.
      decode: ids to text; needed for `stop_strings`.
      **options: fields of `GenerateOptions`.
    """
    if rounds_per_step < 1:
      raise UserError(f'rounds_per_step={rounds_per_step} is below 1')
    if stop_strings and decode is None:
      raise UserError('stop strings need a tokenizer')
    self._run = _prepare(target, drafter, prompts, golden, options, seeds)
    self._rounds_per_step = rounds_per_step
    self._stops, self._decode = tuple(stop_strings), decode
    run = self._run
    compiled = drivers.stream_programs(run.engine, run.params, run.state)[2]
    self._seconds = drivers.Seconds(0.0, 0.0, compiled)
    self._results: list[GenerateResult] = []

  def __iter__(self) -> Iterator[StreamUpdate]:
    run = self._run
    count = jnp.asarray(self._rounds_per_step, jnp.int32)
    fill, step, _ = drivers.stream_programs(run.engine, run.params, run.state)
    begin = time.perf_counter()
    state = jax.block_until_ready(fill(run.params, run.state))
    middle = time.perf_counter()
    compiled = self._seconds.compile
    seen = np.array(state.prompt_length)
    self._keep(state)
    while not bool(state.done.all()):
      state = jax.block_until_ready(step(run.params, state, count))
      state = self._stop_at_strings(state, seen)
      spent = time.perf_counter() - middle
      self._seconds = drivers.Seconds(middle - begin, spent, compiled)
      self._keep(state)
      tokens, length = np.asarray(state.tokens), np.asarray(state.length)
      new = [
        row[a:b].tolist()
        for row, a, b in zip(tokens, seen, length, strict=True)
      ]
      seen = np.array(length)
      yield StreamUpdate(new, int(state.stats.rounds))

  def results(self) -> list[GenerateResult]:
    """One result a row, as far as the stream was consumed."""
    return self._results

  def _keep(self, state: DecodeState) -> None:
    self._results = [
      drivers.result_of(
        state, row, self._run.options.max_new_tokens, self._seconds
      )
      for row in range(len(state.done))
    ]

  def _stop_at_strings(
    self, state: DecodeState, seen: np.ndarray
  ) -> DecodeState:
    """Ends the rows whose new tokens complete a stop string."""
    if not self._stops:
      return state
    for row in range(len(seen)):
      start, length = int(state.prompt_length[row]), int(state.length[row])
      output = np.asarray(state.tokens[row, start:length]).tolist()
      for count in range(int(seen[row]) - start + 1, len(output) + 1):
        text = self._decode(output[:count])
        if any(stop in text for stop in self._stops):
          state = truncate(state, row, start + count)
          break
    return state


class Conversation:
  """Turns over one cache: what was said is never prefilled again."""

  def __init__(
    self, target: Target, drafter: LoadedDrafter | None, **options: Any
  ):
    """Opens an empty conversation.

    Args:
      target: the model.
      drafter: one that needs no golden continuation, or None.
      **options: fields of `GenerateOptions`; without `capacity` it is the
        target's max_position_embeddings.
    """
    if drafter is not None and drafter.drafter.needs_golden:
      raise UserError(
        f'drafter {drafter.name} needs the continuation beforehand, which a '
        'conversation does not have'
      )
    self._target, self._drafter = target, drafter
    limit = target.config.max_position_embeddings
    options.setdefault('capacity', limit)
    self._options = GenerateOptions(**options)
    self._run: _Run | None = None

  def send(
    self, ids: Sequence[int], max_new_tokens: int | None = None
  ) -> GenerateResult:
    """Appends a turn and answers it.

    Args:
      ids: the turn's tokens, at least one.
      max_new_tokens: of this answer; default: that of the options.

    Returns:
      The answer; its `prompt_ids` are the whole text before it.

    Raises:
      UserError: the turn does not fit the capacity; nothing has changed.
    """
    options = self._options
    if max_new_tokens is not None:
      options = dataclasses.replace(options, max_new_tokens=max_new_tokens)
    fields = dataclasses.asdict(options)
    if self._run is None:
      run = _prepare(self._target, self._drafter, [ids], None, fields)
    else:
      run = dataclasses.replace(self._run, options=options)
      capacity, config = run.engine.decode.capacity, run.engine.config
      used = int(run.state.length[0])
      check_prompt(ids, config.vocab_size, capacity - used)
      if options.max_new_tokens < 1:
        raise UserError(f'max_new_tokens={options.max_new_tokens} is below 1')
      count = [options.max_new_tokens]
      run.state = extend(run.state, [list(ids)], count, capacity)
    result = _finished(run)[0]
    self._run = run
    return result


@dataclasses.dataclass
class _Run:
  """A validated request: all that the drivers need."""

  engine: Engine
  params: Any
  state: DecodeState
  options: GenerateOptions


def _prepare(
  target: Target,
  drafter: LoadedDrafter | None,
  prompts: Prompts,
  golden: Prompts | None,
  fields: dict[str, Any],
  seeds: Sequence[int] | None = None,
) -> _Run:
  options = GenerateOptions(**fields)
  prompts = [[int(i) for i in prompt] for prompt in prompts]
  if not prompts:
    raise UserError('no prompts')
  batch = len(prompts)
  longest = max(len(prompt) for prompt in prompts)
  if seeds is None:
    seeds = range(options.seed, options.seed + batch)
  engine = make_engine(target, drafter, longest, options)
  stops = target.stop_ids if options.stop_ids is None else options.stop_ids
  limits = [options.max_new_tokens] * batch
  state = init_state(
    engine, prompts, limits, stops, target.dtype, options.sampling(seeds)
  )
  params = {'target': target.params, 'drafter': {}}
  if drafter is not None:
    params['drafter'] = drafter.params
    if drafter.drafter.needs_golden:
      if golden is None:
        golden = golden_continuations(target, drafter, prompts, options, seeds)
      params['drafter'] = golden_params(engine, golden)
  return _Run(engine, params, state, options)


def _finished(run: _Run) -> list[GenerateResult]:
  run.state, seconds = drivers.generate(run.engine, run.params, run.state)
  return [
    drivers.result_of(run.state, row, run.options.max_new_tokens, seconds)
    for row in range(len(run.state.done))
  ]


def _recorded(run: _Run) -> GenerateResult:
  """Drives round by round and keeps the trees; times include the host."""
  engine, params, state = run.engine, run.params, run.state
  rounds: list[RoundRecord] = []
  compiled = drivers.traced_programs(engine, params, state)[2]
  begin = time.perf_counter()
  for step in drivers.traced(engine, params, state):
    last, trace = step
    if trace is None:
      middle = time.perf_counter()
    else:
      rounds.append(RoundRecord.of(trace, 0))
  end = time.perf_counter()
  seconds = drivers.Seconds(middle - begin, end - middle, compiled)
  count = run.options.max_new_tokens
  return drivers.result_of(last, 0, count, seconds, rounds)


def make_engine(
  target: Target,
  drafter: LoadedDrafter | None,
  prompt_length: int,
  options: GenerateOptions,
) -> Engine:
  """The description of the program that a request runs on."""
  registry.get('tree_policy', options.tree_policy)
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
    sample=options.temperature > 0,
  )
  if drafter is None:
    return Engine(target.config, None, decode)
  decode = dataclasses.replace(
    decode,
    draft_depth=drafter.block_size - 1,
    tree_budget=options.tree_budget,
    tree_policy=options.tree_policy,
    chain_seed=options.chain_seed,
  )
  return Engine(target.config, drafter.drafter, decode)


def golden_continuations(
  target: Target,
  drafter: LoadedDrafter,
  prompts: Prompts,
  options: GenerateOptions,
  seeds: Sequence[int] | None = None,
) -> list[list[int]]:
  """Prompts and what the target will say, as far as a round can look.

  Drawn like the request itself: the draws are keyed by position.
  """
  options = dataclasses.replace(
    options,
    max_new_tokens=options.max_new_tokens + drafter.block_size,
    stop_ids=(),
  )
  results = generate_batch(target, None, prompts, **dataclasses.asdict(options))
  return [[*result.prompt_ids, *result.output_ids] for result in results]


def golden_params(engine: Engine, sequences: Prompts) -> dict[str, jax.Array]:
  """Parameters of a drafter that needs golden sequences, one for each row."""
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
  ids = [int(i) for i in ids]
  limit = target.config.max_position_embeddings
  check_prompt(ids, target.config.vocab_size, limit)
  decode = DecodeConfig(
    tree_budget=0,
    draft_depth=0,
    capacity=bucket(len(ids), limit),
    prefill_chunk=prefill_chunk,
    kernels=kernels,
  )
  engine = Engine(target.config, None, decode)
  state = init_state(engine, [ids], [1], (), target.dtype)
  params = {'target': target.params, 'drafter': {}}
  program, _ = PROGRAMS.get(drivers.forward_logits, engine, params, state)
  return np.asarray(program(params, state)[: len(ids)])


def bucket(num_tokens: int, limit: int) -> int:
  """The next power of two, within what the positions allow."""
  power = 1 << max(num_tokens - 1, MIN_CAPACITY - 1).bit_length()
  return min(power, limit)
