"""Verify attention in plain jnp: two key blocks, one softmax."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.tree_build import bits


def verify_attention(
  query: jax.Array,
  cache: jax.Array,
  rows: jax.Array,
  lengths: jax.Array,
  *,
  layer: int,
  value_dim: int,
  scale: float,
  ancestors: jax.Array | None,
) -> jax.Array:
  """See `pallas_kernels.verify_attention.api.verify_attention`."""
  n = query.shape[1]
  position = np.arange(cache.shape[2], dtype=np.int32)
  in_prefix = position[None, :] < lengths[:, None]
  if ancestors is None:
    causal = np.tril(np.ones((n, n), bool))
    visible = jnp.broadcast_to(causal, (query.shape[0], n, n))
  else:
    visible = bits.unpack_bits(ancestors, n)
  # A weight of 0 does not silence a NaN, so rows that nobody sees are zeroed.
  prefix = jnp.where(in_prefix[:, :, None], cache[layer], 0)
  rows = jnp.where(jnp.any(visible, axis=1)[:, :, None], rows, 0)
  # The prefix mask is the same for all nodes and stays [B, 1, 1, S].
  prefix_scores = _scores(query, prefix, scale, in_prefix[:, None, None, :])
  row_scores = _scores(query, rows, scale, visible[:, :, None, :])
  highest = jnp.maximum(_max(prefix_scores), _max(row_scores))
  # A node that sees nothing has -inf here; -inf - (-inf) would be NaN.
  highest = jnp.where(highest == -jnp.inf, 0.0, highest)
  prefix_weights = jnp.exp(prefix_scores - highest)
  row_weights = jnp.exp(row_scores - highest)
  total = jnp.sum(prefix_weights, axis=3, keepdims=True)
  total = total + jnp.sum(row_weights, axis=3, keepdims=True)
  out = _mix(prefix_weights, prefix[:, :, :value_dim])
  out = out + _mix(row_weights, rows[:, :, :value_dim])
  return (out / jnp.where(total == 0, 1.0, total)).astype(query.dtype)


def _max(scores: jax.Array) -> jax.Array:
  """Largest score of `[B, N, H, X]` along X (may be empty): `[B, N, H, 1]`."""
  return jnp.max(scores, axis=3, keepdims=True, initial=-jnp.inf)


def _scores(
  query: jax.Array, keys: jax.Array, scale: float, mask: jax.Array
) -> jax.Array:
  """Scaled float32 scores `[B, N, H, X]`, -inf where `mask` is false."""
  scores = jnp.einsum(
    'bnhc,bxc->bnhx',
    query,
    keys,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  return jnp.where(mask, scores * scale, -jnp.inf)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
  """Weighted sum of `values` `[B, X, R]`, float32 `[B, N, H, R]`.

  The weights, in 0..1 before normalisation, take the values' dtype, as a
  product on tensor cores wants them.
  """
  return jnp.einsum(
    'bnhx,bxr->bnhr',
    weights.astype(values.dtype),
    values,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
