"""The one entry to a drafter's attention in decoding.

One block of W slots a sequence attends to the committed rows of its context and
to itself (DFlash, arXiv:2602.06036). Heads are grouped: G query heads share the
keys and values of one of K heads. A row, of the context as of the block, holds
the K keys, already rotated, and then the K values.

Scores and softmax are float32; the unnormalised weights take the values' dtype
for the product with them.
"""

import math

from jaxtyping import Array, Float, Int32

from pallas_kernels import _checks, _dispatch
from pallas_kernels.draft_attention import mosaic_gpu, reference

__all__ = ('draft_attention',)

_IMPLEMENTATIONS = {
  'mosaic_gpu': _dispatch.for_hopper(
    mosaic_gpu.draft_attention, mosaic_gpu.why_not
  ),
  'reference': _dispatch.Implementation(reference.draft_attention),
}


def draft_attention(
  query: Float[Array, 'B slots kv_heads group head_dim'],
  context: Float[Array, 'drafter_layers B S keys_values'],
  rows: Float[Array, 'B slots keys_values'],
  lengths: Int32[Array, ' B'],
  *,
  layer: int,
  scale: float,
  causal: bool = False,
  window: int | None = None,
  window_from_root: bool = False,
  implementation: str | None = None,
) -> Float[Array, 'B slots kv_heads group head_dim']:
  """Attention of one block over the committed context and the block.

  Slot w stands at position `lengths[b] + w`. It sees the first `lengths[b]`
  rows of `context[layer, b]` and the rows of the block, of both only what the
  masks leave. Any content of other rows leaves a slot's result bitwise the
  same, NaN and infinities included. A slot that does see NaN in a row's key or
  value has NaN in its result, of the heads that share them.

  Args:
    query: `[B, W, K, G, d]` float32 or bfloat16, rotated.
    context: `[L, B, S, 2 K d]`, of the query's dtype; only read.
    rows: `[B, W, 2 K d]`, of the query's dtype; this layer's keys and values of
      the block.
    lengths: `[B]` int32, committed rows, 0..S.
    layer: index of the layer in the context, static.
    scale: softmax scale, static.
    causal: a slot does not see the later ones of the block, static.
    window: a slot sees rows less than so many positions before it; None for
      all. Static.
    window_from_root: the window is measured from the first slot, static.
    implementation: "reference", "mosaic_gpu" (bfloat16 on a Hopper GPU, see
      `mosaic_gpu.why_not`), or None for the best that runs.

  Returns:
    `[B, W, K, G, d]` in the query's dtype.

  Raises:
    ValueError: wrong shapes or dtypes, `layer` or `window` out of range, a
      scale that is not finite, or an implementation that cannot run here.
  """
  query = _checks.check_array('query', query, (None,) * 5, _checks.FLOATS)
  batch, slots, heads, group, dim = query.shape
  if not (slots and heads and group and dim):
    raise ValueError(f'query: expected no empty axis, got {query.shape}')
  dtype, width = (query.dtype.name,), 2 * heads * dim
  context = _checks.check_array(
    'context', context, (None, batch, None, width), dtype
  )
  rows = _checks.check_array('rows', rows, (batch, slots, width), dtype)
  lengths = _checks.check_array('lengths', lengths, (batch,), _checks.INT32)
  layer = _checks.check_int('layer', layer, 0, context.shape[0] - 1)
  if window is not None:
    window = _checks.check_int('window', window, 1)
  if not math.isfinite(scale):
    raise ValueError(f'scale: expected a finite number, got {scale!r}')
  return _dispatch.call(
    'draft_attention',
    _IMPLEMENTATIONS,
    implementation,
    query,
    context,
    rows,
    lengths,
    layer=layer,
    scale=float(scale),
    causal=bool(causal),
    window=window,
    window_from_root=bool(window_from_root),
  )
