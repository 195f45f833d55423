"""The state that one round hands to the next."""

from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int32, PyTree

from kdtree_jax.decode.budget import BudgetState
from kdtree_jax.decode.engine import Engine
from kdtree_jax.decode.sampling import GREEDY, Sampling, SamplingConfig
from kdtree_jax.errors import UserError
from kdtree_jax.model import KVCache, init_cache

# Stop ids are an operand of fixed width, so that changing them compiles
# nothing. -1 matches no token.
MAX_STOP_IDS = 16


class RoundStats(flax.struct.PyTreeNode):
  """Statistics of each round; zeros where a row took no part.

  Attributes:
    acceptance_length: tokens that the walk accepted, the root included. A row's
      last round counts its whole walk, even beyond the row's `max_length`.
    num_nodes: nodes verified, the root included.
    predicted_tokens: tokens that a choice by cost expected, else 0.
    ms: milliseconds of the batch's step by the table of costs, else 0.
    ar_ms: those of an AR step in its place.
    rounds: rounds so far.
  """

  acceptance_length: Int32[Array, 'B rounds']
  num_nodes: Int32[Array, 'B rounds']
  predicted_tokens: Float32[Array, 'B rounds']
  ms: Float32[Array, 'B rounds']
  ar_ms: Float32[Array, 'B rounds']
  rounds: Int32[Array, '']


class DecodeState(flax.struct.PyTreeNode):
  """The state of B sequences that are decoded together.

  Attributes:
    tokens: the prompt, the committed output and, at index `length`, the root:
      chosen by the target, not yet in the cache.
    prompt_length: tokens of the prompt.
    max_length: the length at which a row is complete.
    stop_ids: padded with -1.
    done: the row is complete.
    stopped: the row is complete because a stop token was committed.
    cache: the target's; `cache.length` is the committed length.
    drafter_state: the drafter's.
    sampling: how each row is sampled; unused in a greedy program.
    stats: statistics of every round.
    budget: the past of a choice by cost; None where nothing is chosen.
  """

  tokens: Int32[Array, 'B T']
  prompt_length: Int32[Array, ' B']
  max_length: Int32[Array, ' B']
  stop_ids: Int32[Array, ' stops']
  done: Bool[Array, ' B']
  stopped: Bool[Array, ' B']
  cache: KVCache
  drafter_state: PyTree
  sampling: Sampling
  stats: RoundStats
  budget: BudgetState | None = None

  @property
  def length(self) -> Int32[Array, ' B']:
    """Committed tokens."""
    return self.cache.length


class HostState(NamedTuple):
  """NumPy copies of the fields that results are read from.

  A loop on the host takes one copy a step. Indexing the device's arrays instead
  would compile a program for every Python integer.
  """

  tokens: np.ndarray
  prompt_length: np.ndarray
  length: np.ndarray
  done: np.ndarray
  stopped: np.ndarray
  stats: RoundStats

  @classmethod
  def of(cls, state: DecodeState) -> 'HostState':
    """Copies of a state, which the next step consumes."""
    fields = jax.device_get([getattr(state, name) for name in cls._fields])
    return cls(*jax.tree.map(np.array, fields))


def all_done(state: DecodeState) -> bool:
  """Whether every row is done, for loops on the host."""
  return bool(np.asarray(state.done).all())


def token_slots(engine: Engine) -> int:
  """T: the cache's rows and one more, for the root after a full cache."""
  return engine.decode.cache_rows + 1


def pack_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> np.ndarray:
  """Sorted stop ids, padded with -1.

  Raises:
    UserError: there are too many, or one is outside the vocabulary.
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
  dtype: DTypeLike,
  sampling: Sequence[SamplingConfig] | None = None,
) -> DecodeState:
  """A state with empty caches, on which prefill runs next.

  Args:
    engine: the engine that runs on the state.
    prompts: B sequences of token ids, each 1..capacity long.
    max_new_tokens: one number for each sequence, at least 1.
    stop_ids: tokens that end a sequence.
    dtype: the dtype of the caches.
    sampling: one for each sequence; default: greedy.

  Raises:
    UserError: a prompt is empty, too long or has an id out of range.
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
  max_length = np.minimum(lengths + np.asarray(max_new_tokens), capacity)
  sampling = list(sampling or [GREEDY] * batch)
  drafter_state = ()
  if engine.drafter is not None:
    drafter_state = engine.drafter.init_state(batch, rows, dtype)
  return DecodeState(
    tokens=jnp.asarray(tokens),
    prompt_length=jnp.asarray(lengths),
    max_length=jnp.asarray(max_length.astype(np.int32)),
    stop_ids=jnp.asarray(pack_stop_ids(stop_ids, vocab_size)),
    done=jnp.asarray(max_length <= lengths),
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
    predicted_tokens=jnp.zeros((batch, rounds), jnp.float32),
    ms=jnp.zeros((batch, rounds), jnp.float32),
    ar_ms=jnp.zeros((batch, rounds), jnp.float32),
    rounds=jnp.zeros((), jnp.int32),
  )


def extend(
  state: DecodeState,
  turns: Sequence[Sequence[int]],
  max_new_tokens: Sequence[int],
  capacity: int,
) -> DecodeState:
  """The state with a further turn of a conversation after each row's tokens.

  Prefill runs on it next. The turn replaces the root, which was never part of
  the output.

  Args:
    state: a state whose rows are all done.
    turns: B sequences of validated token ids, at least one each.
    max_new_tokens: one number for each sequence.
    capacity: the engine's.
  """
  tokens, length = np.array(state.tokens), np.array(state.length)
  for row, start, turn in zip(tokens, length, turns, strict=True):
    row[start : start + len(turn)] = turn
  prompt_length = (length + [len(turn) for turn in turns]).astype(np.int32)
  max_length = np.minimum(prompt_length + np.asarray(max_new_tokens), capacity)
  return state.replace(
    tokens=jnp.asarray(tokens),
    prompt_length=jnp.asarray(prompt_length),
    max_length=jnp.asarray(max_length.astype(np.int32)),
    done=jnp.asarray(max_length <= prompt_length),
    stopped=jnp.zeros_like(state.stopped),
    stats=empty_stats(len(tokens), capacity),
  )


def truncate(state: DecodeState, row: int, length: int) -> DecodeState:
  """The state with a row that ends at `length`, as if by a stop token.

  This is for stops that only the host can see, such as strings. Tokens after
  `length` are dropped, from the statistics too.
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
      for values in (host.stats.predicted_tokens, host.stats.ms):
        values[row, i] = 0
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
  """Raises a UserError for a prompt that cannot be decoded."""
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
