"""The bits of floats as integers that are ordered as the floats are."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOWEST = np.int32(-(2**31))  # below the key of every float
HIGHEST = np.int32(2**31 - 1)


def bits_of(x: jax.Array) -> jax.Array:
  """The bits of float32 values, int32."""
  return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
  """The float32 values that have these int32 bits."""
  return lax.bitcast_convert_type(bits, jnp.float32)


def flip_negative(bits: jax.Array) -> jax.Array:
  """Reverses the order of negative floats' bits; its own inverse.

  So keys come from bits, in the total order of floats, and bits from keys.
  """
  return bits ^ ((bits >> 31) & HIGHEST)
