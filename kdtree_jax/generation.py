"""Generating as a user calls it: one prompt or a batch."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
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
from kdtree_jax.decode.forced import forced
from kdtree_jax.decode.programs import PROGRAMS
from kdtree_jax.decode.round import RoundTrace
from kdtree_jax.decode.state import (
  HostState,
  check_prompt,
  token_slots,
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
  run = prepare(target, drafter, [prompt_ids], golden, options)
  return (_recorded(run) if record_rounds else finished(run))[0]


def generate_batch(
  target: Target,
  drafter: LoadedDrafter | None,
  prompts: Prompts,
  *,
  golden: Prompts | None = None,
  seeds: Sequence[int] | None = None,
  sampling: Sequence[SamplingConfig] | None = None,
  record_rounds: bool = False,
  **options: Any,
) -> list[GenerateResult]:
  """Continues B prompts in one loop; each row equals its single run.

  Rows have their own tree, length, stop and seed; a finished row costs no
  expert. Arguments as in `generate`; `seeds`, one a prompt, replace the
  default of `seed` plus the prompt's index. `sampling`, one a prompt,
  replaces seeds and all options of drawing: temperatures may be mixed.
  """
  run = prepare(target, drafter, prompts, golden, options, seeds, sampling)
  return _recorded(run) if record_rounds else finished(run)


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
  **options: Any,
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
  options = options | {'stop_ids': ()}
  prompts = [text[:prompt_length] for text in texts]
  run = prepare(target, drafter, prompts, None, options)
  least = prompt_length + run.options.max_new_tokens
  if min(len(text) for text in texts) < least:
    raise UserError(f'a text to follow has fewer than {least} tokens')
  text = golden_params(run.engine, texts)['golden']
  steps = forced(run.engine, run.params, run.state, text)
  state, seconds, (along, own) = _collect(steps, len(texts), 2)
  host, results = HostState.of(state), []
  for row, (by_text, by_target) in enumerate(zip(along, own, strict=True)):
    count = run.options.max_new_tokens
    result = drivers.result_of(host, row, count, seconds, by_text)
    walks = [len(seen.accepted_indices) for seen in by_target]
    other = dataclasses.replace(
      result, acceptance_lengths=walks, rounds=by_target
    )
    results.append(ForcedResult(result, other))
  return results


@dataclasses.dataclass
class Run:
  """A validated request: all that the drivers need."""

  engine: Engine
  params: Any
  state: DecodeState
  options: GenerateOptions


def prepare(
  target: Target,
  drafter: LoadedDrafter | None,
  prompts: Prompts,
  golden: Prompts | None,
  fields: dict[str, Any],
  seeds: Sequence[int] | None = None,
  sampling: Sequence[SamplingConfig] | None = None,
) -> Run:
  """Validates a request and builds all that the drivers need."""
  options = GenerateOptions(**fields)
  prompts = [[int(i) for i in prompt] for prompt in prompts]
  if not prompts:
    raise UserError('no prompts')
  batch = len(prompts)
  longest = max(len(prompt) for prompt in prompts)
  if seeds is None:
    seeds = range(options.seed, options.seed + batch)
  if sampling is None:
    sampling = options.sampling(seeds)
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
  return Run(engine, params, state, options)


def finished(run: Run) -> list[GenerateResult]:
  """Runs a request to its end; leaves the last state in `run`."""
  run.state, seconds = drivers.generate(run.engine, run.params, run.state)
  host = HostState.of(run.state)
  return [
    drivers.result_of(host, row, run.options.max_new_tokens, seconds)
    for row in range(len(host.done))
  ]


def _recorded(run: Run) -> list[GenerateResult]:
  """Drives round by round and keeps the trees; times include the host."""
  operands = (run.engine, run.params, run.state)
  compiled = drivers.traced_programs(*operands)[2]
  steps = (
    (state, None if trace is None else (trace,))
    for state, trace in drivers.traced(*operands)
  )
  state, seconds, (rounds,) = _collect(steps, len(run.state.done), 1)
  seconds = seconds._replace(compile=compiled)
  host, count = HostState.of(state), run.options.max_new_tokens
  return [
    drivers.result_of(host, row, count, seconds, seen)
    for row, seen in enumerate(rounds)
  ]


def _collect(
  steps: Iterable[tuple[DecodeState, Sequence[RoundTrace] | None]],
  batch: int,
  kinds: int,
) -> tuple[DecodeState, drivers.Seconds, list[list[list[RoundRecord]]]]:
  """Drives to the end: the last state, times, and rounds of kind and row.

  Args:
    steps: states, the first after prefill and without traces.
    batch: B.
    kinds: traces a step.
  """
  rounds = [[[] for _ in range(batch)] for _ in range(kinds)]
  active = np.zeros(batch, np.bool_)
  begin = time.perf_counter()
  for state, traces in steps:
    if traces is None:
      middle = time.perf_counter()
    else:
      for kind, trace in zip(rounds, traces, strict=True):
        # Once for all rows, and without the largest array.
        tree = trace.tree.replace(ancestors=())
        trace = jax.device_get(trace._replace(tree=tree))
        for row in np.flatnonzero(active):
          kind[row].append(RoundRecord.of(trace, row))
    # A copy: the next step consumes the state.
    active = ~np.array(state.done)
  end = time.perf_counter()
  return state, drivers.Seconds(middle - begin, end - middle, 0.0), rounds


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
  registry.get('tree_policy', options.tree_policy)
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
    chain_seed=options.chain_seed,
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
    max_new_tokens=options.max_new_tokens + drafter.block_size,
    stop_ids=(),
  )
  results = generate_batch(
    target, None, prompts, sampling=sampling, **dataclasses.asdict(options)
  )
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
