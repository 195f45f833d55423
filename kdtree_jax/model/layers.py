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
  nothing for bfloat16, which is accumulated in float32 either way.
  """
  if isinstance(w, QuantizedArray):
    # Tied to x, or XLA expands the weight once, before the decoding loop, and
    # holds it beside the quantised one.
    x, w = lax.optimization_barrier((x, w))
    w = expand(w, x.dtype)
  contract = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
  return lax.dot_general(
    x,
    w,
    contract,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


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
