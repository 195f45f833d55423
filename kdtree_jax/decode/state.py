"""What one round hands to the next."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.decode.engine import Engine
from kdtree_jax.decode.sampling import GREEDY, Sampling, SamplingConfig
from kdtree_jax.errors import UserError
from kdtree_jax.model import KVCache, init_cache

# Stop ids are an operand of fixed width, so that changing them compiles
# nothing. -1 matches no token.
MAX_STOP_IDS = 16


class RoundStats(flax.struct.PyTreeNode):
  """What happened in each round; zeros where a row took no part.

  Attributes:
    acceptance_length: `[B, R]` int32: what the walk accepted, root included.
      The last round counts its whole walk even where the row's limit cut it.
    num_nodes: `[B, R]` int32: nodes verified, root included.
    rounds: int32 scalar.
  """

  acceptance_length: jax.Array
  num_nodes: jax.Array
  rounds: jax.Array


class DecodeState(flax.struct.PyTreeNode):
  """B sequences in flight.

  Attributes:
    tokens: `[B, T]` int32: prompt, committed output and, at index `length`,
      the root: chosen by the target, not yet in the cache.
    prompt_length: `[B]` int32.
    limit: `[B]` int32: the length at which a row is complete.
    stop_ids: `[MAX_STOP_IDS]` int32, padded with -1.
    done: `[B]` bool.
    stopped: `[B]` bool: done because a stop token was committed.
    cache: the target's; `cache.length` is the committed length.
    drafter_state: the drafter's.
    sampling: how each row draws; unused in a greedy program.
    stats: per round.
  """

  tokens: jax.Array
  prompt_length: jax.Array
  limit: jax.Array
  stop_ids: jax.Array
  done: jax.Array
  stopped: jax.Array
  cache: KVCache
  drafter_state: Any
  sampling: Sampling
  stats: RoundStats

  @property
  def length(self) -> jax.Array:
    """`[B]` int32, committed tokens."""
    return self.cache.length


class HostState(NamedTuple):
  """NumPy copies of what results are read from; see `DecodeState`.

  A host loop takes one a step and indexes that: to index a device array with
  a Python integer compiles a program for every integer.
  """

  tokens: np.ndarray
  prompt_length: np.ndarray
  length: np.ndarray
  done: np.ndarray
  stopped: np.ndarray
  stats: RoundStats

  @classmethod
  def of(cls, state: DecodeState) -> 'HostState':
    """Copies, because the next step consumes the state."""
    fields = (
      state.tokens,
      state.prompt_length,
      state.length,
      state.done,
      state.stopped,
      state.stats,
    )
    return cls(*jax.tree.map(np.array, jax.device_get(fields)))


def all_done(state: DecodeState) -> bool:
  """Whether every row is done, for loops on the host."""
  return bool(np.asarray(state.done).all())


def token_slots(engine: Engine) -> int:
  """T: the cache's rows and one more, for the root behind a full cache."""
  return engine.decode.cache_rows + 1


def pack_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> np.ndarray:
  """Validates and pads stop ids.

  Raises:
    UserError: too many, or one outside the vocabulary.
  """
  ids = sorted(set(stop_ids))
  check_ids(ids, vocab_size, 'stop')
  if len(ids) > MAX_STOP_IDS:
    raise UserError(f'{len(ids)} stop ids; at most {MAX_STOP_IDS} are possible')
  packed = np.full((MAX_STOP_IDS,), -1, np.int32)
  packed[: len(ids)] = ids
  return packed


