"""A drafter's attention in plain jnp: two key blocks, one softmax."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels import _softmax


def draft_attention(
  query: Float[Array, 'B slots kv_heads group head_dim'],
  context: Float[Array, 'drafter_layers B S keys_values'],
  rows: Float[Array, 'B slots keys_values'],
  lengths: Int32[Array, ' B'],
  *,
  layer: int,
  scale: float,
  causal: bool,
  window: int | None,
  window_from_root: bool,
) -> Float[Array, 'B slots kv_heads group head_dim']:
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
    distance = lengths[:, None] - position[None, :]
    seen &= distance[:, None, :] + at[None, :, None] < window

  def halves(x):
    x = x.reshape(*x.shape[:-1], 2, heads, dim)
    keys, values = x[..., 0, :, :], x[..., 1, :, :]
    return _softmax.tainted(keys, values), values

  # The masks are the same for all heads and stay [B, 1, 1, W or 1, S].
  (prefix_keys, prefix_values), (keys, values) = (
    halves(x) for x in (context[layer], rows)
  )

  def scores(keys, mask):
    return _softmax.scores('bwkgd,bxkd->bkgwx', query, keys, scale, mask)

  weights, total = _softmax.weights(
    [
      scores(prefix_keys, seen[:, None, None]),
      scores(keys, own[None, None, None]),
    ]
  )
  out = sum(
    _softmax.mix('bkgwx,bxkd->bwkgd', w, v)
    for w, v in zip(weights, (prefix_values, values), strict=True)
  )
  # Every slot sees itself: no total is 0.
  return (out / jnp.moveaxis(total, 3, 1)).astype(query.dtype)
