"""The operands and results of the two products of the Mosaic kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.expert_mlp import tiles
from pallas_kernels.expert_mlp.dispatch import ALIGN

TILE = tiles.TILE


@dataclasses.dataclass(frozen=True)
class Projection:
  """One of the two products, as the loops of `mosaic_gpu` need it.

  Attributes:
    tiles: number of tiles of 128 rows that an expert's weights have.
    steps: number of steps of 64 along the sum.
    rows: right operand.
    routed: gives the weights of an item of a routed expert: half 0 or 1 of its
      tile, at a step.
    shared: the same for an item of a shared expert.
    row: gives an item's first row of the right operand.
    finish: stores a result; takes the item, the consumer's number, its first
      column and its two sums.
  """

  tiles: int
  steps: int
  rows: Any
  routed: Callable[[tiles.Item, int, Any], Any]
  shared: Callable[[tiles.Item, int, Any], Any]
  row: Callable[[tiles.Item], Any]
  finish: Callable[..., None]


def up(config, shape, items, rows, weights, out, buffer):
  """The first product: h = silu(x gate^T) * (x up^T), in bfloat16."""
  del items
  stack, *gate_and_up = weights
  across = shape.inner // TILE

  def routed(item, half, step):
    rows = pl.ds(item.tile * TILE, TILE)
    return stack.at[item.expert * 2 + half, rows, pl.ds(step * TILE, TILE)]

  def shared(item, half, step):
    first = (shape.shared + item.expert) * across + item.tile
    return gate_and_up[half].at[
      pl.ds(first * TILE, TILE), pl.ds(step * TILE, TILE)
    ]

  def finish(item, me, offset, gate, up):
    mine = buffer.at[me]
    value = gate / (1.0 + jnp.exp(-gate)) * up
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mine.at[0].transpose((1, 0))[...] = value.astype(jnp.bfloat16)
    _store(config, mine, item, offset, out, item.tile * TILE)

  return Projection(
    tiles=across,
    steps=shape.hidden // TILE,
    rows=rows,
    routed=routed,
    shared=shared,
    row=lambda item: item.source,
    finish=finish,
  )


def down(config, shape, items, rows, weights, out, buffer):
  """The second product: w * (h down^T), float32 in two halves of 16 bits.

  Registers hold the results transposed, and only 16-bit values can be
  transposed on the way to shared memory.
  """
  stack, *of_shared = weights
  across, steps = shape.hidden // TILE, shape.inner // TILE

  def tile(item, half):
    # If the number of tiles is odd, the last item's upper half does not exist.
    return jnp.minimum(item.tile * 2 + half, across - 1)

  def routed(item, half, step):
    first = item.expert * across + tile(item, half)
    return stack.at[first, :, pl.ds(step * TILE, TILE)]

  def shared(item, half, step):
    step += (shape.shared + item.expert) * steps
    return of_shared[0].at[tile(item, half), :, pl.ds(step * TILE, TILE)]

  def finish(item, me, offset, *values):
    mine = buffer.at[me]
    weight = items.column_weights(item, offset)
    for half, value in enumerate(values):
      column = item.tile * 2 + half

      def store(value=value, column=column):
        bits = lax.bitcast_convert_type(value * weight, jnp.int32)
        parts = ((bits >> 16).astype(jnp.int16), bits.astype(jnp.int16))
        for first in range(0, 2, config.planes):
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          for plane in range(config.planes):
            mine.at[plane].transpose((1, 0))[...] = parts[first + plane]
          planes = out.at[pl.ds(first, config.planes)]
          _store(config, mine, item, offset, planes, column * TILE)

      pl.when(column < across)(store)

  return Projection(
    tiles=pl.cdiv(across, 2),
    steps=steps,
    rows=rows,
    routed=routed,
    shared=shared,
    row=lambda item: item.row,
    finish=finish,
  )


def _store(config, buffer, item, offset, out, column):
  """Copies the rows that are results from `buffer` to `out`.

  Both are `[planes, rows, 64..]`. The next use of the buffer waits for the
  copies.
  """
  plgpu.commit_smem()
  for start in range(0, config.columns, ALIGN):

    @pl.when(offset + start < item.left)
    def _(start=start):
      rows = pl.ds(item.row + offset + start, ALIGN)
      for plane in range(buffer.shape[0]):
        plgpu.copy_smem_to_gmem(
          buffer.at[plane, pl.ds(start, ALIGN)],
          out.at[plane, rows, pl.ds(column, TILE)],
        )