def init_state(
  engine: Engine,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: Sequence[int],
  stop_ids: Sequence[int],
  dtype: Any,
  sampling: Sequence[SamplingConfig] | None = None,
) -> DecodeState:
  """An empty state for validated prompts; prefill comes next.

  Args:
    engine: of the program that the state is for.
    prompts: B sequences of token ids, each 1..capacity long.
    max_new_tokens: B limits, each at least 1.
    stop_ids: tokens that end a sequence.
    dtype: of the caches.
    sampling: B requests; default: greedy.

  Raises:
    UserError: a prompt that is empty, too long or has an id out of range.
  """
  capacity, vocab_size = engine.decode.capacity, engine.config.vocab_size
  batch, rows = len(prompts), engine.decode.cache_rows
  tokens = np.zeros((batch, token_slots(engine)), np.int32)
  for b, prompt in enumerate(prompts):
    check_prompt(prompt, vocab_size, capacity)
    tokens[b, : len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if min(max_new_tokens) < 1:
    raise UserError(f'max_new_tokens={min(max_new_tokens)} is below 1')
  limit = np.minimum(lengths + np.asarray(max_new_tokens), capacity)
  sampling = list(sampling or [GREEDY] * batch)
  drafter_state = ()
  if engine.drafter is not None:
    drafter_state = engine.drafter.init_state(batch, rows, dtype)
  return DecodeState(
    tokens=jnp.asarray(tokens),
    prompt_length=jnp.asarray(lengths),
    limit=jnp.asarray(limit.astype(np.int32)),
    stop_ids=jnp.asarray(pack_stop_ids(stop_ids, vocab_size)),
    done=jnp.asarray(limit <= lengths),
    stopped=jnp.zeros((batch,), jnp.bool_),
    cache=init_cache(engine.config, batch, rows, dtype),
    drafter_state=drafter_state,
    sampling=Sampling.of(sampling),
    stats=empty_stats(batch, capacity),
  )


def empty_stats(batch: int, rounds: int) -> RoundStats:
  """Space for `rounds` rounds, none taken."""
  return RoundStats(
    acceptance_length=jnp.zeros((batch, rounds), jnp.int32),
    num_nodes=jnp.zeros((batch, rounds), jnp.int32),
    rounds=jnp.zeros((), jnp.int32),
  )


def extend(
  state: DecodeState,
  turns: Sequence[Sequence[int]],
  max_new_tokens: Sequence[int],
  capacity: int,
) -> DecodeState:
  """Puts a further turn behind each row's committed tokens; prefill is next.

  The pending root, which was never part of the output, gives way to the turn.

  Args:
    state: of finished rows.
    turns: B sequences of validated token ids, at least one each.
    max_new_tokens: B limits.
    capacity: of the engine.
  """
  tokens, length = np.array(state.tokens), np.array(state.length)
  for row, start, turn in zip(tokens, length, turns, strict=True):
    row[start : start + len(turn)] = turn
  prompt_length = (length + [len(turn) for turn in turns]).astype(np.int32)
  limit = np.minimum(prompt_length + np.asarray(max_new_tokens), capacity)
  return state.replace(
    tokens=jnp.asarray(tokens),
    prompt_length=jnp.asarray(prompt_length),
    limit=jnp.asarray(limit.astype(np.int32)),
    done=jnp.asarray(limit <= prompt_length),
    stopped=jnp.zeros_like(state.stopped),
    stats=empty_stats(len(tokens), capacity),
  )


def truncate(state: DecodeState, row: int, length: int) -> DecodeState:
  """Ends a row at `length` committed tokens, as if a stop token were there.

  For stops that only the host can see, such as strings. What was committed
  behind is forgotten, in the statistics too.
  """
  host = HostState.of(state)
  accepted, nodes = host.stats.acceptance_length, host.stats.num_nodes
  surplus = int(accepted[row].sum()) - (length - int(host.prompt_length[row]))
  for i in np.flatnonzero(accepted[row])[::-1]:
    taken = min(surplus, accepted[row, i])
    accepted[row, i] -= taken
    surplus -= taken
    if accepted[row, i] == 0:
      nodes[row, i] = 0
  host.length[row] = length
  host.done[row] = host.stopped[row] = True
  # Not `jnp.asarray`, which compiles a program for every shape.
  lengths, done, stopped, stats = jax.device_put(
    (host.length, host.done, host.stopped, host.stats)
  )
  return state.replace(
    cache=state.cache.replace(length=lengths),
    done=done,
    stopped=stopped,
    stats=stats,
  )


def check_prompt(prompt: Sequence[int], vocab_size: int, capacity: int) -> None:
  """Raises a UserError that says what is wrong with a prompt."""
  if len(prompt) == 0:
    raise UserError('the prompt is empty; give at least one token id')
  check_ids(prompt, vocab_size, 'prompt')
  if len(prompt) > capacity:
    raise UserError(
      f'the prompt has {len(prompt)} tokens, more than the capacity of '
      f'{capacity}'
    )


def check_ids(ids: Sequence[int], vocab_size: int, kind: str) -> None:
  """Raises a UserError for the first id that the vocabulary lacks."""
  for token in ids:
    if not 0 <= token < vocab_size:
      raise UserError(
        f'{kind} id {token} is outside the vocabulary of {vocab_size}'
      )
