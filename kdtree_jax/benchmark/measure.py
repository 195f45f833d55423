"""Times of the engine's own programs, in their loop on the device."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.benchmark import machine, stages, traffic
from kdtree_jax.benchmark.subject import Subject
from kdtree_jax.decode import DecodeState, Engine, init_state
from kdtree_jax.decode.compilation import Call, compile_all, start_compiling
from kdtree_jax.decode.drivers import decode_loop
from kdtree_jax.decode.round import prefill
from kdtree_jax.decode.state import empty_stats
from kdtree_jax.keys import Purpose, key_for


@dataclasses.dataclass(frozen=True)
class Effort:
  """How much is run for one figure.

  Attributes:
    repetitions: of every measurement, one more being for warming up.
    rounds: tokens of the short and the long run; what differs is rounds alone.
    calls: of a stage, likewise.
    routed_rounds: whose experts are counted.
  """

  repetitions: int = 5
  rounds: tuple[int, int] = (8, 32)
  calls: tuple[int, int] = (10, 110)
  routed_rounds: int = 4


# For machines where the figures mean nothing.
QUICK = Effort(2, (2, 42), (1, 11), 2)


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds a round: the median of several runs, the least and the most.

  Attributes:
    seconds: median.
    least: of the runs.
    most: of the runs.
    tokens: committed a round.
  """

  seconds: float
  least: float
  most: float
  tokens: float = 0.0

  @classmethod
  def of(cls, values: Sequence[float], tokens: float = 0.0) -> 'Timing':
    return cls(statistics.median(values), min(values), max(values), tokens)

  def as_dict(self) -> dict[str, float]:
    """Milliseconds, as result files spell them."""
    return {
      'ms': self.seconds * 1e3,
      'ms_min': self.least * 1e3,
      'ms_max': self.most * 1e3,
    }


class Workbench:
  """One state, filled once, on which every program of a sweep runs.

  The rows of the caches are random and finite: what a step costs does not
  depend on what they say, and filling a long context by prefill would cost
  more than everything that is measured over it.
  """

  def __init__(self, subject: Subject, effort: Effort, loop_seconds: float):
    self.subject = subject
    self.effort = effort
    self.loop_seconds = loop_seconds
    engine = subject.engine(0)
    dtype = subject.target.dtype
    state = init_state(engine, [[0]], [1], (), dtype)
    filled = jax.tree.map(
      _random_rows, (state.cache.latent, state.drafter_state)
    )
    vocab, slots = engine.config.vocab_size, state.tokens.shape[1]
    rng = np.random.default_rng(0)
    self._tokens = rng.integers(0, vocab, (1, slots)).astype(np.int32)
    self._state = state.replace(
      cache=state.cache.replace(latent=filled[0]), drafter_state=filled[1]
    )

  @property
  def state_bytes(self) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))

  def cache_bytes(self, context: int) -> tuple[int, int]:
    """Of the committed rows: the target's and the drafter's."""
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
      stats=empty_stats(1, self.subject.capacity),
    )

  def keep(self, state: DecodeState) -> None:
    """Takes the caches back from a program that consumed them."""
    drafter_state = state.drafter_state
    if not jax.tree.leaves(drafter_state):
      drafter_state = self._state.drafter_state
    self._state = state.replace(drafter_state=drafter_state)

  def call(
    self, function: Callable[..., Any], engine: Engine, *operands: Any
  ) -> Call:
    """A program on this state.

    It consumes its state unless it is a loop over a stage that only reads it.
    """
    state = jax.eval_shape(lambda: self.state(engine, 1, 1))
    donate = function not in (
      stages.draft_loop,
      stages.build_loop,
      stages.accept_loop,
    )
    params = self.subject.params(engine)
    return Call(function, engine, params, state, operands, donate)

  def program(
    self, function: Callable[..., Any], engine: Engine, *operands: Any
  ) -> jax.stages.Compiled:
    """The compiled program of a call."""
    (program,), _ = compile_all([self.call(function, engine, *operands)])
    return program

  def stage_calls(self, engine: Engine) -> list[Call]:
    """The loops over single stages, by the shapes they hand on."""
    params = self.subject.params(engine)
    state = jax.eval_shape(lambda: self.state(engine, 1, 1))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    calls = []

    def shapes(function, *operands):
      calls.append(self.call(function, engine, count, *operands))
      call = functools.partial(function, engine)
      return jax.eval_shape(call, params, state, count, *operands)

    drafted = shapes(stages.draft_loop)
    tree = shapes(stages.build_loop, drafted)
    acceptance = shapes(stages.accept_loop, tree, tree.tokens)
    out = jax.eval_shape(
      lambda s, t: stages.forward_output(engine, s, t), state, tree
    )
    shapes(stages.commit_loop, tree, out, acceptance)
    return calls

  def decode(
    self, program: Callable[..., Any], engine: Engine, context: int, count: int
  ) -> tuple[float, int, int]:
    """Runs the loop for `count` tokens: seconds, rounds and tokens."""
    state = jax.block_until_ready(self.state(engine, context, count))
    begin = time.perf_counter()
    state = program(self.subject.params(engine), state)
    jax.block_until_ready(state.stats.rounds)
    seconds = time.perf_counter() - begin
    self.keep(state)
    return seconds, int(state.stats.rounds), int(state.length[0]) - context

  def rounds(self, engine: Engine, context: int) -> Timing:
    """Seconds a round inside the compiled loop, at a context.

    A long run less a short one, so that what a call costs drops out.
    """
    program = self.program(decode_loop, engine)
    self.decode(program, engine, context, self.effort.rounds[0])
    values, taken = [], []
    for _ in range(self.effort.repetitions):
      short, long = (
        self.decode(program, engine, context, count)
        for count in self.effort.rounds
      )
      count = max(long[1] - short[1], 1)
      values.append((long[0] - short[0]) / count)
      taken.append((long[2] - short[2]) / count)
    return Timing.of(values, statistics.mean(taken))

  def prefill(self, engine: Engine, context: int) -> tuple[Timing, int]:
    """Seconds for the last `prefill_chunk` tokens of a context, or all."""
    count = min(context, self.subject.prefill_chunk)
    program = self.program(prefill, engine.for_prefill())
    values = []
    for _ in range(1 + self.effort.repetitions):
      state = self.state(engine.for_prefill(), context, 1, count)
      jax.block_until_ready(state)
      begin = time.perf_counter()
      state = program(self.subject.params(engine), state)
      jax.block_until_ready(state.tokens)
      values.append(time.perf_counter() - begin)
      self.keep(state)
    return Timing.of(values[1:]), count

  def routed(self, engine: Engine, context: int) -> list[np.ndarray]:
    """Expert ids of a few successive rounds, `[layers, N, K]` each."""
    program = self.program(stages.routed_round, engine)
    state = self.state(engine, context, self.subject.room)
    found = []
    for _ in range(self.effort.routed_rounds):
      state, ids = program(self.subject.params(engine), state)
      found.append(np.asarray(ids))
    self.keep(state)
    return found

  def draft_seconds(self, engine: Engine, context: int) -> tuple[float, Any]:
    """Seconds of a draft at a context, and the draft."""
    state = self.state(engine, context, 1)
    return self._stage(stages.draft_loop, engine, state)

  def tree_seconds(self, engine: Engine, drafted: Any) -> dict[str, float]:
    """Seconds of building the tree, of the walk and of the commit.

    None of them depends on the context.
    """
    state = self.state(engine, 1, 1)
    build, tree = self._stage(stages.build_loop, engine, state, drafted)
    # Tokens of the tree itself, shifted, so that the walk finds some.
    tokens = jnp.roll(tree.tokens, -1, axis=1)
    accept, acceptance = self._stage(
      stages.accept_loop, engine, state, tree, tokens
    )
    out = stages.forward_output(engine, state, tree)
    commit, _ = self._stage(
      stages.commit_loop, engine, state, tree, out, acceptance
    )
    return {'tree_build': build, 'accept': accept, 'commit': commit}

  def _stage(
    self, function: Callable[..., Any], engine: Engine, state, *operands: Any
  ) -> tuple[float, Any]:
    """Seconds a call, the loop's own cost taken off, and the last result."""
    calls = self.effort.calls
    counts = [jnp.int32(count) for count in calls]
    program = self.program(function, engine, counts[0], *operands)
    params, values = self.subject.params(engine), []
    for _ in range(1 + self.effort.repetitions):
      taken = []
      for count in counts:
        begin = time.perf_counter()
        result = program(params, state, count, *operands)
        jax.block_until_ready(result)
        taken.append(time.perf_counter() - begin)
        if function is stages.commit_loop:
          self.keep(result)
          state = self.state(engine, 1, 1)
      values.append((taken[1] - taken[0]) / (calls[1] - calls[0]))
    seconds = statistics.median(values[1:]) - self.loop_seconds
    return max(seconds, 0.0), result


