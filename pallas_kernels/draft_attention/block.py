"""The program of one block of draft attention, in Pallas Mosaic GPU.

A block owns 64 query rows, some query heads of one key head times the slots, in
shared memory. Each of its two warpgroups owns a split of the keys, tiles of 64
rows: context first, then the drafted block. It multiplies Q K^T, computes the
softmax in base 2 and multiplies P V, one after the other. Memory is the limit,
so only the loads are pipelined. The warpgroups share nothing but the queries,
and one computes while the other waits.

A warpgroup writes its normalised output and, in base 2, the logarithm of its
sum; `_combine.py` combines them.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # query rows of a block: the M of a wgmma
KEYS = 64  # rows of a key tile
DIM = 128  # columns of a head
WARPGROUPS = 2
SLOTS = 3  # key tiles of a warpgroup in shared memory
_LOG2E = math.log2(math.e)
_ROW = plgpu.Layout.WGMMA.reduce(1)

COMPILER_PARAMS = plgpu.CompilerParams(
  approx_math=True,
  # The barriers that are needed are written out.
  unsafe_no_auto_barriers=True,
  # Rows are reduced within a warp; the default does not fit beside the tiles.
  reduction_scratch_bytes=512,
  lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)


@dataclasses.dataclass(frozen=True)
class DraftConfig:
  """The sizes and switches that the kernel is compiled for."""

  slots: int  # W
  heads: int  # K
  group: int  # G
  scale: float
  causal: bool
  window: int | None
  window_from_root: bool
  splits: int  # blocks that share the keys of a row
  interpret: Any

  @property
  def slot_rows(self) -> int:
    """Rows of a query head in a tile; after the last slot come zeros."""
    return -(-self.slots // 8) * 8

  @property
  def tile_heads(self) -> int:
    """Query heads of a tile, all of one key head."""
    return ROWS // self.slot_rows

  @property
  def head_tiles(self) -> int:
    """Number of tiles that a key head has."""
    return -(-self.group // self.tile_heads)

  @property
  def num_rows(self) -> int:
    """Number of rows in all tiles of a sequence."""
    return self.heads * self.head_tiles * ROWS

  def row_of(self, slot: Any, head: Any) -> Any:
    """The row of the tiles that has a slot of one of the K G query heads."""
    in_group = lax.rem(head, self.group)
    tile = lax.div(head, self.group) * self.head_tiles
    tile = tile + lax.div(in_group, self.tile_heads)
    in_tile = lax.rem(in_group, self.tile_heads)
    return tile * ROWS + in_tile * self.slot_rows + slot


@dataclasses.dataclass(frozen=True)
class Block:
  """A warpgroup's work, `count` key tiles from `start`, and its memory."""

  plan: DraftConfig
  layer: jax.Array
  batch: jax.Array
  tile: jax.Array
  warpgroup: jax.Array
  length: jax.Array
  num_prefix: jax.Array
  start: jax.Array
  count: jax.Array
  query: Any  # [B, W, K G d] in device memory
  context: Any  # [L, B, S, 2 K d]
  rows: Any  # [B, W, 2 K d]
  q: Any  # [ROWS, DIM] in shared memory, like all below
  keys: Any  # [WARPGROUPS, SLOTS, KEYS, DIM]
  values: Any  # [WARPGROUPS, SLOTS, KEYS, DIM]
  weights: Any  # [WARPGROUPS, ROWS, KEYS]
  logs: Any  # float32 [WARPGROUPS, ROWS]
  q_full: Any
  keys_full: Any  # [WARPGROUPS, SLOTS], like the next
  values_full: Any


def _load_queries(block: Block) -> None:
  """Starts copying the block's query rows, one head after the other.

  Rows after the last head of a group repeat it; their results are not used.
  """
  plan = block.plan
  head0 = lax.div(block.tile, plan.head_tiles) * plan.group
  first = lax.rem(block.tile, plan.head_tiles) * plan.tile_heads
  for i in range(plan.tile_heads):
    head = head0 + jnp.minimum(first + i, plan.group - 1)
    columns = pl.ds(head * DIM, DIM)
    source = block.query.at[block.batch, pl.ds(0, plan.slot_rows), columns]
    target = block.q.at[pl.ds(i * plan.slot_rows, plan.slot_rows)]
    plgpu.copy_gmem_to_smem(source, target, block.q_full)


def _load(block: Block, i) -> None:
  """Starts copying the warpgroup's i-th key tile, if there is one."""
  plan, tile = block.plan, block.start + i
  slot = (block.warpgroup, lax.rem(i, SLOTS))
  keys = lax.div(block.tile, plan.head_tiles) * DIM
  values = keys + plan.heads * DIM

  def copy(source):
    for column, target, barrier in (
      (keys, block.keys, block.keys_full),
      (values, block.values, block.values_full),
    ):
      plgpu.copy_gmem_to_smem(
        source(pl.ds(column, DIM)), target.at[slot], barrier.at[slot]
      )

  @pl.when((i < block.count) & (tile < block.num_prefix))
  def _():
    rows = pl.ds(tile * KEYS, KEYS)
    copy(lambda at: block.context.at[block.layer, block.batch, rows, at])

  @pl.when((i < block.count) & (tile >= block.num_prefix))
  def _():
    copy(lambda at: block.rows.at[block.batch, pl.ds(0, KEYS), at])


