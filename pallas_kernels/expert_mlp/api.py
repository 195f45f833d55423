"""The one entry to the experts, routed and shared."""

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import _checks, _dispatch, dense
from pallas_kernels.expert_mlp import mosaic_gpu, reference, training
from pallas_kernels.quantized import QuantizedArray

__all__ = ('expert_mlp',)

_IMPLEMENTATIONS = {
  'mosaic_gpu': _dispatch.for_hopper(mosaic_gpu.expert_mlp, mosaic_gpu.why_not),
  'reference': _dispatch.Implementation(reference.expert_mlp),
  'training': _dispatch.Implementation(training.expert_mlp, training.why_not),
}


def expert_mlp(
  x: Float[Array, 'rows M'],
  gate_up: Float[Array, 'E gate_up M'] | QuantizedArray,
  down: Float[Array, 'E M inner'] | QuantizedArray,
  expert_ids: Int32[Array, 'rows K'],
  expert_weights: Float32[Array, 'rows K'],
  *,
  shared: dense.Weights | None = None,
  implementation: str | None = None,
) -> Float[Array, 'rows M']:
  """A dropless mixture of SwiGLU experts.

  y_t = sum_k w_tk down_e(silu(gate_e x_t) * up_e x_t) with e = expert_ids[t, k]
  (SwiGLU: arXiv:2002.05202; the mixture: DeepSeek-V3, arXiv:2412.19437). There
  is no capacity and rows are independent: no row's content changes another
  row. The sum is float32, in order of expert id for any number of rows; the
  activation takes x's dtype before the down product. Differentiable in x, the
  weights of the experts and `expert_weights`.

  With `shared`, y_t gains the SwiGLU of these weights, whatever the row's ids:
  `dense.swiglu`, in x's dtype, added to y in x's dtype. From 128 to about a
  thousand rows "mosaic_gpu" computes it as W / I more experts, if that number
  is whole and nothing is quantised: their float32 results come first in the
  sum. So the last bits of a row with shared experts depend on the number of
  rows.

  Args:
    x: `[T, H]` float32 or bfloat16.
    gate_up: `[E, 2 * I, H]`, of x's dtype or quantised; an expert's gate rows,
      then its up rows.
    down: `[E, H, I]`, of x's dtype or quantised. Quantised weights become x's
      dtype one expert at a time; only "reference" takes them.
    expert_ids: `[T, K]` int32. An id outside 0..E-1 is no expert and costs
      nothing (padding uses E); an id that occurs twice in a row adds up.
    expert_weights: `[T, K]` float32.
    shared: gate `[W, H]`, up `[W, H]` and down `[H, W]` of x's dtype or
      quantised, or None.
    implementation: None for the best available, "mosaic_gpu" (a Hopper GPU,
      bfloat16), "reference", or "training": all experts on all rows in two
      products, for few experts that are not quantised.

  Returns:
    `[T, H]` in x's dtype; zeros for a row without experts, if none is shared.

  Raises:
    ValueError: wrong shapes or dtypes, or an implementation that is not there.
  """
  x = _checks.check_array('x', x, (None, None), _checks.FLOATS)
  rows, hidden = x.shape
  dtype = (x.dtype.name,)
  down = _check_weight('down', down, (None, hidden, None), dtype)
  experts, _, inner = down.shape
  gate_up = _check_weight(
    'gate_up', gate_up, (experts, 2 * inner, hidden), dtype
  )
  expert_ids = _checks.check_array(
    'expert_ids', expert_ids, (rows, None), _checks.INT32
  )
  expert_weights = _checks.check_array(
    'expert_weights', expert_weights, expert_ids.shape, ('float32',)
  )
  if shared is not None:
    shared = _check_shared(shared, hidden, dtype)
  return _dispatch.call(
    'expert_mlp',
    _IMPLEMENTATIONS,
    implementation,
    x,
    gate_up,
    down,
    expert_ids,
    expert_weights,
    shared,
  )


def _check_shared(shared, hidden, dtypes):
  """`shared` after checking its shapes against each other."""
  if len(shared) != 3:
    raise ValueError(
      f'shared: expected gate, up and down, got {len(shared)} weights'
    )
  gate, up, down = shared
  gate = _check_weight('shared gate', gate, (None, hidden), dtypes)
  width = gate.shape[0]
  up = _check_weight('shared up', up, (width, hidden), dtypes)
  down = _check_weight('shared down', down, (hidden, width), dtypes)
  return gate, up, down


def _check_weight(name, value, shape, dtypes):
  """`_checks.check_array` for a weight that may be quantised."""
  if not isinstance(value, QuantizedArray):
    return _checks.check_array(name, value, shape, dtypes)
  value.check(name)
  _checks.check_shape(name, value.shape, shape)
  return value
