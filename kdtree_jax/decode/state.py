"""What one round hands to the next."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.decode.engine import Engine
from kdtree_jax.errors import UserError
from kdtree_jax.model import KVCache, init_cache

# Stop ids are an operand of fixed width, so that changing them compiles
# nothing. -1 matches no token.
MAX_STOP_IDS = 16


@flax.struct.dataclass
class RoundStats:
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


@flax.struct.dataclass
class DecodeState:
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
  stats: RoundStats

  @property
  def length(self) -> jax.Array:
    """`[B]` int32, committed tokens."""
    return self.cache.length


def token_slots(engine: Engine) -> int:
  """T: the cache's rows and one more, for the root behind a full cache."""
  return engine.decode.cache_rows + 1


def pack_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> np.ndarray:
  """Validates and pads stop ids.

  Raises:
    UserError: too many, or one outside the vocabulary.
  """
  ids = sorted(set(stop_ids))
  for token in ids:
    if not 0 <= token < vocab_size:
      raise UserError(
        f'stop id {token} is outside the vocabulary of {vocab_size}'
      )
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
) -> DecodeState:
  """An empty state for validated prompts; prefill comes next.

  Args:
    engine: of the program that the state is for.
    prompts: B sequences of token ids, each 1..capacity long.
    max_new_tokens: B limits, each at least 1.
    stop_ids: tokens that end a sequence.
    dtype: of the caches.

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
  zeros = np.zeros((batch, capacity), np.int32)
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
    stats=RoundStats(
      acceptance_length=jnp.asarray(zeros),
      num_nodes=jnp.asarray(zeros.copy()),
      rounds=jnp.zeros((), jnp.int32),
    ),
  )


def check_prompt(prompt: Sequence[int], vocab_size: int, capacity: int) -> None:
  """Raises a UserError that says what is wrong with a prompt."""
  if len(prompt) == 0:
    raise UserError('the prompt is empty; give at least one token id')
  for token in prompt:
    if not 0 <= token < vocab_size:
      raise UserError(
        f'prompt id {token} is outside the vocabulary of {vocab_size}'
      )
  if len(prompt) > capacity:
    raise UserError(
      f'the prompt has {len(prompt)} tokens, more than the capacity of '
      f'{capacity}'
    )
