"""Rotary position embedding, plain and YaRN, in both layouts."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from kdtree_jax.config import RopeScaling, yarn_mscale


def inverse_frequencies(
  dim: int, theta: float, scaling: RopeScaling | None
) -> Float32[np.ndarray, ' half']:
  """The `dim / 2` angular frequencies.

  YaRN (arXiv 2309.00071, eq. 23) keeps frequencies that turn often within the
  original context, divides those that turn rarely by `factor`, and blends
  linearly between. They are computed in float64 and rounded once.
  """
  exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
  inv_freq = theta**-exponent
  if scaling is None:
    return inv_freq.astype(np.float32)

  def turns_to_dim(rotations: float) -> float:
    """The fractional index of the frequency that turns `rotations` times."""
    context = scaling.original_max_position_embeddings
    wavelengths = math.log(context / (rotations * 2 * math.pi))
    return dim * wavelengths / (2 * math.log(theta))

  low = max(math.floor(turns_to_dim(scaling.beta_fast)), 0)
  high = min(math.ceil(turns_to_dim(scaling.beta_slow)), dim - 1)
  width = high - low if high != low else 0.001
  ramp = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
  inv_freq = inv_freq / scaling.factor * ramp + inv_freq * (1.0 - ramp)
  return inv_freq.astype(np.float32)


def amplitude(scaling: RopeScaling | None) -> float:
  """The factor on cos and sin; 1 in every real checkpoint of the family."""
  if scaling is None:
    return 1.0
  if scaling.attention_factor is not None:
    return scaling.attention_factor
  if scaling.mscale and scaling.mscale_all_dim:
    return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
      scaling.factor, scaling.mscale_all_dim
    )
  return yarn_mscale(scaling.factor, 1.0)


def rope_tables(
  positions: Int32[Array, '*batch'],
  dim: int,
  theta: float,
  scaling: RopeScaling | None,
) -> tuple[Float32[Array, '*batch half'], Float32[Array, '*batch half']]:
  """cos and sin of the `dim / 2` angles at each position."""
  inv_freq = jnp.asarray(inverse_frequencies(dim, theta, scaling))
  angles = positions.astype(jnp.float32)[..., None] * inv_freq.reshape(
    (1,) * positions.ndim + (-1,)
  )
  factor = jnp.float32(amplitude(scaling))
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
  x: Float[Array, '*batch width'],
  cos: Float32[Array, '*#batch half'],
  sin: Float32[Array, '*#batch half'],
  *,
  interleave: bool,
) -> Float[Array, '*batch width']:
  """Rotates the pairs of `x` by tables that broadcast to it.

  Args:
    x: the values, in any float dtype.
    cos: half as wide as `x`.
    sin: like `cos`.
    interleave: pairs are (2i, 2i + 1); otherwise (i, i + dim / 2).

  Returns:
    The rotated values, in the dtype and the pair layout of `x`.
  """
  y = x.astype(jnp.float32)
  if interleave:
    first, second = y[..., 0::2], y[..., 1::2]
  else:
    first, second = jnp.split(y, 2, axis=-1)
  rotated = (first * cos - second * sin, second * cos + first * sin)
  if interleave:
    y = jnp.stack(rotated, axis=-1).reshape(x.shape)
  else:
    y = jnp.concatenate(rotated, axis=-1)
  return y.astype(x.dtype)
