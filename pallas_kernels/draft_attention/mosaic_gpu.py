"""Draft attention for Hopper GPUs, in Pallas Mosaic GPU.

The query heads of a key head times the slots are rows in tiles of 64, and their
keys are split over blocks and again over the warpgroups of a block: `block.py`
computes one split, `_combine.py` combines them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _combine
from pallas_kernels._hopper import MULTIPROCESSORS
from pallas_kernels._padding import pad_rows
from pallas_kernels.draft_attention import block


def why_not(
  query: jax.Array, context: jax.Array, *others: jax.Array, **static: Any
) -> str | None:
  """Why the kernel cannot take these arguments; None if it can.

  The other arguments of the op fit the query and the context.
  """
  del others, static
  batch, slots, _, _, dim = query.shape
  capacity = context.shape[2]
  if query.dtype != jnp.bfloat16:
    return f'it takes bfloat16 only, not {query.dtype}'
  if dim != block.DIM:
    return f'it takes heads of {block.DIM} only, not {dim}'
  if slots > block.ROWS:
    return f'it takes blocks of up to {block.ROWS} slots, not {slots}'
  if capacity % 8 or not capacity:
    return f'it takes a context of a multiple of 8 rows only, not {capacity}'
  if not 0 < batch < 2**16:
    return f'it takes 1..65535 sequences, not {batch}'
  return None


def _num_splits(row_tiles: int, key_tiles: int) -> int:
  """The number of splits with the least time, in units of a key tile's.

  A wave of blocks takes the tiles of a warpgroup and 3 more to start and to
  end; the outputs of the splits are written and read, 5 MB a unit.
  """

  def time(splits):
    waves = pl.cdiv(row_tiles * splits, MULTIPROCESSORS)
    parts = splits * block.WARPGROUPS
    moved = 4 * parts * row_tiles * block.ROWS * block.DIM
    return waves * (pl.cdiv(key_tiles, parts) + 3) + moved / 5e6

  return min(range(1, min(key_tiles, MULTIPROCESSORS) + 1), key=time)


def draft_attention(
  query: jax.Array,
  context: jax.Array,
  rows: jax.Array,
  lengths: jax.Array,
  *,
  layer: int,
  scale: float,
  causal: bool,
  window: int | None,
  window_from_root: bool,
  splits: int | None = None,
  interpret: Any = None,
) -> jax.Array:
  """See `pallas_kernels.draft_attention.api.draft_attention`.

  Args:
    query: `[B, W, K, G, 128]` bfloat16.
    context: `[L, B, S, 2 K 128]` bfloat16.
    rows: `[B, W, 2 K 128]` bfloat16.
    lengths: `[B]` int32.
    layer: static.
    scale: static.
    causal: static.
    window: static.
    window_from_root: static.
    splits: blocks that share the keys of a row, None for the best number.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU.

  Returns:
    `[B, W, K, G, 128]` bfloat16.

  Raises:
    ValueError: the kernel does not take these shapes or dtypes.
  """
  reason = why_not(query, context)
  if reason is not None:
    raise ValueError(f"implementation: draft_attention's mosaic_gpu: {reason}")
  batch, slots, heads, group, _ = query.shape
  plan = block.DraftConfig(
    slots=slots,
    heads=heads,
    group=group,
    scale=scale,
    causal=causal,
    window=window,
    window_from_root=window_from_root,
    splits=0,
    interpret=interpret,
  )
  if splits is None:
    seen = context.shape[2]
    if window is not None:
      seen = min(seen, window + block.KEYS)
    splits = _num_splits(
      batch * heads * plan.head_tiles, pl.cdiv(seen, block.KEYS) + 1
    )
  plan = dataclasses.replace(plan, splits=splits)
  layers = jnp.full((1,), layer, jnp.int32)
  flat = query.reshape(batch, slots, -1)
  return _run(plan, layers, lengths, flat, context, rows).reshape(query.shape)


@functools.partial(jax.jit, static_argnums=0)
def _run(
  plan: block.DraftConfig, layer, lengths, query, context, rows
) -> jax.Array:
  """Runs the two kernels; returns `[B, W K G, 128]`.

  The layer is an operand and this a jitted function, so that all layers of a
  model share one compilation, which takes a second or two.
  """
  batch = query.shape[0]
  shape = (plan.splits * block.WARPGROUPS, batch, plan.num_rows)

  def body(*refs):
    block.body(plan, *refs)

  part, lse = plgpu.kernel(
    body,
    out_type=(
      jax.ShapeDtypeStruct((*shape, block.DIM), query.dtype),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ),
    scratch_types=block.scratch(plan),
    # The last axis runs fastest: blocks in flight read the same rows.
    grid=(batch, plan.splits, plan.heads * plan.head_tiles),
    grid_names=('batch', 'split', 'tile'),
    num_threads=block.WARPGROUPS,
    thread_name='warpgroup',
    interpret=plan.interpret,
    compiler_params=block.COMPILER_PARAMS,
    kernel_name='draft_attention',
  )(layer, lengths, pad_rows(query), context, pad_rows(rows))
  heads = plan.heads * plan.group

  def source(row):
    return plan.row_of(lax.div(row, heads), lax.rem(row, heads))

  return _combine.combine(
    part,
    lse,
    plan.slots * heads,
    plan.interpret,
    source=source,
    kernel_name='draft_attention_combine',
  )
