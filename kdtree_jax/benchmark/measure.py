"""Times of the engine's own programs, measured in loops on the device."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, PyTree

from kdtree_jax.benchmark import machine, stage_loops, traffic
from kdtree_jax.benchmark.cost_measurement import random_rows
from kdtree_jax.benchmark.model_pair import ModelPair
from kdtree_jax.decode import DecodeState, Engine, init_state
from kdtree_jax.decode.compilation import (
  Call,
  Function,
  compile_all,
  start_compiling,
)
from kdtree_jax.decode.drivers import ALL, decode_rounds
from kdtree_jax.decode.prefill import prefill
from kdtree_jax.decode.state import empty_stats


@dataclasses.dataclass(frozen=True)
class Repetitions:
  """Numbers of runs, tokens and calls for one figure.

  Attributes:
    runs: repetitions of every measurement, after one to warm up.
    tokens: tokens of the short and of the long run, whose times are subtracted.
    calls: calls of a stage in the short and in the long run.
    routed_rounds: rounds whose active experts are counted.
  """

  runs: int = 5
  tokens: tuple[int, int] = (8, 32)
  calls: tuple[int, int] = (10, 110)
  routed_rounds: int = 4


# For machines on which the figures mean nothing.
QUICK = Repetitions(2, (2, 42), (1, 11), 2)


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds a round over several runs.

  Attributes:
    seconds: the median.
    least: the fastest run.
    most: the slowest run.
    tokens: tokens committed a round.
  """

  seconds: float
  least: float
  most: float
  tokens: float = 0.0

  @classmethod
  def of(cls, values: Sequence[float], tokens: float = 0.0) -> 'Timing':
    """The statistics of several runs."""
    return cls(statistics.median(values), min(values), max(values), tokens)

  def as_dict(self) -> dict[str, float]:
    """Milliseconds under the names of result files."""
    return {
      'ms': self.seconds * 1e3,
      'ms_min': self.least * 1e3,
      'ms_max': self.most * 1e3,
    }


