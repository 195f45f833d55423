"""The one entry to accepting tokens of a draft tree."""

from jaxtyping import Array, Int32

from pallas_kernels import _checks, _dispatch
from pallas_kernels.tree_accept import mosaic_gpu, reference
from pallas_kernels.tree_accept.reference import AcceptArrays

__all__ = ('AcceptArrays', 'tree_accept')

_IMPLEMENTATIONS = {
  'mosaic_gpu': _dispatch.for_hopper(
    mosaic_gpu.tree_accept, mosaic_gpu.why_not
  ),
  'reference': _dispatch.Implementation(reference.tree_accept),
}


def tree_accept(
  tokens: Int32[Array, 'B N'],
  parents: Int32[Array, 'B N'],
  num_nodes: Int32[Array, ' B'],
  target_tokens: Int32[Array, 'B N'],
  *,
  max_depth: int,
  implementation: str | None = None,
) -> AcceptArrays:
  """Walks each tree from the root along the target's own tokens.

  At a node, the walk goes to the child that holds the target's token for that
  node, the lowest index among duplicates, until no child holds it or after
  `max_depth` steps. For a deterministic tree this is exact at any temperature
  when `target_tokens` are the target's samples (sample and match).

  It ends after `max_depth` steps whatever `parents` holds: parents out of
  range are children of no node, and cycles end at the bound.

  Args:
    tokens: `[B, N]` int32, the nodes' tokens; node 0 is the root.
    parents: `[B, N]` int32, -1 for root and padding.
    num_nodes: `[B]` int32; nodes at or beyond it are never followed.
    target_tokens: `[B, N]` int32, the target's token after each node.
    max_depth: bound on the accepted tokens, static, >= 0.
    implementation: None for the best available, "mosaic_gpu" (a Hopper GPU)
      or "reference".

  Returns:
    `AcceptArrays`: path `[B, max_depth + 1]` int32 starting at 0, entries
    after `num_accepted` repeat the last accepted node; num_accepted `[B]` int32
    in 0..max_depth; next_token `[B]` int32, the target's token at the last
    accepted node, the next root.

  Raises:
    ValueError: wrong shapes or dtypes, a negative `max_depth`, or an
      implementation that is not there.
  """
  tokens = _checks.check_array('tokens', tokens, (None, None), _checks.INT32)
  batch, n = tokens.shape
  if n < 1:
    raise ValueError('tokens: a tree has at least its root, got N = 0')
  parents = _checks.check_array('parents', parents, (batch, n), _checks.INT32)
  num_nodes = _checks.check_array(
    'num_nodes', num_nodes, (batch,), _checks.INT32
  )
  target_tokens = _checks.check_array(
    'target_tokens', target_tokens, (batch, n), _checks.INT32
  )
  max_depth = _checks.check_int('max_depth', max_depth, 0)
  return _dispatch.call(
    'tree_accept',
    _IMPLEMENTATIONS,
    implementation,
    tokens,
    parents,
    num_nodes,
    target_tokens,
    max_depth=max_depth,
  )
