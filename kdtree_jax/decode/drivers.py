"""Drivers of rounds: a loop on the device, and generators on the host."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, PyTree

from kdtree_jax.decode import round as stages
from kdtree_jax.decode.compilation import Call, Function, compile_all
from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.prefill import prefill, prefill_chunk
from kdtree_jax.decode.round import RoundTrace, decode_round
from kdtree_jax.decode.state import DecodeState, HostState, all_done
from kdtree_jax.tree import Acceptance, DraftTree

# One round, called by the host: `(params, state, *operands)`.
Step = Callable[..., PyTree]


class Seconds(NamedTuple):
  """Wall time of one call; no other time includes `compile`."""

  prefill: float
  decode: float
  compile: float


# As good as no limit to the rounds of a call.
ALL = np.int32(2**31 - 1)


def decode_rounds(
  engine: Engine, params: Params, state: DecodeState, count: Int32[Array, '']
) -> DecodeState:
  """Rounds until every row is done, at most `count`.

  One program serves every count. Each round commits at least one token.
  """
  first = state.stats.rounds

  def is_over(state: DecodeState) -> Bool[Array, '']:
    return state.done.all() | (state.stats.rounds - first >= count)

  return _loop(engine, params, state, is_over)


def _loop(
  engine: Engine,
  params: Params,
  state: DecodeState,
  is_over: Callable[[DecodeState], Bool[Array, '']],
) -> DecodeState:
  """Rounds until `is_over`: of DDTree, and of AR while drafting pauses.

  A loop for each, one after the other, serves instead of a branch in every
  round, which would copy the cache and cost AR's steps some time.
  """

  def rounds(engine: Engine, is_over, state: DecodeState) -> DecodeState:
    return lax.while_loop(
      lambda state: ~is_over(state),
      lambda state: decode_round(engine, params, state)[0],
      state,
    )

  if not engine.may_pause:
    return rounds(engine, is_over, state)

  def both(state: DecodeState) -> DecodeState:
    state = rounds(
      engine, lambda state: is_over(state) | pauses(engine, state), state
    )
    return rounds(
      engine.without_tree(),
      lambda state: is_over(state) | ~pauses(engine, state),
      state,
    )

  if not engine.chooses:
    # Lengths only grow: beyond the drafter's reach there is no way back.
    return both(state)
  return lax.while_loop(lambda state: ~is_over(state), both, state)


def pauses(engine: Engine, state: DecodeState) -> Bool[Array, '']:
  """Whether the next round is AR's.

  That is if no row can be drafted for any more, since each is done or beyond
  the drafter, or while drafting does not pay.
  """
  paused = jnp.zeros((), jnp.bool_)
  if engine.outlives_drafter:
    paused |= (state.done | stages.beyond_drafter(engine, state)).all()
  if state.budget is not None:
    paused |= state.budget.asleep > 0
  return paused


def decode_to_end(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[DecodeState, Seconds]:
  """Prefill, then the whole loop as one compiled program. Consumes `state`."""
  fill, loop, compiled = decode_programs(engine, params, state)
  begin = time.perf_counter()
  state = jax.block_until_ready(fill(params, state))
  middle = time.perf_counter()
  state = jax.block_until_ready(loop(params, state, ALL))
  end = time.perf_counter()
  return state, Seconds(middle - begin, end - middle, compiled)


def decode_programs(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[jax.stages.Compiled, jax.stages.Compiled, float]:
  """Prefill and `decode_rounds`, compiled, and the seconds that took."""
  (fill, program), seconds = compile_all(decode_calls(engine, params, state))
  return fill, program, seconds


def decode_calls(
  engine: Engine, params: Params, state: DecodeState
) -> list[Call]:
  """The programs of `decode_to_end` and `stream`; both consume the state."""
  return [
    Call(prefill, engine.for_prefill(), params, state, donate=True),
    Call(decode_rounds, engine, params, state, (ALL,), donate=True),
  ]


def stream(
  engine: Engine,
  params: Params,
  state: DecodeState,
  rounds_per_step: int = 1,
) -> Iterator[DecodeState]:
  """Yields the state after prefill and then every `rounds_per_step` rounds.

  A state is consumed by the step after it.
  """
  count = np.int32(rounds_per_step)
  fill, step, _ = decode_programs(engine, params, state)
  state = jax.block_until_ready(fill(params, state))
  yield state
  while not all_done(state):
    state = step(params, state, count)
    yield state


def traced_round(
  engine: Engine,
  params: Params,
  state: DecodeState,
  *text: Int32[Array, 'B T'],
) -> tuple[DecodeState, RoundTrace]:
  """`decode_round` without the target's logits and rows, which are large."""
  state, trace = decode_round(engine, params, state, *text)
  return state, trace.replace(verified=None, drafted=None)


def traced(
  engine: Engine,
  params: Params,
  state: DecodeState,
  text: Int32[Array, 'B T'] | None = None,
) -> Iterator[tuple[DecodeState, RoundTrace | None]]:
  """Yields like `stream`, a round a step, with each round's trace.

  The first item is the state after prefill, without a trace. With a text, -1
  after its end, every round commits the text's tokens (teacher forcing), so
  that every draft follows real text.
  """
  fill, step, _ = traced_programs(engine, params, state, text)
  state = jax.block_until_ready(fill(params, state))
  operands = () if text is None else (text,)
  if text is not None:
    # The first root is a token of the text, not the target's choice.
    slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
    at_root = slots == state.prompt_length[:, None]
    state = state.replace(tokens=jnp.where(at_root, text, state.tokens))
  yield state, None
  while not all_done(state):
    state, trace = step(params, state, *operands)
    yield state, trace


