"""Random keys for everything but the sampling of requests.

A request with seed s is sampled with `fold_in(key(s), position)`, and its
default seed is 0. Any other use of those keys would give the same noise, so
everything else that is random takes its keys from here.
"""

import enum

import jax
import jax.numpy as jnp

# Positions are int32, so that no position reaches this number.
_FIRST = 1 << 31


class Purpose(enum.IntEnum):
  """Uses of random numbers, each with its own keys."""

  DRAFTER_NOISE = enum.auto()
  HITS = enum.auto()
  WEIGHTS = enum.auto()
  DRAFTER_WEIGHTS = enum.auto()
  TRAINING_WEIGHTS = enum.auto()
  TRAINING_STEP = enum.auto()
  EVALUATION = enum.auto()
  BENCHMARK = enum.auto()


def key_for(purpose: Purpose, seed: int | jax.Array = 0) -> jax.Array:
  """The key of a purpose, which no request and no other purpose uses."""
  return jax.random.fold_in(jax.random.key(seed), jnp.uint32(_FIRST + purpose))