def _iota(axis: int) -> jax.Array:
  return plgpu.broadcasted_iota(
    jnp.int32, (ROWS, KEYS), axis, layout=plgpu.Layout.WGMMA
  )


def _mask(block: Block, s: jax.Array, tile: jax.Array) -> jax.Array:
  """Scores [ROWS, KEYS] of a key tile, -inf where a slot must not see."""
  plan = block.plan
  window = plan.window

  def in_window(s, key, root):
    if window is None:
      return s
    first = root - window + 1
    if not plan.window_from_root:
      first = first + lax.rem(_iota(0), plan.slot_rows)
    return jnp.where(key >= first, s, -jnp.inf)

  def in_context(s):
    key = _iota(1) + tile * KEYS
    s = jnp.where(key < block.length, s, -jnp.inf)
    return in_window(s, key, block.length)

  def in_block(s):
    key = _iota(1)
    s = jnp.where(key < plan.slots, s, -jnp.inf)
    if plan.causal:
      slot = lax.rem(_iota(0), plan.slot_rows)
      s = jnp.where(key <= slot, s, -jnp.inf)
    return in_window(s, key, 0)

  return lax.switch(_kind(block, tile), (lambda s: s, in_context, in_block), s)


def _kind(block: Block, tile: jax.Array) -> jax.Array:
  """0 for a tile that every slot sees, 1 for others of the context, 2 else."""
  plan = block.plan
  partly = tile >= lax.div(block.length, KEYS)
  if plan.window is not None:
    last = block.length - plan.window
    if not plan.window_from_root:
      last = last + plan.slots - 1
    partly = partly | (tile * KEYS <= last)
  return jnp.where(tile >= block.num_prefix, 2, partly.astype(jnp.int32))


def _clean(block: Block, s: jax.Array, tile: jax.Array, slot):
  """Moves what is not finite in a tile's values to its scores.

  A weight of 0 does not silence a NaN: where some slot does not see all rows,
  such values become 0, and the scores of their rows NaN before the mask, so
  that whoever sees one has a weight of NaN.

  Args:
    block: the block.
    s: the tile's scores before the mask, [ROWS, KEYS].
    tile: its number.
    slot: where it is. Its values are awaited if they are cleaned.

  Returns:
    The scores, and whether the values have been awaited.
  """
  plan = block.plan
  suspect = _kind(block, tile) > 0
  if not plan.causal and plan.window is None:
    # All slots see the whole block; what is loaded behind it is zeros.
    suspect = suspect & (tile < block.num_prefix)

  def clean(s):
    # Without a look first whether there is anything to clean: a maximum over
    # a whole tile takes shared memory that all warpgroups have in common.
    plgpu.barrier_wait(block.values_full.at[slot])
    bad = plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), _ROW)
    for first in range(0, DIM, KEYS):
      at = (*slot, slice(None), pl.ds(first, KEYS))
      v = plgpu.load(block.values.at[at], layout=plgpu.Layout.WGMMA)
      v = v.astype(jnp.float32)
      finite = jnp.abs(v) < jnp.inf
      bad = jnp.maximum(bad, jnp.where(finite, 0.0, 1.0).max(axis=1))
      block.values[at] = jnp.where(finite, v, 0.0).astype(jnp.bfloat16)
    # From rows of values to columns of scores, by way of shared memory.
    block.logs[block.warpgroup] = bad
    plgpu.commit_smem()
    bad = plgpu.load(
      block.logs.at[block.warpgroup],
      layout=plgpu.Layout.WGMMA.reduce(0),
      optimized=False,
    )
    bad = lax.broadcast_in_dim(bad, s.shape, (1,))
    return jnp.where(bad > 0, jnp.nan, s)

  return lax.cond(suspect, clean, lambda s: s, s), suspect


def _score(block: Block, slot) -> jax.Array:
  """Q K^T with the keys in a slot, float32 [ROWS, KEYS], awaited."""

  def compute(acc):
    plgpu.wgmma(acc, block.q, block.keys.at[slot].transpose((1, 0)))
    return acc[...]

  return pl.run_scoped(compute, plgpu.ACC((ROWS, KEYS), jnp.float32))


def _multiply(block: Block, acc: jax.Array, slot) -> Any:
  """Returns acc + P V with the values in a slot."""

  def compute(ref):
    plgpu.wgmma(ref, block.weights.at[block.warpgroup], block.values.at[slot])

  if not block.plan.interpret:
    return pl.run_state(compute)(plgpu.ACC.init(acc))

  # The interpreter has no accumulator that starts with a value.
  def fresh(ref):
    compute(ref)
    return ref[...]

  return acc + pl.run_scoped(fresh, plgpu.ACC((ROWS, acc.shape[1]), acc.dtype))