def traced_programs(
  engine: Engine,
  params: Params,
  state: DecodeState,
  text: Int32[Array, 'B T'] | None = None,
) -> tuple[jax.stages.Compiled, Step, float]:
  """Prefill and `traced_round`, compiled, and the seconds that took."""
  operands = () if text is None else (text,)
  (fill, *rounds), seconds = compile_all(
    round_calls(traced_round, engine, params, state, *operands)
  )
  return fill, round_step(engine, rounds), seconds


def round_calls(
  function: Function,
  engine: Engine,
  params: Params,
  state: DecodeState,
  *operands: Array,
  donate: bool = True,
) -> list[Call]:
  """Prefill, and one round for a loop on the host.

  Also AR's round, if drafting may pause.
  """
  calls = [Call(prefill, engine.for_prefill(), params, state, donate=donate)]
  engines = [engine]
  if engine.may_pause:
    engines.append(engine.without_tree())
  for each in engines:
    calls.append(Call(function, each, params, state, operands, donate))
  return calls


def round_step(engine: Engine, rounds: Sequence[jax.stages.Compiled]) -> Step:
  """The round of `round_calls`; AR's while drafting pauses."""

  def step(params: Params, state: DecodeState, *operands: Array) -> PyTree:
    paused = len(rounds) > 1 and bool(pauses(engine, state))
    return rounds[paused](params, state, *operands)

  return step


def forward_logits(
  engine: Engine, params: Params, state: DecodeState
) -> Float32[Array, 'positions V']:
  """Logits of the first row's prompt, by prefill.

  Entries from the prompt's length on are meaningless.
  """
  chunk = engine.decode.prefill_chunk
  count = -(-engine.decode.capacity // chunk)
  shape = (count * chunk, engine.config.vocab_size)

  def body(i, carry):
    state, logits = carry
    out, state = prefill_chunk(engine, params, state)
    block = engine.apply(params, out.hidden[0], method='logits')
    logits = lax.dynamic_update_slice_in_dim(logits, block, i * chunk, axis=0)
    return state, logits

  chunks = (state.prompt_length[0] + chunk - 1) // chunk
  init = (state, jnp.zeros(shape, jnp.float32))
  return lax.fori_loop(0, chunks, body, init)[1]


@dataclasses.dataclass(frozen=True)
class RoundRecord:
  """One round of one row on the host, under the names of result files.

  Attributes:
    root_token_id: the root's token.
    node_token_ids: the other nodes' tokens, in tree order.
    node_depths: the other nodes' depths.
    parents: the parent of every node; the root's is -1.
    scores: the sum of log q along every node's path.
    accepted_indices: the committed path, the root first.
  """

  root_token_id: int
  node_token_ids: list[int]
  node_depths: list[int]
  parents: list[int]
  scores: list[float]
  accepted_indices: list[int]

  @classmethod
  def of(
    cls, tree: DraftTree, acceptance: Acceptance, row: int
  ) -> 'RoundRecord':
    """One row of a tree and of the walk along it."""
    tree, acceptance = jax.tree.map(
      lambda x: np.asarray(x[row]), (tree, acceptance)
    )
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


class Price(NamedTuple):
  """What the choice of a round's nodes expected.

  Attributes:
    predicted_tokens: tokens committed, the root included.
    ms: milliseconds of the batch's step by the table of costs.
    ar_ms: milliseconds of an AR step in its place.
  """

  predicted_tokens: float
  ms: float
  ar_ms: float


@dataclasses.dataclass(frozen=True)
class GenerateResult:
  """The result of one row of a finished or interrupted state.

  Attributes:
    prompt_ids: the prompt.
    output_ids: committed new tokens, a stop token included.
    acceptance_lengths: tokens committed by each target forward, the root
      included. The last entry counts the whole walk, even if `max_new_tokens`
      or the capacity ends the output earlier.
    num_nodes: nodes verified by each target forward, the root included.
    prices: what each forward was expected to commit and to cost; empty unless
      nodes were chosen by cost.
    stop_reason: `stop`, `length`, `capacity`, or `interrupted` for a row
      that is not done.
    seconds: wall times.
    rounds: each round's tree, if requested.
  """

  prompt_ids: list[int]
  output_ids: list[int]
  acceptance_lengths: list[int]
  num_nodes: list[int]
  stop_reason: str
  seconds: Seconds
  rounds: list[RoundRecord] | None = None
  prices: list[Price] = dataclasses.field(default_factory=list)

  @property
  def target_forwards(self) -> int:
    """Target forwards after prefill."""
    return len(self.acceptance_lengths)

  @property
  def priced_speedup(self) -> float | None:
    """AR's price of the tokens over that of the rounds; None without prices.

    In a batch the price of a round counts for each of its rows.
    """
    total = sum(price.ms for price in self.prices)
    pairs = zip(self.acceptance_lengths, self.prices, strict=False)
    return sum(n * price.ar_ms for n, price in pairs) / total if total else None

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
  """The result of one row; for many rows, pass one `HostState`."""
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
    prices=[
      Price(*map(float, values))
      for values in zip(
        stats.predicted_tokens[row][taken],
        stats.ms[row][taken],
        stats.ar_ms[row][taken],
        strict=True,
      )
      if values[1] > 0
    ],
  )