class StepTimer:
  """Times all programs of a sweep on one state, which is filled once.

  The rows of the caches are random and finite. The time of a step does not
  depend on their values, and to fill a long context by prefill would take
  longer than all measurements over it.
  """

  def __init__(
    self, pair: ModelPair, repetitions: Repetitions, loop_seconds: float
  ):
    self.pair = pair
    self.repetitions = repetitions
    self.loop_seconds = loop_seconds
    engine = pair.engine(0)
    dtype = pair.target.dtype
    state = init_state(engine, [[0]], [1], (), dtype)
    filled = jax.tree.map(
      random_rows, (state.cache.latent, state.drafter_state)
    )
    vocab, slots = engine.config.vocab_size, state.tokens.shape[1]
    rng = np.random.default_rng(0)
    self._tokens = rng.integers(0, vocab, (1, slots)).astype(np.int32)
    self._state = state.replace(
      cache=state.cache.replace(latent=filled[0]), drafter_state=filled[1]
    )

  @property
  def state_bytes(self) -> int:
    """Bytes of the state."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))

  def cache_bytes(self, context: int) -> tuple[int, int]:
    """Bytes of the committed rows: the target's and the drafter's."""
    latent = self._state.cache.latent
    rows = latent.shape[2]
    drafter = sum(x.nbytes for x in jax.tree.leaves(self._state.drafter_state))
    return latent.nbytes // rows * context, drafter // rows * context

  def state(
    self, engine: Engine, context: int, new_tokens: int, prompt: int = 0
  ) -> DecodeState:
    """The state at a context, its last `prompt` tokens not prefilled yet."""

    def vector(value, dtype=jnp.int32):
      return jnp.full((1,), value, dtype)

    state = self._state
    return state.replace(
      tokens=jnp.asarray(self._tokens),
      prompt_length=vector(context),
      max_length=vector(context + new_tokens),
      done=vector(False, jnp.bool_),
      stopped=vector(False, jnp.bool_),
      cache=state.cache.replace(length=vector(context - prompt)),
      drafter_state=state.drafter_state if engine.drafter else (),
      stats=empty_stats(1, self.pair.capacity),
    )

  def keep(self, state: DecodeState) -> None:
    """Takes the caches back from a program that consumed them."""
    drafter_state = state.drafter_state
    if not jax.tree.leaves(drafter_state):
      drafter_state = self._state.drafter_state
    self._state = state.replace(drafter_state=drafter_state)

  def call(self, function: Function, engine: Engine, *operands: PyTree) -> Call:
    """A program on this state.

    It consumes its state unless it is a loop over a stage that only reads it.
    """
    state = jax.eval_shape(lambda: self.state(engine, 1, 1))
    donate = function not in (
      stage_loops.draft_loop,
      stage_loops.build_loop,
      stage_loops.accept_loop,
    )
    params = self.pair.params(engine)
    return Call(function, engine, params, state, operands, donate)

  def program(
    self, function: Function, engine: Engine, *operands: PyTree
  ) -> jax.stages.Compiled:
    """The compiled program of a call."""
    (program,), _ = compile_all([self.call(function, engine, *operands)])
    return program

  def stage_calls(self, engine: Engine) -> list[Call]:
    """The loops over single stages, each on the shapes of the last one's."""
    params = self.pair.params(engine)
    state = jax.eval_shape(lambda: self.state(engine, 1, 1))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    calls = []

    def shapes(function, *operands):
      calls.append(self.call(function, engine, count, *operands))
      call = functools.partial(function, engine)
      return jax.eval_shape(call, params, state, count, *operands)

    drafted = shapes(stage_loops.draft_loop)
    tree = shapes(stage_loops.build_loop, drafted)
    acceptance = shapes(stage_loops.accept_loop, tree, tree.tokens)
    out = jax.eval_shape(
      lambda s, t: stage_loops.forward_output(engine, s, t), state, tree
    )
    shapes(stage_loops.commit_loop, tree, out, acceptance)
    return calls

  def decode(
    self, program: jax.stages.Compiled, engine: Engine, context: int, count: int
  ) -> tuple[float, int, int]:
    """Seconds, rounds and tokens of a loop that runs for `count` tokens."""
    state = jax.block_until_ready(self.state(engine, context, count))
    begin = time.perf_counter()
    state = program(self.pair.params(engine), state, ALL)
    jax.block_until_ready(state.stats.rounds)
    seconds = time.perf_counter() - begin
    self.keep(state)
    return seconds, int(state.stats.rounds), int(state.length[0]) - context

  def rounds(self, engine: Engine, context: int) -> Timing:
    """Seconds a round inside the compiled loop, at a context.

    The time of a short run is subtracted from that of a long one, and with it
    the cost of a call.
    """
    program = self.program(decode_rounds, engine, ALL)
    self.decode(program, engine, context, self.repetitions.tokens[0])
    values, taken = [], []
    for _ in range(self.repetitions.runs):
      short, long = (
        self.decode(program, engine, context, count)
        for count in self.repetitions.tokens
      )
      count = max(long[1] - short[1], 1)
      values.append((long[0] - short[0]) / count)
      taken.append((long[2] - short[2]) / count)
    return Timing.of(values, statistics.mean(taken))

  def prefill(self, engine: Engine, context: int) -> tuple[Timing, int]:
    """Seconds to prefill the last `prefill_chunk` tokens of a context."""
    count = min(context, self.pair.prefill_chunk)
    program = self.program(prefill, engine.for_prefill())
    values = []
    for _ in range(1 + self.repetitions.runs):
      state = self.state(engine.for_prefill(), context, 1, count)
      jax.block_until_ready(state)
      begin = time.perf_counter()
      state = program(self.pair.params(engine), state)
      jax.block_until_ready(state.tokens)
      values.append(time.perf_counter() - begin)
      self.keep(state)
    return Timing.of(values[1:]), count

  def routed(
    self, engine: Engine, context: int
  ) -> list[Int32[np.ndarray, 'moe_layers N K']]:
    """Expert ids of a few successive rounds."""
    program = self.program(stage_loops.routed_round, engine)
    state = self.state(engine, context, self.pair.room)
    found = []
    for _ in range(self.repetitions.routed_rounds):
      state, ids = program(self.pair.params(engine), state)
      found.append(np.asarray(ids))
    self.keep(state)
    return found

  def draft_seconds(
    self, engine: Engine, context: int
  ) -> tuple[float, Float[Array, 'B D V']]:
    """Seconds of a draft at a context, and its logits."""
    state = self.state(engine, context, 1)
    return self._stage(stage_loops.draft_loop, engine, state)

  def tree_seconds(
    self, engine: Engine, drafted: Float[Array, 'B D V']
  ) -> dict[str, float]:
    """Seconds to build the tree, to walk along it and to commit.

    None of them depends on the context.
    """
    state = self.state(engine, 1, 1)
    build, tree = self._stage(stage_loops.build_loop, engine, state, drafted)
    # The tree's own tokens, shifted, so that the walk accepts some.
    tokens = jnp.roll(tree.tokens, -1, axis=1)
    accept, acceptance = self._stage(
      stage_loops.accept_loop, engine, state, tree, tokens
    )
    out = stage_loops.forward_output(engine, state, tree)
    commit, _ = self._stage(
      stage_loops.commit_loop, engine, state, tree, out, acceptance
    )
    return {'tree_build': build, 'accept': accept, 'commit': commit}

  def _stage(
    self,
    function: Function,
    engine: Engine,
    state: DecodeState,
    *operands: PyTree,
  ) -> tuple[float, PyTree]:
    """Seconds a call without the loop's own cost, and the last result."""
    calls = self.repetitions.calls
    counts = [jnp.int32(count) for count in calls]
    program = self.program(function, engine, counts[0], *operands)
    params, values, result = self.pair.params(engine), [], None
    for _ in range(1 + self.repetitions.runs):
      taken = []
      for count in counts:
        begin = time.perf_counter()
        result = program(params, state, count, *operands)
        jax.block_until_ready(result)
        taken.append(time.perf_counter() - begin)
        if function is stage_loops.commit_loop:
          self.keep(result)
          state = self.state(engine, 1, 1)
      values.append((taken[1] - taken[0]) / (calls[1] - calls[0]))
    seconds = statistics.median(values[1:]) - self.loop_seconds
    return max(seconds, 0.0), result


