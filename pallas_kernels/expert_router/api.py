"""The one entry to the router."""

import jax

from pallas_kernels import _checks, _dispatch
from pallas_kernels.expert_router import mosaic_gpu, reference
from pallas_kernels.expert_router.reference import Routing, Rules, route

__all__ = ('Routing', 'Rules', 'expert_router', 'route')


def expert_router(
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  rules: Rules,
  *,
  implementation: str | None = None,
) -> tuple[Routing, jax.Array]:
  """Chooses each row's experts and what they are mixed with.

  The logits are the float32 product of x and the gate. Scores are ordered by
  their bits' total order, as `lax.top_k` does: a positive NaN is the highest.
  Differentiable in x and the gate, through the weights.

  Args:
    x: `[T, H]` float32 or bfloat16.
    gate: `[E, H]` float32.
    bias: `[E]` float32, added to the scores for the choice only; or None.
    valid: `[T]` bool, rows that need experts; None if all do.
    rules: how experts are chosen.
    implementation: None for the best available, "mosaic_gpu" (a Hopper GPU,
      bfloat16, one group) or "reference".

  Returns:
    The routing of all rows; and its ids `[T, K]` int32 again, but E, which is
    no expert, in rows that are not valid: what `expert_mlp` takes.

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
  run = _dispatch.with_mosaic(
    'expert_router',
    mosaic_gpu.expert_router,
    reference.expert_router,
    implementation,
    mosaic_gpu.unsupported(x, experts, rules),
  )
  return run(x, gate, bias, valid, rules)