def _step(block: Block, i, carry):
  """Adds the warpgroup's i-th key tile to the running softmax.

  Args:
    block: the block.
    i: which of its tiles.
    carry: output [ROWS, DIM] and sum of weights [ROWS], both relative to 2^m,
      and the maximum m of the scores so far, base 2, [ROWS]; all float32.
  """
  acc, total, m = carry
  tile, slot = block.start + i, (block.warpgroup, lax.rem(i, SLOTS))
  plgpu.barrier_wait(block.keys_full.at[slot])
  s = _score(block, slot) * (block.plan.scale * _LOG2E)
  s, awaited = _clean(block, s, tile, slot)
  s = _mask(block, s, tile)
  new_m = jnp.maximum(m, s.max(axis=1))
  # A slot may have seen nothing so far, and -inf - (-inf) would be NaN.
  base = jnp.where(new_m == -jnp.inf, 0.0, new_m)
  factor = jnp.exp2(m - base)
  w = jnp.exp2(s - lax.broadcast_in_dim(base, s.shape, (0,)))
  total = total * factor + w.sum(axis=1)
  block.weights[block.warpgroup] = w.astype(jnp.bfloat16)

  @pl.when(jnp.logical_not(awaited))
  def _():
    plgpu.barrier_wait(block.values_full.at[slot])

  plgpu.commit_smem()
  acc = acc * lax.broadcast_in_dim(factor, acc.shape, (0,))
  acc = _multiply(block, acc, slot)
  # The products of all four warps have read the slot and the weights before
  # one warp has them overwritten.
  plgpu.commit_smem()
  _load(block, i + SLOTS)
  return acc, total, new_m


def body(
  plan: DraftConfig, layer, lengths, query, context, rows, out, logs, *scratch
) -> None:
  """Computes one warpgroup's part of `out` and `logs`.

  It is `out[split, b, rows of the tile]`, and the logarithms of its sums.
  """
  batch, tile, warpgroup = (
    lax.axis_index(name) for name in ('batch', 'tile', 'warpgroup')
  )
  split = lax.axis_index('split') * WARPGROUPS + warpgroup
  length = lengths[batch]
  num_prefix = lax.div(length + (KEYS - 1), KEYS)
  first = jnp.int32(0)
  if plan.window is not None:
    first = lax.div(jnp.maximum(length - plan.window + 1, 0), KEYS)
  # Splits of equal size, whatever the length. The drafted block is one tile.
  num_tiles, num_splits = num_prefix - first + 1, plan.splits * WARPGROUPS
  start = lax.div(num_tiles * split, num_splits)
  count = lax.div(num_tiles * (split + 1), num_splits) - start
  block = Block(
    plan, layer[0], batch, tile, warpgroup, length, num_prefix, first + start,
    count, query, context, rows, *scratch,
  )  # fmt: skip

  @pl.when(warpgroup == 0)
  def _():
    _load_queries(block)

  lax.fori_loop(0, SLOTS, lambda i, _: _load(block, i), None)
  plgpu.barrier_wait(block.q_full)
  carry = (
    plgpu.layout_cast(jnp.zeros((ROWS, DIM), jnp.float32), plgpu.Layout.WGMMA),
    plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW),
    plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW),
  )
  carry = lax.fori_loop(0, count, lambda i, x: _step(block, i, x), carry)
  acc, total, m = carry
  inverse = jnp.where(total > 0, 1 / total, 0.0)
  acc = acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))
  # No copy into the first slot is under way any more.
  block.values[warpgroup, 0] = acc.astype(jnp.bfloat16)
  block.logs[warpgroup] = m + jnp.log2(total)
  plgpu.commit_smem()
  at = (split, batch, pl.ds(tile * ROWS, ROWS))
  plgpu.copy_smem_to_gmem(block.values.at[warpgroup, 0], out.at[at])
  plgpu.copy_smem_to_gmem(block.logs.at[warpgroup], logs.at[at])
  plgpu.wait_smem_to_gmem(0)


def scratch(plan: DraftConfig) -> tuple[Any, ...]:
  """The shared memory of a block, in the order of the fields of Block."""
  transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

  def tiled(*shape):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

  return (
    tiled(ROWS, DIM),
    tiled(WARPGROUPS, SLOTS, KEYS, DIM),
    tiled(WARPGROUPS, SLOTS, KEYS, DIM),
    tiled(WARPGROUPS, ROWS, KEYS),
    plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
    plgpu.Barrier(num_arrivals=plan.tile_heads),  # q_full
    plgpu.Barrier(num_barriers=(WARPGROUPS, SLOTS)),  # keys_full
    plgpu.Barrier(num_barriers=(WARPGROUPS, SLOTS)),  # values_full
  )
