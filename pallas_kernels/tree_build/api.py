"""The one entry to building draft trees."""

from jaxtyping import Array, Float, Int32

from pallas_kernels import _checks, _dispatch
from pallas_kernels._bits import ancestors_from_parents
from pallas_kernels.tree_build import mosaic_gpu, reference
from pallas_kernels.tree_build.reference import TreeArrays, canonical

__all__ = ('ancestors_from_parents', 'canonical', 'TreeArrays', 'tree_build')

_IMPLEMENTATIONS = {
  'mosaic_gpu': _dispatch.for_hopper(mosaic_gpu.tree_build, mosaic_gpu.why_not),
  'reference': _dispatch.Implementation(reference.tree_build),
}


def tree_build(
  logits: Float[Array, 'B D V'],
  root: Int32[Array, ' B'],
  *,
  budget: int,
  implementation: str | None = None,
) -> TreeArrays:
  """Builds the tree of the `budget` most probable prefixes under the drafter.

  score(u) = sum over depths d of log softmax(logits[d])[u_d], in fixed point
  (`reference.SCALE` units to a nat, see there), of prefixes of length 1..D.
  Nodes are ordered by score descending, then by the path of ranks
  lexicographically; ranks are by (logit descending, token id ascending). So
  `parents[i] < i`, and the tree of budget b is a prefix of that of b + 1.
  Source: DDTree, github.com/liranringel/ddtree.

  A logit of -inf or NaN bars its token; a depth that bars every token ends
  the tree. Logits of +inf share all probability and bar the others of their
  depth. (`canonical` makes NaN -inf, and +inf the largest finite float32.)

  Args:
    logits: `[B, D, V]` float32 or bfloat16; D at most 31, V at most 2^20. D = 0
      gives the tree that is only a root.
    root: `[B]` int32, the root's token.
    budget: nodes besides the root, static, >= 0. N = 1 + budget.
    implementation: None for the best available, "mosaic_gpu" (a Hopper GPU)
      or "reference".

  Returns:
    `TreeArrays`: tokens, parents, depths `[B, N]` int32, scores `[B, N]`
    float32, num_nodes `[B]` int32, ancestors `[B, N, ceil(N / 32)]` uint32.
    `num_nodes` is less than N when there are fewer prefixes than `budget`.

  Raises:
    ValueError: wrong shapes or dtypes, D or V too large, a negative budget, or
      an implementation that is not there.
  """
  logits = _checks.check_array(
    'logits', logits, (None, None, None), _checks.FLOATS
  )
  batch, depth, vocab = logits.shape
  root = _checks.check_array('root', root, (batch,), _checks.INT32)
  budget = _checks.check_int('budget', budget, 0)
  if depth > reference.MAX_DEPTH:
    raise ValueError(
      f'logits: {depth} depths; fixed-point scores hold at most '
      f'{reference.MAX_DEPTH}'
    )
  if not 1 <= vocab <= reference.MAX_VOCAB:
    raise ValueError(
      f'logits: vocabulary of {vocab}; expected 1..{reference.MAX_VOCAB}'
    )
  return _dispatch.call(
    'tree_build', _IMPLEMENTATIONS, implementation, logits, root, budget=budget
  )
