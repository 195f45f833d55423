"""Verify attention in plain jnp: two key blocks, one softmax."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels import _bits, _softmax


def verify_attention(
  query: Float[Array, 'B N H C'],
  cache: Float[Array, 'L B S C'],
  rows: Float[Array, 'B N C'],
  lengths: Int32[Array, ' B'],
  *,
  layer: int,
  value_dim: int,
  scale: float,
  ancestors: UInt32[Array, 'B N words'] | None,
) -> Float[Array, 'B N H R']:
  """See `pallas_kernels.verify_attention.api.verify_attention`."""
  n = query.shape[1]
  position = np.arange(cache.shape[2], dtype=np.int32)
  in_prefix = position[None, :] < lengths[:, None]
  if ancestors is None:
    causal = np.tril(np.ones((n, n), bool))
    visible = jnp.broadcast_to(causal, (query.shape[0], n, n))
  else:
    visible = _bits.unpack_bits(ancestors, n)
  prefix = cache[layer]

  # The prefix mask is the same for all nodes and stays [B, 1, 1, S].
  def scores(keys, mask):
    return _softmax.scores('bnhc,bxc->bnhx', query, keys, scale, mask)

  weights, total = _softmax.weights(
    [
      scores(prefix, in_prefix[:, None, None, :]),
      scores(rows, visible[:, :, None, :]),
    ]
  )
  out = sum(
    _softmax.mix('bnhx,bxr->bnhr', w, keys[:, :, :value_dim])
    for w, keys in zip(weights, (prefix, rows), strict=True)
  )
  # A node that sees nothing has a total of 0.
  return (out / jnp.where(total == 0, 1.0, total)).astype(query.dtype)
