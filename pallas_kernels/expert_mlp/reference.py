"""The experts in plain jnp, one after the other on all rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dense
from pallas_kernels.quantized import QuantizedArray, dequantize


def expert_mlp(
  x: Float[Array, 'rows M'],
  gate_up: Float[Array, 'E gate_up M'] | QuantizedArray,
  down: Float[Array, 'E M inner'] | QuantizedArray,
  expert_ids: Int32[Array, 'rows K'],
  expert_weights: Float32[Array, 'rows K'],
  shared: dense.Weights | None = None,
) -> Float[Array, 'rows M']:
  """See `pallas_kernels.expert_mlp.api.expert_mlp`."""

  def step(total, expert):
    chosen = expert_ids == expert
    weight = jnp.sum(jnp.where(chosen, expert_weights, 0.0), axis=1)

    def add(total):
      # Sliced inside the branch: an expert that no row chose is not even read.
      one = (dequantize(stack[expert], x.dtype) for stack in (gate_up, down))
      y = _mlp(x, *one)
      # Selected, not multiplied by 0: an expert that a row did not choose may
      # give inf for it, and 0 times inf is NaN.
      wanted = jnp.any(chosen, axis=1)[:, None]
      return total + jnp.where(wanted, weight[:, None] * y, 0.0)

    return lax.cond(jnp.any(chosen), add, lambda total: total, total), None

  experts = jnp.arange(gate_up.shape[0], dtype=jnp.int32)
  total, _ = lax.scan(step, jnp.zeros(x.shape, jnp.float32), experts)
  y = total.astype(x.dtype)
  return y if shared is None else y + dense.swiglu(x, *shared)


def _mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
  """One expert's SwiGLU on all rows: `[T, H]` to float32 `[T, H]`."""
  gate, up = jnp.split(_project(x, gate_up), 2, axis=1)
  return _project((jax.nn.silu(gate) * up).astype(x.dtype), down)


def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x` `[T, in]` times `weight` `[out, in]` transposed, in float32."""
  return jnp.einsum(
    'ti,oi->to',
    x,
    weight,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
