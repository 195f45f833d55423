"""Three drivers of one round: a compiled loop, a generator, a stopwatch."""

import dataclasses
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdtree_jax.decode import round as stages
from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.programs import PROGRAMS, Call
from kdtree_jax.decode.round import RoundTrace, decode_round, prefill
from kdtree_jax.decode.state import DecodeState, HostState, all_done


class Seconds(NamedTuple):
  """Wall time of one call; `compile` is apart from the other two."""

  prefill: float
  decode: float
  compile: float


def decode_loop(
  engine: Engine, params: Params, state: DecodeState
) -> DecodeState:
  """Rounds until every row is done; each round commits at least one token."""

  def unfinished(state: DecodeState) -> jax.Array:
    return ~state.done.all()

  def body(state: DecodeState) -> DecodeState:
    return decode_round(engine, params, state)[0]

  return lax.while_loop(unfinished, body, state)


def generate(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[DecodeState, Seconds]:
  """Prefill, then the whole loop as one compiled program. Consumes `state`."""
  fill, loop, compiled = loop_programs(engine, params, state)
  begin = time.perf_counter()
  state = jax.block_until_ready(fill(params, state))
  middle = time.perf_counter()
  state = jax.block_until_ready(loop(params, state))
  end = time.perf_counter()
  return state, Seconds(middle - begin, end - middle, compiled)


def loop_programs(engine: Engine, params: Params, state: DecodeState):
  """Prefill and `decode_loop`, compiled, and the seconds that took."""
  return with_prefill((decode_loop, engine), params, state)


def with_prefill(call: Call, params: Params, state: DecodeState):
  """Prefill and the program of a call that go together, and the seconds."""
  fill = (prefill, call[1].for_prefill())
  programs, seconds = PROGRAMS.get_all([fill, call], params, state, donate=True)
  return *programs, seconds


def decode_rounds(
  engine: Engine, params: Params, state: DecodeState, count: jax.Array
) -> DecodeState:
  """At most `count` rounds, an operand: every count is one program."""

  def unfinished(carry) -> jax.Array:
    taken, state = carry
    return (taken < count) & ~state.done.all()

  def body(carry):
    taken, state = carry
    return taken + 1, decode_round(engine, params, state)[0]

  zero = jnp.zeros((), jnp.int32)
  return lax.while_loop(unfinished, body, (zero, state))[1]


def stream(
  engine: Engine,
  params: Params,
  state: DecodeState,
  rounds_per_step: int = 1,
) -> Iterator[DecodeState]:
  """Yields the state after prefill and then every `rounds_per_step` rounds.

  A state is consumed by the step after it.
  """
  count = jnp.asarray(rounds_per_step, jnp.int32)
  fill, step, _ = stream_programs(engine, params, state)
  state = jax.block_until_ready(fill(params, state))
  yield state
  while not all_done(state):
    state = step(params, state, count)
    yield state


def stream_programs(engine: Engine, params: Params, state: DecodeState):
  """Prefill and `decode_rounds`, compiled, and the seconds that took."""
  count = jnp.zeros((), jnp.int32)
  return with_prefill((decode_rounds, engine, count), params, state)


def traced(
  engine: Engine, params: Params, state: DecodeState
) -> Iterator[tuple[DecodeState, RoundTrace | None]]:
  """Like `stream`, a round a step, with what each round saw.

  The first item is the state after prefill, without a trace.
  """
  fill, step, _ = traced_programs(engine, params, state)
  state = jax.block_until_ready(fill(params, state))
  yield state, None
  while not all_done(state):
    state, trace = step(params, state)
    yield state, trace


def traced_programs(engine: Engine, params: Params, state: DecodeState):
  """Prefill and `decode_round`, compiled, and the seconds that took."""
  return with_prefill((decode_round, engine), params, state)


@dataclasses.dataclass(frozen=True)
class StageTimes:
  """Seconds of each stage, `[rounds]` each; every stage is synchronised.

  Their sum exceeds a round of the compiled loop, which waits for nothing.
  """

  draft: np.ndarray
  tree_build: np.ndarray
  verify: np.ndarray
  accept: np.ndarray
  commit: np.ndarray


def profile(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[DecodeState, StageTimes]:
  """Runs each stage as a program of its own and times it."""
  fill, _ = PROGRAMS.get(prefill, engine.for_prefill(), params, state)
  state = fill(params, state)
  times: dict[str, list[float]] = {
    field.name: [] for field in dataclasses.fields(StageTimes)
  }

  def timed(name, function, *operands):
    program, _ = PROGRAMS.get(function, engine, params, state, *operands)
    begin = time.perf_counter()
    result = jax.block_until_ready(program(params, state, *operands))
    times[name].append(time.perf_counter() - begin)
    return result

  while not all_done(state):
    logits = None
    if engine.drafter is not None:
      logits = timed('draft', stages.draft)
    tree = timed('tree_build', _build_tree, logits)
    tokens, out = timed('verify', _verify, tree)
    acceptance = timed('accept', _accept_path, tree, tokens)
    state = timed('commit', stages.commit_path, tree, out, acceptance)
  return state, StageTimes(**{k: np.array(v) for k, v in times.items()})


def _build_tree(engine, params, state, logits):
  del params
  return stages.build_tree(engine, state, logits)


def _verify(engine, params, state, tree):
  verified = stages.verify(engine, params, state, tree)
  return verified.tokens, verified.out


def _accept_path(engine, params, state, tree, target_tokens):
  del params
  return stages.accept_path(engine, state, tree, target_tokens)


def forward_logits(
  engine: Engine, params: Params, state: DecodeState
) -> jax.Array:
  """Logits `[capacity, V]` float32 of row 0's prompt, through prefill.

  Rows from the prompt's length on are meaningless.
  """
  chunk = engine.decode.prefill_chunk
  count = -(-engine.decode.capacity // chunk)
  shape = (count * chunk, engine.config.vocab_size)

  def body(i, carry):
    state, logits = carry
    out, state = stages.prefill_chunk(engine, params, state)
    block = engine.apply(params, out.hidden[0], method='logits')
    logits = lax.dynamic_update_slice_in_dim(logits, block, i * chunk, axis=0)
    return state, logits

  chunks = (state.prompt_length[0] + chunk - 1) // chunk
  init = (state, jnp.zeros(shape, jnp.float32))
  return lax.fori_loop(0, chunks, body, init)[1]


@dataclasses.dataclass(frozen=True)
class RoundRecord:
  """One round of one row on the host, as result files spell it.

  Attributes:
    root_token_id: the token of the root.
    node_token_ids: of the other nodes, in tree order.
    node_depths: likewise.
    parents: of all nodes; the root's is -1.
    scores: of all nodes, sums of log q.
    accepted_indices: the committed path, the root first.
  """

  root_token_id: int
  node_token_ids: list[int]
  node_depths: list[int]
  parents: list[int]
  scores: list[float]
  accepted_indices: list[int]

  @classmethod
  def of(cls, trace: RoundTrace, row: int) -> 'RoundRecord':
    tree, acceptance = jax.tree.map(lambda x: np.asarray(x[row]), trace)
    count = int(tree.num_nodes)
    length = int(acceptance.acceptance_length)
    return cls(
      root_token_id=int(tree.tokens[0]),
      node_token_ids=tree.tokens[1:count].tolist(),
      node_depths=tree.depths[1:count].tolist(),
      parents=tree.parents[:count].tolist(),
      scores=tree.scores[:count].tolist(),
      accepted_indices=acceptance.path[:length].tolist(),
    )


@dataclasses.dataclass(frozen=True)
class GenerateResult:
  """What one row of a finished (or interrupted) state says.

  Attributes:
    prompt_ids: the prompt.
    output_ids: committed new tokens, a stop token included.
    acceptance_lengths: tokens committed by each target forward, the root
      included. The last entry is the whole walk, even where `max_new_tokens`
      or the capacity cut the output.
    num_nodes: nodes verified by each target forward, the root included.
    stop_reason: `stop`, `length`, `capacity`, or `interrupted` for a row
      that is not done.
    seconds: prefill and decode, and apart from them compilation.
    rounds: each round's tree, if it was asked for.
  """

  prompt_ids: list[int]
  output_ids: list[int]
  acceptance_lengths: list[int]
  num_nodes: list[int]
  stop_reason: str
  seconds: Seconds
  rounds: list[RoundRecord] | None = None

  @property
  def target_forwards(self) -> int:
    return len(self.acceptance_lengths)

  @property
  def mean_acceptance_length(self) -> float:
    """Committed tokens per target forward; 0 if there was none."""
    forwards = self.target_forwards
    return sum(self.acceptance_lengths) / forwards if forwards else 0.0


def result_of(
  state: DecodeState | HostState,
  row: int,
  max_new_tokens: int,
  seconds: Seconds,
  rounds: list[RoundRecord] | None = None,
) -> GenerateResult:
  """Row `row` of a state; for many rows read the state back once."""
  host = state if isinstance(state, HostState) else HostState.of(state)
  tokens, stats = host.tokens[row], host.stats
  prompt_length, length = int(host.prompt_length[row]), int(host.length[row])
  accepted = stats.acceptance_length[row]
  taken = accepted > 0
  if not host.done[row]:
    reason = 'interrupted'
  elif host.stopped[row]:
    reason = 'stop'
  elif length - prompt_length < max_new_tokens:
    reason = 'capacity'
  else:
    reason = 'length'
  return GenerateResult(
    prompt_ids=tokens[:prompt_length].tolist(),
    output_ids=tokens[prompt_length:length].tolist(),
    acceptance_lengths=accepted[taken].tolist(),
    num_nodes=stats.num_nodes[row][taken].tolist(),
    stop_reason=reason,
    seconds=seconds,
    rounds=rounds,
  )
