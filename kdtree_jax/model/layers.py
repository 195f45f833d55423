"""The parts of every block: weights, linear maps, norms, SwiGLU.

Weights keep the checkpoint's layout, `[out, in]`, so that loading is a copy
and an output row is contiguous in memory.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.dense import Weights, dot, matmul, swiglu

Initializer = Callable[..., jax.Array]

# 0.02 is the initializer_range of the whole model family.
matrix_init = nn.initializers.normal(0.02)


def weight(
  module: nn.Module,
  name: str,
  init: Initializer,
  shape: tuple[int, ...],
  dtype: DTypeLike,
) -> Any:
  """A weight of a module; all modules read their parameters through this.

  While initialising, this is `self.param`. Afterwards the weight is read as it
  is stored: `self.param` requires an array of one shape, and a quantised weight
  is a small pytree.
  """
  if module.is_initializing():
    return module.param(name, init, shape, dtype)
  return module.get_variable('params', name)


@jax.custom_vjp
def lookup(
  table: Float[Array, 'V M'], tokens: Int32[Array, '*batch']
) -> Float[Array, '*batch M']:
  """The tokens' rows of a table."""
  return table[tokens]


def _lookup_forward(table, tokens):
  return table[tokens], (table, tokens)


def _lookup_backward(saved, gradient):
  """The gradient as a product with one-hot rows, which are as large as logits.

  A scatter would add up the gradients of equal tokens in bfloat16, by atomics:
  thousands of terms in an order that changes from run to run.
  """
  table, tokens = saved
  rows = jax.nn.one_hot(tokens.reshape(-1), table.shape[0], dtype=table.dtype)
  flat = gradient.reshape(-1, table.shape[1]).astype(table.dtype)
  return dot(rows, flat, (0,), (0,)).astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


class Linear(nn.Module):
  """A product with a weight, in the dtype of the input."""

  features: int
  dtype: DTypeLike
  use_bias: bool = False

  @nn.compact
  def __call__(
    self, x: Float[Array, '*batch inputs']
  ) -> Float[Array, '*batch {self.features}']:
    shape = (self.features, x.shape[-1])
    y = matmul(x, weight(self, 'weight', matrix_init, shape, self.dtype))
    if self.use_bias:
      zeros = nn.initializers.zeros_init()
      bias = weight(self, 'bias', zeros, shape[:1], self.dtype)
      y = y + lax.expand_dims(bias.astype(y.dtype), range(y.ndim - 1))
    return y.astype(x.dtype)


class RMSNorm(nn.Module):
  """Root mean square norm over the last axis, computed in float32.

  The result is cast to the input's dtype before the weight is applied, as in
  the library transformers.
  """

  eps: float
  dtype: DTypeLike

  @nn.compact
  def __call__(
    self, x: Float[Array, '*batch width']
  ) -> Float[Array, '*batch width']:
    ones = nn.initializers.ones_init()
    scale = weight(self, 'weight', ones, x.shape[-1:], self.dtype)
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    scale = lax.expand_dims(scale.astype(x.dtype), range(x.ndim - 1))
    return y.astype(x.dtype) * scale


class Matrix(nn.Module):
  """A single weight `[rows, columns]`, as of an embedding or a head.

  It is an array, or a `QuantizedArray` if it is stored as one.
  """

  rows: int
  columns: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self) -> Any:
    shape = (self.rows, self.columns)
    return weight(self, 'weight', matrix_init, shape, self.dtype)


class SwiGLU(nn.Module):
  """`down(silu(gate(x)) * up(x))` without biases."""

  intermediate_size: int
  dtype: DTypeLike

  @nn.compact
  def weights(self, hidden: int) -> Weights:
    """gate and up `[intermediate_size, hidden]`, down transposed to them."""
    inner = self.intermediate_size
    return (
      Matrix(inner, hidden, self.dtype, name='gate_proj')(),
      Matrix(inner, hidden, self.dtype, name='up_proj')(),
      Matrix(hidden, inner, self.dtype, name='down_proj')(),
    )

  def __call__(self, x: Float[Array, '*batch M']) -> Float[Array, '*batch M']:
    return swiglu(x, *self.weights(x.shape[-1]))
