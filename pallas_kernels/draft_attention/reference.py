"""A drafter's attention in plain jnp: two key blocks, one softmax."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def draft_attention(
  query: jax.Array,
  context: jax.Array,
  rows: jax.Array,
  lengths: jax.Array,
  *,
  layer: int,
  scale: float,
  causal: bool,
  window: int | None,
  window_from_root: bool,
) -> jax.Array:
  """See `pallas_kernels.draft_attention.api.draft_attention`."""
  _, slots, heads, _, dim = query.shape
  position = np.arange(context.shape[2], dtype=np.int32)
  slot = np.arange(slots, dtype=np.int32)
  committed = position[None, :] < lengths[:, None]
  seen, own = committed[:, None, :], np.ones((slots, slots), bool)
  if causal:
    own = slot[:, None] >= slot[None, :]
  if window is not None:
    at = slot * (not window_from_root)
    own &= at[:, None] - slot[None, :] < window
    behind = lengths[:, None] - position[None, :]
    seen &= behind[:, None, :] + at[None, :, None] < window
  # A weight of 0 does not silence a NaN, so what is not committed is zeroed.
  prefix = jnp.where(committed[:, :, None], context[layer], 0)

  def halves(x):
    x = x.reshape(*x.shape[:-1], 2, heads, dim)
    return x[..., 0, :, :], x[..., 1, :, :]

  # The masks are the same for all heads and stay [B, 1, 1, W or 1, S].
  (prefix_keys, prefix_values), (keys, values) = halves(prefix), halves(rows)
  prefix_scores = _scores(query, prefix_keys, scale, seen[:, None, None])
  scores = _scores(query, keys, scale, own[None, None, None])
  # Every slot sees itself: this is finite.
  highest = jnp.maximum(_max(prefix_scores), _max(scores))
  prefix_weights = jnp.exp(prefix_scores - highest)
  weights = jnp.exp(scores - highest)
  total = jnp.sum(prefix_weights, axis=-1, keepdims=True)
  total = total + jnp.sum(weights, axis=-1, keepdims=True)
  out = _mix(prefix_weights, prefix_values) + _mix(weights, values)
  return (out / jnp.moveaxis(total, 3, 1)).astype(query.dtype)


def _max(scores: jax.Array) -> jax.Array:
  """Largest score of `[B, K, G, W, X]` along X, which may be empty."""
  return jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)


def _scores(query, keys, scale, mask) -> jax.Array:
  """Scaled float32 scores `[B, K, G, W, X]`, -inf where `mask` is false."""
  scores = jnp.einsum(
    'bwkgd,bxkd->bkgwx',
    query,
    keys,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  return jnp.where(mask, scores * scale, -jnp.inf)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
  """Weighted sum of `values` `[B, X, K, d]`, float32 `[B, W, K, G, d]`.

  The weights, in 0..1 before normalisation, take the values' dtype, as a
  product on tensor cores wants them.
  """
  return jnp.einsum(
    'bkgwx,bxkd->bwkgd',
    weights.astype(values.dtype),
    values,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
