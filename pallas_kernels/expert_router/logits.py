"""The router's product on a Hopper GPU: float32 weights on tensor cores.

A float32 weight is the sum of three bfloat16 numbers, exactly (8 + 8 + 8 bits),
and the product of two bfloat16 numbers is exact in float32. So rows in bfloat16
lose nothing in three products, which tensor cores do in a fraction of the time
that float32 takes beside them. The sum is cut into parts, one for each block;
the kernel that reads them adds them up.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _float_order
from pallas_kernels._hopper import WARPGROUP

__all__ = ('TILE', 'logits', 'parts', 'why_not')

TILE = 64  # Rows, experts and steps along the sum.
_PARTS = 16  # More parts are more to add up; fewer leave blocks idle.
_TERMS = 3  # bfloat16 terms of a float32 weight


def why_not(rows: int, hidden: int, experts: int) -> str | None:
  """Why `logits` should not compute these sizes; None if it should."""
  if rows <= 1:
    return "a single row's product is as fast without tensor cores"
  if hidden % TILE or experts % TILE:
    return f'gate: [{experts}, {hidden}]; multiples of {TILE}'
  return None


def parts(hidden: int) -> int:
  """S of `logits`, the number of parts of the sum."""
  steps = hidden // TILE
  return max(n for n in range(1, _PARTS + 1) if steps % n == 0)


def logits(x: jax.Array, gate: jax.Array, interpret: Any = None) -> jax.Array:
  """`x @ gate.T`, in parts that are still to be added up.

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
    compiler_params=WARPGROUP,
    interpret=interpret,
    kernel_name='expert_router_logits',
  )(x.reshape(rows, -1, TILE), gate)


def _kernel(x, gate, out, *, rows, left, right, loaded):
  """Computes one part of the sum for 64 rows and 64 experts."""
  part, mine, tile = (
    lax.axis_index(name) for name in ('part', 'experts', 'rows')
  )
  here, experts = pl.ds(tile * TILE, TILE), pl.ds(mine * TILE, TILE)
  steps = rows.shape[0]
  # The layout that tensor cores want is copied in groups of eight rows.
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
  return _float_order.float_of(_float_order.bits_of(x) & -0x10000)
