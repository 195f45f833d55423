"""The one entry to attention over the latent cache and the new rows.

Absorbed form of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434):
one latent row (c, rotated k_rope) is key and, by its first R values, value of
all heads. With q = (q_nope W_UK, rotated q_rope), out = softmax(scale q . row)
c; the caller applies W_UV.

Scores and softmax are float32; the unnormalised weights take the cache's dtype
for the product with the values.
"""

import math

from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels import _bits, _checks, _dispatch
from pallas_kernels.verify_attention import mosaic_gpu, reference, training

__all__ = ('verify_attention',)

_IMPLEMENTATIONS = {
  'mosaic_gpu': _dispatch.for_hopper(
    mosaic_gpu.verify_attention, mosaic_gpu.why_not
  ),
  'reference': _dispatch.Implementation(reference.verify_attention),
  'training': _dispatch.Implementation(
    training.verify_attention, training.why_not
  ),
}


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
  implementation: str | None = None,
) -> Float[Array, 'B N H R']:
  """Attention of N new nodes over the committed prefix and each other.

  A node sees the first `lengths[b]` rows of `cache[layer, b]` and the new rows
  its ancestor bits name. Any content of other rows leaves its result bitwise
  the same, NaN and infinities included, wherever they are: behind `lengths`, in
  padding, in new rows that other nodes see. NaN in a row that a node does see
  makes NaN of its result; an infinity does so unless it makes the row's weight
  0. A node that sees nothing gets zeros.

  Args:
    query: `[B, N, H, C]` float32 or bfloat16.
    cache: `[L, B, S, C]`, of the query's dtype; only read.
    rows: `[B, N, C]`, of the query's dtype; this layer's new rows.
    lengths: `[B]` int32, committed rows, 0..S.
    layer: index of the layer in the cache, static.
    value_dim: R, how many leading values of a row are its value, static.
    scale: softmax scale, static.
    ancestors: `[B, N, ceil(N / 32)]` uint32 as in `_bits`, or None
      for a chain: node i sees the new rows j <= i.
    implementation: "reference", "mosaic_gpu" (bfloat16 on a Hopper GPU, see
      `mosaic_gpu.why_not`), "training" (an empty cache, finite rows, and no
      node sees a later one; its gradient keeps no scores), or None for the
      best that runs.

  Returns:
    `[B, N, H, R]` in the query's dtype.

  Raises:
    ValueError: wrong shapes or dtypes, `layer` or `value_dim` out of range, a
      scale that is not finite, or an implementation that cannot run here.
  """
  query = _checks.check_array('query', query, (None,) * 4, _checks.FLOATS)
  batch, n, _, width = query.shape
  dtype = (query.dtype.name,)
  cache = _checks.check_array('cache', cache, (None, batch, None, width), dtype)
  rows = _checks.check_array('rows', rows, (batch, n, width), dtype)
  lengths = _checks.check_array('lengths', lengths, (batch,), _checks.INT32)
  layer = _checks.check_int('layer', layer, 0, cache.shape[0] - 1)
  value_dim = _checks.check_int('value_dim', value_dim, 1, width)
  if not math.isfinite(scale):
    raise ValueError(f'scale: expected a finite number, got {scale!r}')
  if ancestors is not None:
    ancestors = _checks.check_array(
      'ancestors', ancestors, (batch, n, _bits.num_words(n)), ('uint32',)
    )
  return _dispatch.call(
    'verify_attention',
    _IMPLEMENTATIONS,
    implementation,
    query,
    cache,
    rows,
    lengths,
    layer=layer,
    value_dim=value_dim,
    scale=float(scale),
    ancestors=ancestors,
  )