def _random_rows(x: jax.Array) -> jax.Array:
  """Normal values of the same shape, one layer at a time."""
  if x.ndim < 3:
    return x
  return _normal(x.shape, x.dtype)


def _normal(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  def layer(key):
    return jax.random.normal(key, shape[1:], dtype)

  return jax.jit(lambda keys: jax.lax.map(layer, keys))(
    jax.random.split(key_for(Purpose.BENCHMARK), shape[0])
  )


def compile_sweep(
  bench: Workbench,
  engines: Sequence[Engine],
  largest: Engine,
  done: Callable[[str], None],
) -> dict[Engine, str]:
  """Compiles the loops of all engines and the routed round, side by side.

  Args:
    bench: that they will run on.
    engines: of AR and of every budget.
    largest: of the routed round.
    done: called with a word about each program.

  Returns:
    Why, for each engine one of whose programs does not compile. It must not
    hide what the others reach.
  """
  calls = [
    bench.call(stages.routed_round, largest),
    bench.call(prefill, largest.for_prefill()),
  ]
  owners: list[Engine | None] = [None, None]
  for engine in engines:
    own = [bench.call(decode_loop, engine)]
    if engine.drafter:
      own += bench.stage_calls(engine)
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
    done(f'compiled {count} of {len(futures)}')
  return failures


def temporary_bytes(
  bench: Workbench, function: Callable[..., Any], engine: Engine
) -> int | None:
  """What a program needs beside its arguments, by XLA's account."""
  found = bench.program(function, engine).memory_analysis()
  if found is None:
    return None
  new = found.output_size_in_bytes - found.alias_size_in_bytes
  return int(found.temp_size_in_bytes + max(new, 0))


def experts_touched(
  found: Sequence[np.ndarray], rows: int
) -> tuple[list[float], float]:
  """Mean unique experts of each layer over rounds, and of all layers."""
  counts = np.array([traffic.unique_experts(ids, rows) for ids in found])
  if not counts.size:
    return [], 0.0
  return counts.mean(axis=0).tolist(), float(counts.mean())


def peak_beyond(bench: Workbench) -> int | None:
  """The device's peak so far beyond parameters and state."""
  peak = machine.memory('peak_bytes_in_use')
  if peak is None:
    return None
  return peak - bench.subject.nbytes - bench.state_bytes
