"""The one entry to the router."""

from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import _checks, _dispatch
from pallas_kernels.expert_router import mosaic_gpu, reference
from pallas_kernels.expert_router.reference import (
  RouterConfig,
  Routing,
  route,
)

__all__ = ('RouterConfig', 'Routing', 'expert_router', 'route')

_IMPLEMENTATIONS = {
  'mosaic_gpu': _dispatch.for_hopper(
    mosaic_gpu.expert_router, mosaic_gpu.why_not
  ),
  'reference': _dispatch.Implementation(reference.expert_router),
}


def expert_router(
  x: Float[Array, 'rows M'],
  gate: Float32[Array, 'E M'],
  bias: Float32[Array, ' E'] | None,
  valid: Bool[Array, ' rows'] | None,
  config: RouterConfig,
  *,
  implementation: str | None = None,
) -> tuple[Routing, Int32[Array, 'rows K']]:
  """Chooses each row's experts and their weights.

  The logits are the float32 product of x and the gate. Scores are ordered by
  their bits' total order, as `lax.top_k` does: a positive NaN is the highest.
  Differentiable in x and the gate, through the weights.

  Args:
    x: `[T, H]` float32 or bfloat16.
    gate: `[E, H]` float32.
    bias: `[E]` float32, added to the scores for the choice only; or None.
    valid: `[T]` bool, rows that need experts; None if all rows do.
    config: how experts are chosen.
    implementation: None for the best available, "mosaic_gpu" (a Hopper GPU,
      bfloat16) or "reference".

  Returns:
    The routing of all rows; and the dispatch ids `[T, K]` int32, which
    `expert_mlp` takes: the routing's ids, but E, which is no expert, in rows
    that are not valid.

  Raises:
    ValueError: wrong shapes or dtypes, or an implementation that is not there.
  """
  x = _checks.check_array('x', x, (None, None), _checks.FLOATS)
  rows, hidden = x.shape
  gate = _checks.check_array('gate', gate, (None, hidden), ('float32',))
  experts = gate.shape[0]
  if bias is not None:
    bias = _checks.check_array('bias', bias, (experts,), ('float32',))
  if valid is not None:
    valid = _checks.check_array('valid', valid, (rows,), ('bool',))
  return _dispatch.call(
    'expert_router',
    _IMPLEMENTATIONS,
    implementation,
    x,
    gate,
    bias,
    valid,
    config,
  )
