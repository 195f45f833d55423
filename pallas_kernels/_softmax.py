"""Attention over keys in several arrays, in plain jnp, for both references."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def scores(
  spec: str, query: jax.Array, keys: jax.Array, scale: float, mask: jax.Array
) -> jax.Array:
  """Scaled float32 products by an einsum `spec`, -inf where `mask` is false."""
  return jnp.where(mask, _product(spec, query, keys) * scale, -jnp.inf)


def weights(
  blocks: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array]:
  """Softmax of scores `[..., X]`, each block with its own X (may be 0).

  Returns:
    Weights of every block relative to the largest of all, in 0..1, and their
    sum `[..., 1]`; it is 0 where all scores are -inf.
  """
  highest = -jnp.inf
  for block in blocks:
    largest = jnp.max(block, axis=-1, keepdims=True, initial=-jnp.inf)
    highest = jnp.maximum(highest, largest)
  # -inf - (-inf) would be NaN.
  highest = jnp.where(highest == -jnp.inf, 0.0, highest)
  found = [jnp.exp(block - highest) for block in blocks]
  sums = [jnp.sum(w, axis=-1, keepdims=True) for w in found]
  return found, functools.reduce(jnp.add, sums)


def mix(spec: str, weights: jax.Array, values: jax.Array) -> jax.Array:
  """Weighted sum of `values` by an einsum `spec`, float32.

  The weights take the values' dtype, as a product on tensor cores wants them.
  A weight of 0 does not silence a NaN: what is not finite in a value counts as
  0, and makes NaN of a sum by way of its weight, see `tainted`.
  """
  values = jnp.where(jnp.isfinite(values), values, 0)
  return _product(spec, weights.astype(values.dtype), values)


def tainted(keys: jax.Array, values: jax.Array) -> jax.Array:
  """`keys [..., d]`, NaN where some of their `values [..., e]` is not finite.

  So whoever sees such a value has a score and a weight of NaN.
  """
  sound = jnp.isfinite(values).all(axis=-1, keepdims=True)
  return jnp.where(sound, keys, jnp.nan)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(
    spec,
    a,
    b,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
