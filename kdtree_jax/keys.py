"""Keys of everything random that is no draw of a request.

A request with seed s draws with `fold_in(key(s), position)`, and s is 0 unless
somebody says otherwise. Whatever else is random must not begin with those
keys, or the two would be one and the same noise.
"""

import enum

import jax
import jax.numpy as jnp

# Positions are int32: nothing from here on is one.
_FIRST = 1 << 31


class Purpose(enum.IntEnum):
  """What is random, each with draws of its own."""

  DRAFTER_NOISE = enum.auto()
  HITS = enum.auto()
  WEIGHTS = enum.auto()
  DRAFTER_WEIGHTS = enum.auto()
  TRAINING_WEIGHTS = enum.auto()
  TRAINING_STEP = enum.auto()
  EVALUATION = enum.auto()
  BENCHMARK = enum.auto()


def key_for(purpose: Purpose, seed: int | jax.Array = 0) -> jax.Array:
  """The key of a purpose, of which no request and no other purpose draws."""
  return jax.random.fold_in(jax.random.key(seed), jnp.uint32(_FIRST + purpose))