def compile_sweep(
  timer: StepTimer,
  engines: Sequence[Engine],
  largest: Engine,
  progress: Callable[[str], None],
) -> dict[Engine, str]:
  """Compiles the loops of all engines and the routed round, side by side.

  Args:
    timer: the timer that will run them.
    engines: those of AR and of every budget.
    largest: the routed round's engine.
    progress: called with a line after each program.

  Returns:
    The reason for each engine of which a program does not compile; the other
    engines can still be measured.
  """
  calls = [
    timer.call(stage_loops.routed_round, largest),
    timer.call(prefill, largest.for_prefill()),
  ]
  owners: list[Engine | None] = [None, None]
  for engine in engines:
    own = [timer.call(decode_rounds, engine, ALL)]
    if engine.drafter:
      own += timer.stage_calls(engine)
    calls += own
    owners += [engine] * len(own)
  futures = dict(zip(start_compiling(calls), owners, strict=True))
  failures = {}
  for count, future in enumerate(concurrent.futures.as_completed(futures), 1):
    engine, error = futures[future], future.exception()
    if engine is None or not isinstance(error, jax.errors.JaxRuntimeError):
      future.result()
    else:
      failures[engine] = ' '.join(str(error).split())[:500]
    progress(f'compiled {count} of {len(futures)}')
  return failures


def temporary_bytes(
  timer: StepTimer, function: Function, engine: Engine, *operands: PyTree
) -> int | None:
  """Memory of a program beyond its arguments; None if XLA does not know."""
  found = timer.program(function, engine, *operands).memory_analysis()
  if found is None:
    return None
  new = found.output_size_in_bytes - found.alias_size_in_bytes
  return int(found.temp_size_in_bytes + max(new, 0))


def mean_active_experts(
  rounds: Sequence[Int32[np.ndarray, 'moe_layers N K']], rows: int
) -> tuple[list[float], float]:
  """Mean active experts over rounds, of each layer and of all layers."""
  counts = np.array([traffic.active_experts(ids, rows) for ids in rounds])
  if not counts.size:
    return [], 0.0
  return counts.mean(axis=0).tolist(), float(counts.mean())


def peak_beyond(timer: StepTimer) -> int | None:
  """The device's peak memory so far, without parameters and state."""
  peak = machine.memory('peak_bytes_in_use')
  if peak is None:
    return None
  return peak - timer.pair.nbytes - timer.state_bytes
