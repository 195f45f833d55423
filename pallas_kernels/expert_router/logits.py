"""The router's product on a Hopper GPU: float32 weights on tensor cores.

A float32 weight is the sum of three bfloat16 numbers, exactly (8 + 8 + 8 bits),
and the product of two bfloat16 numbers is exact in float32. So rows in bfloat16
lose nothing in three products, which tensor cores do in a fraction of the time
that float32 takes beside them. The sum is cut into parts, one for each block,
that are left to whoever reads them: it adds them up.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ('TILE', 'logits', 'supported')

TILE = 64  # Rows, experts and steps along the sum.
_PARTS = 16  # At most: more are more to add up, fewer are fewer blocks.
_TERMS = 3


def supported(rows: int, hidden: int, experts: int) -> bool:
  """Whether `logits` takes these sizes.

  A single row's product is as fast without tensor cores.
  """
  return rows > 1 and hidden % TILE == 0 and experts % TILE == 0


def parts(hidden: int) -> int:
  """S of `logits`."""
  steps = hidden // TILE
  return max(n for n in range(1, _PARTS + 1) if steps % n == 0)


def logits(x: jax.Array, gate: jax.Array, interpret: Any = None) -> jax.Array:
  """`x @ gate.T`, but for the last sum.

  Args:
    x: `[T, H]` bfloat16, H a multiple of 64.
    gate: `[E, H]` float32, E a multiple of 64.
    interpret: parameters of the interpreter, or None.

  Returns:
    `[S, P, E]` float32, to be added up over S; P is T, rounded up to a multiple
    of 64. Rows from T on are zeros.
  """
  (rows, hidden), experts = x.shape, gate.shape[0]
  number, tiles = parts(hidden), pl.cdiv(rows, TILE)
  steps = hidden // TILE // number
  return plgpu.kernel(
    _kernel,
    out_type=jax.ShapeDtypeStruct((number, tiles * TILE, experts), jnp.float32),
    scratch_types=dict(
      rows=plgpu.SMEM((steps, TILE, 1, TILE), jnp.bfloat16),
      left=plgpu.SMEM((TILE, TILE), jnp.bfloat16),
      right=plgpu.SMEM((_TERMS, TILE, TILE), jnp.bfloat16),
      loaded=plgpu.Barrier(num_barriers=steps),
    ),
    grid=(number, experts // TILE, tiles),
    grid_names=('part', 'experts', 'rows'),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    interpret=interpret,
    kernel_name='expert_router_logits',
  )(x.reshape(rows, -1, TILE), gate)


def _kernel(x, gate, out, *, rows, left, right, loaded):
  """One part of the sum for 64 rows and 64 experts."""
  part, mine, tile = (
    lax.axis_index(name) for name in ('part', 'experts', 'rows')
  )
  here, experts = pl.ds(tile * TILE, TILE), pl.ds(mine * TILE, TILE)
  steps = rows.shape[0]
  # Copies of tiles as tensor cores want them come in eights of rows.
  for k in range(steps):
    plgpu.copy_gmem_to_smem(
      x.at[here, pl.ds(part * steps + k, 1)], rows.at[k], loaded.at[k]
    )

  def scope(acc):
    def one(k, _):
      along = pl.ds((part * steps + k) * TILE, TILE)
      rest = plgpu.load(
        gate.at[experts, along], layout=plgpu.Layout.WGMMA, optimized=False
      )
      for term in range(_TERMS):
        upper = _upper_half(rest)
        right[term] = upper.astype(jnp.bfloat16)
        rest -= upper
      plgpu.barrier_wait(loaded.at[k])
      left[...] = plgpu.load(
        rows.at[k, :, 0], layout=plgpu.Layout.WGMMA, optimized=False
      )
      plgpu.commit_smem()
      for term in reversed(range(_TERMS)):  # Small ones first.
        plgpu.wgmma(acc, left, right.at[term].transpose((1, 0)))
      plgpu.wgmma_wait(0)

    lax.fori_loop(0, steps, one, None)
    return acc[...]

  total = pl.run_scoped(scope, plgpu.ACC((TILE, TILE), jnp.float32))
  out[part, here, experts] = total


def _upper_half(x):
  """The float32 `x` cut off, not rounded, to the bits that bfloat16 has."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return lax.bitcast_convert_type(bits & -0x10000, jnp.float32)
