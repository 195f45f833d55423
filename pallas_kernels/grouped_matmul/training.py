"""The experts in two products: all of them on all rows.

For few small experts that is less than sorting rows costs, and the gradient is
two products too. The mixing weights go in before the second one, which then
sums over experts as well.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dense


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
  # Selected, not multiplied by 0: an expert that nobody chose may be inf.
  wanted = jnp.any(chosen, axis=1)[:, :, None]
  inner = jnp.where(wanted, inner * mixed[:, :, None], 0.0).astype(x.dtype)
  y = _einsum('tei,ehi->th', inner, down)
  return y if shared is None else y + dense.swiglu(x, *shared)


def _einsum(spec, x, w):
  """In x's dtype, so that the gradient's products are of that dtype too."""
  return jnp.einsum(
    spec,
    x,
    w,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=x.dtype,
  )
