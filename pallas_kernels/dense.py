"""Products with weights `[out, in]` that XLA does, and SwiGLU."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import QuantizedArray, dequantize

# The least number of rows for which products are not merged. Merging cost 65
# rows nothing and 257 rows some time; in between nothing was measured.
MANY_ROWS = 128
# The weights of a SwiGLU: gate and up `[W, H]`, down `[H, W]`.
Weights = tuple[
  jax.Array | QuantizedArray,
  jax.Array | QuantizedArray,
  jax.Array | QuantizedArray,
]


def matmul(x: jax.Array, w: jax.Array | QuantizedArray) -> jax.Array:
  """`x [..., I] @ w[O, I].T -> [..., O]` in float32.

  HIGHEST keeps float32 operands from being rounded to tf32 on a GPU; it means
  nothing for bfloat16, which is accumulated in float32 either way. Gradients
  take the dtype of `x` before they are multiplied.
  """
  if isinstance(w, QuantizedArray):
    # The barrier makes the weight depend on x. Without it XLA dequantizes once,
    # before the decoding loop, and keeps the result beside the quantised one.
    x, w = lax.optimization_barrier((x, w))
    w = dequantize(w, x.dtype)
  return _product(x, w)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
  """`matmul` of arrays, with a gradient that runs on tensor cores.

  JAX's own gradient of a product with a float32 result multiplies in float32,
  whatever the operands are.
  """
  return dot(x, w, (x.ndim - 1,), (w.ndim - 1,))


def _product_forward(x, w):
  return _product(x, w), (x, w)


def _product_backward(operands, gradient):
  x, w = operands
  gradient = gradient.astype(x.dtype)
  outer = tuple(range(x.ndim - 1))
  dx = dot(gradient, w, (x.ndim - 1,), (0,))
  dw = dot(gradient, x, outer, outer)
  return dx.astype(x.dtype), dw.astype(w.dtype)


_product.defvjp(_product_forward, _product_backward)


def dot(
  x: jax.Array,
  w: jax.Array,
  x_axes: tuple[int, ...],
  w_axes: tuple[int, ...],
) -> jax.Array:
  """The float32 sum over pairs of axes of two arrays; see `matmul`."""
  return lax.dot_general(
    x,
    w,
    ((x_axes, w_axes), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def prevent_fusion(x: jax.Array) -> jax.Array:
  """`x [..., I]`, after an optimization barrier if it has many rows.

  XLA fuses products that share an operand into one, whose weights are the
  concatenation of theirs. For few rows the weights are read through the
  concatenation; for many rows it is written to memory first, a copy of the
  weights in every step. To XLA the result of a barrier is another operand.
  """
  many = math.prod(x.shape[:-1]) >= MANY_ROWS
  return lax.optimization_barrier(x) if many else x


def swiglu(
  x: jax.Array,
  gate: jax.Array | QuantizedArray,
  up: jax.Array | QuantizedArray,
  down: jax.Array | QuantizedArray,
) -> jax.Array:
  """`down(silu(gate(x)) * up(x))`, every step in x's dtype.

  Args:
    x: `[..., H]` float32 or bfloat16.
    gate: `[W, H]`, of x's dtype or quantised.
    up: `[W, H]`, likewise.
    down: `[H, W]`, likewise.

  Returns:
    `[..., H]` in x's dtype.
  """
  gated = jax.nn.silu(matmul(x, gate).astype(x.dtype))
  inner = gated * matmul(prevent_fusion(x), up).astype(x.dtype)
  return matmul(inner, down).astype(x.dtype)
