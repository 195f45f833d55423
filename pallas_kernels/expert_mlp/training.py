"""The experts in two products, which apply all of them to all rows.

For few small experts this costs less than sorting rows by expert, and the
gradient is two products too. The mixing weights are applied before the second
product, which then sums over experts as well.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dense
from pallas_kernels.quantized import QuantizedArray


def why_not(
  x: jax.Array,
  gate_up: jax.Array | QuantizedArray,
  down: jax.Array | QuantizedArray,
  *others: jax.Array | dense.Weights | None,
) -> str | None:
  """Why it cannot take these arguments; None if it can."""
  del x, others
  if isinstance(gate_up, QuantizedArray) or isinstance(down, QuantizedArray):
    return 'it takes no quantised weights'
  return None


def expert_mlp(
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  expert_ids: jax.Array,
  expert_weights: jax.Array,
  shared: dense.Weights | None = None,
) -> jax.Array:
  """See `api.expert_mlp`."""
  experts = jnp.arange(down.shape[0], dtype=jnp.int32)
  chosen = expert_ids[:, :, None] == experts[None, None, :]
  mixed = jnp.sum(jnp.where(chosen, expert_weights[:, :, None], 0.0), axis=1)
  gate, up = jnp.split(_einsum('th,eih->tei', x, gate_up), 2, axis=2)
  inner = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
  # Selected, not multiplied by 0: an expert that no row chose may give inf.
  wanted = jnp.any(chosen, axis=1)[:, :, None]
  inner = jnp.where(wanted, inner * mixed[:, :, None], 0.0).astype(x.dtype)
  y = _einsum('tei,ehi->th', inner, down)
  return y if shared is None else y + dense.swiglu(x, *shared)


def _einsum(spec, x, w):
  """A product in x's dtype, which the gradient's products then have too."""
  return jnp.einsum(
    spec,
    x,
    w,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=x.dtype,
  )
