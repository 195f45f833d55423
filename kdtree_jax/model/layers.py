"""What every block is made of: weights, linear maps, norms, SwiGLU.

Weights keep the checkpoint's layout, `[out, in]`, so that loading is a copy
and an output row is contiguous in memory.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import QuantizedArray, expand

Initializer = Callable[..., jax.Array]

# 0.02 is the initializer_range of the whole model family.
matrix_init = nn.initializers.normal(0.02)


def weight(
  module: nn.Module,
  name: str,
  init: Initializer,
  shape: tuple[int, ...],
  dtype: Any,
) -> Any:
  """Reads a weight; the one place where a module touches its parameters.

  While initialising it is an ordinary `self.param`. Afterwards it is read as
  it is stored: `self.param` insists on an array of one shape, and a quantised
  weight is a small pytree.
  """
  if module.is_initializing():
    return module.param(name, init, shape, dtype)
  return module.get_variable('params', name)


def matmul(x: jax.Array, w: jax.Array | QuantizedArray) -> jax.Array:
  """`x [..., I] @ w[O, I].T -> [..., O]` in float32.

  HIGHEST keeps float32 operands from being rounded to tf32 on a GPU; it means
  nothing for bfloat16, which is accumulated in float32 either way. Gradients
  take the dtype of `x` before they are multiplied.
  """
  if isinstance(w, QuantizedArray):
    # Tied to x, or XLA expands the weight once, before the decoding loop, and
    # holds it beside the quantised one.
    x, w = lax.optimization_barrier((x, w))
    w = expand(w, x.dtype)
  return _product(x, w)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
  """`matmul` of arrays.

  The gradient of a product with a float32 result would multiply in float32,
  off the tensor cores, whatever the operands are.
  """
  return _dot(x, w, (x.ndim - 1,), (w.ndim - 1,))


def _product_forward(x, w):
  return _product(x, w), (x, w)


def _product_backward(operands, gradient):
  x, w = operands
  gradient = gradient.astype(x.dtype)
  outer = tuple(range(x.ndim - 1))
  dx = _dot(gradient, w, (x.ndim - 1,), (0,))
  dw = _dot(gradient, x, outer, outer)
  return dx.astype(x.dtype), dw.astype(w.dtype)


_product.defvjp(_product_forward, _product_backward)


def _dot(x, w, x_axes, w_axes):
  return lax.dot_general(
    x,
    w,
    ((x_axes, w_axes), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


@jax.custom_vjp
def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
  """`table [V, H]` at `tokens [...]` int32: `[..., H]`."""
  return table[tokens]


def _lookup_forward(table, tokens):
  return table[tokens], (table, tokens)


def _lookup_backward(saved, gradient):
  """A product with one-hot rows: no larger than logits, and in one order.

  A scatter would add thousands of equal tokens up in bfloat16, by atomics.
  """
  table, tokens = saved
  rows = jax.nn.one_hot(tokens.reshape(-1), table.shape[0], dtype=table.dtype)
  flat = gradient.reshape(-1, table.shape[1]).astype(table.dtype)
  return _dot(rows, flat, (0,), (0,)).astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


class Linear(nn.Module):
  """`[..., I] -> [..., features]`, in the dtype of the input."""

  features: int
  dtype: Any
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (self.features, x.shape[-1])
    y = matmul(x, weight(self, 'weight', matrix_init, shape, self.dtype))
    if self.use_bias:
      zeros = nn.initializers.zeros_init()
      bias = weight(self, 'bias', zeros, shape[:1], self.dtype)
      y = y + lax.expand_dims(bias.astype(y.dtype), range(y.ndim - 1))
    return y.astype(x.dtype)


class RMSNorm(nn.Module):
  """Root mean square norm over the last axis, computed in float32.

  Cast to the input's dtype before the weight is applied, as transformers does.
  """

  eps: float
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    ones = nn.initializers.ones_init()
    scale = weight(self, 'weight', ones, x.shape[-1:], self.dtype)
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    scale = lax.expand_dims(scale.astype(x.dtype), range(x.ndim - 1))
    return y.astype(x.dtype) * scale


class SwiGLU(nn.Module):
  """`down(silu(gate(x)) * up(x))` without biases."""

  intermediate_size: int
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    gate = Linear(self.intermediate_size, self.dtype, name='gate_proj')(x)
    up = Linear(self.intermediate_size, self.dtype, name='up_proj')(x)
    down = Linear(x.shape[-1], self.dtype, name='down_proj')
    return down(nn.silu(gate) * up)
