"""The program of one block of verify attention, in Pallas Mosaic GPU.

A block of three warpgroups owns 64 query rows (head, node) and a share of the
key tiles of 64 latent rows: cached rows first, then new ones. The latent stays
in shared memory once, as key and as value.

  score warpgroup   S = Q K^T, mask, softmax in base 2, P to shared memory
  value warpgroup h O[:, half h] = scale O + P V[:, half h], h = 0, 1

Three roles instead of two keep every accumulator in registers: O alone takes
the registers of two warpgroups (64 x 512 float32 is half of all there are), and
S next to it would spill. S is computed once, and a value warpgroup only
multiplies. The barriers between them:

  full      a part of a key tile has arrived: one half of the value columns,
            the other, or the rope columns
  ready     the weights of a tile are written. They take the place of its rope
            columns, which are not needed after S
  consumed  both value warpgroups are done with a tile

There is room for two key tiles beside the queries, so a tile's successor in
the same slot must be asked for at once: each value warpgroup refills its own
half as soon as its product is done, and the score warpgroup, which comes by
later, only the rope columns. Two tiles are scored in one step, so that the
second product runs while the softmax of the first is computed.

The cache is split over blocks, over fewer if the prefix is short; each writes
its normalised output and, in base 2, the logarithm of its sum, and a small
kernel combines them.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # query rows of a block: the M of a wgmma
KEYS = 64  # latent rows of a key tile
ROPE = 64  # rotated columns of a latent row, after its value
SLOTS = 2  # key tiles in shared memory
PARTS = 3  # copies of a key tile: two halves of its value columns, and rope
# A row's maximum may be this much too low (base 2) before it is raised, so
# that O is seldom rescaled; the weights then reach 2^LAG instead of 1, which
# neither float32 sums nor bfloat16 weights mind.
LAG = 8.0
_LOG2E = math.log2(math.e)
_ROW = plgpu.Layout.WGMMA.reduce(1)

COMPILER_PARAMS = plgpu.CompilerParams(
  approx_math=True,
  # The barriers that are needed are written out; the automatic ones around
  # every access to shared memory cost 4%.
  unsafe_no_auto_barriers=True,
  lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)


@dataclasses.dataclass(frozen=True)
class VerifyConfig:
  """The sizes and switches that the kernel is compiled for."""

  n: int
  stored_rows: int  # rows that a block stores; all of them, at most ROWS
  value_dim: int
  scale: float
  has_bits: bool
  splits: int
  interpret: Any

  @property
  def half(self) -> int:
    return self.value_dim // 2


@dataclasses.dataclass(frozen=True)
class Block:
  """The share of the work that one block has, and its memory.

  Key tiles are numbered through: `num_prefix` is the first that holds new rows.
  The block's i-th of `count` is i + `first_prefix` for i < `count_prefix`, then
  i + `first_new`.
  """

  plan: VerifyConfig
  layer: jax.Array
  batch: jax.Array
  row0: jax.Array
  length: jax.Array
  num_prefix: jax.Array
  first_prefix: jax.Array
  count_prefix: jax.Array
  first_new: jax.Array
  count: jax.Array
  query: Any  # [B, rows, R] in device memory
  query_rope: Any  # [B, rows, ROPE]
  cache: Any  # [L, B, S, C]
  rows: Any  # [B, N, C]
  words: Any  # [B, W, rows] int32 or None
  q: Any  # [2, ROWS, R / 2] in shared memory, like all below
  q_rope: Any  # [1, ROWS, ROPE]
  values: Any  # [SLOTS, 2, KEYS, R / 2]
  rope: Any  # [SLOTS, KEYS, ROPE], then the weights [SLOTS, ROWS, KEYS]
  vectors: Any  # float32 [2 SLOTS, ROWS]: rescaling factors, results
  flags: Any  # int32 [SLOTS]: whether a factor is not 1
  q_full: Any
  full: Any
  ready: Any
  consumed: Any
  done: Any

  def tile(self, i: jax.Array) -> jax.Array:
    """The number of the block's i-th key tile."""
    in_prefix = i < self.count_prefix
    return i + jnp.where(in_prefix, self.first_prefix, self.first_new)


def _load(block: Block, i, columns, target, barrier) -> None:
  """Starts copying columns of the block's i-th key tile, if there is one."""
  tile = block.tile(i)

  @pl.when((i < block.count) & (tile < block.num_prefix))
  def _():
    keys = pl.ds(tile * KEYS, KEYS)
    source = block.cache.at[block.layer, block.batch, keys, columns]
    plgpu.copy_gmem_to_smem(source, target, barrier)

  @pl.when((i < block.count) & (tile >= block.num_prefix))
  def _():
    keys = pl.ds((tile - block.num_prefix) * KEYS, KEYS)
    source = block.rows.at[block.batch, keys, columns]
    plgpu.copy_gmem_to_smem(source, target, barrier)


def _load_half(block: Block, i, slot, h) -> None:
  """Starts copying half h of the value columns of the i-th key tile."""
  half = block.plan.half
  columns, target = pl.ds(h * half, half), block.values.at[slot, h]
  _load(block, i, columns, target, block.full.at[slot, h])


def _load_rope(block: Block, i, slot) -> None:
  """Starts copying the rope columns of the i-th key tile."""
  columns = pl.ds(block.plan.value_dim, ROPE)
  _load(block, i, columns, block.rope.at[slot], block.full.at[slot, 2])


def _load_queries(block: Block) -> None:
  """Starts copying the block's query rows; after the last come zeros."""
  half, rows = block.plan.half, pl.ds(block.row0, ROWS)
  for part in range(2):
    columns = pl.ds(part * half, half)
    source = block.query.at[block.batch, rows, columns]
    plgpu.copy_gmem_to_smem(source, block.q.at[part], block.q_full)
  source = block.query_rope.at[block.batch, rows]
  plgpu.copy_gmem_to_smem(source, block.q_rope.at[0], block.q_full)


def _score(block: Block, acc, slot: int, zero) -> None:
  """Starts acc += q k^T with the key tile in a slot, as its parts arrive.

  Args:
    block: the block.
    acc: accumulator [ROWS, KEYS].
    slot: the slot.
    zero: always 0, but not known to the compiler, which would otherwise
      compute the addresses of all products before the loop and spill them.
  """
  at = slot + zero
  for part in range(2):
    plgpu.barrier_wait(block.full.at[slot, part])
    keys = block.values.at[at, part].transpose((1, 0))
    plgpu.wgmma(acc, block.q.at[part + zero], keys)
  plgpu.barrier_wait(block.full.at[slot, 2])
  keys = block.rope.at[at].transpose((1, 0))
  plgpu.wgmma(acc, block.q_rope.at[zero], keys)


def _iota(axis: int) -> jax.Array:
  return plgpu.broadcasted_iota(
    jnp.int32, (ROWS, KEYS), axis, layout=plgpu.Layout.WGMMA
  )


def _mask(block: Block, s: jax.Array, tile: jax.Array) -> jax.Array:
  """Scores [ROWS, KEYS] of a key tile, -inf where a row must not see."""
  plan = block.plan
  first = (tile - block.num_prefix) * KEYS

  def in_prefix(s):
    return jnp.where(_iota(1) < block.length - tile * KEYS, s, -jnp.inf)

  def causal(s):
    node = lax.rem(_iota(0) + block.row0, plan.n)
    return jnp.where(_iota(1) + first <= node, s, -jnp.inf)

  def by_bits(s):
    word = lax.div(first, 32)
    low, high = (
      lax.broadcast_in_dim(
        plgpu.load(
          block.words.at[block.batch, word + i, pl.ds(block.row0, ROWS)],
          layout=_ROW,
          optimized=False,
        ),
        (ROWS, KEYS),
        (0,),
      )
      for i in range(2)
    )
    column = _iota(1)
    bits = jnp.where(column < 32, low, high)
    seen = lax.shift_right_logical(bits, column & 31) & 1
    return jnp.where(seen != 0, s, -jnp.inf)

  kind = (tile >= lax.div(block.length, KEYS)).astype(jnp.int32)
  kind = kind + (tile >= block.num_prefix).astype(jnp.int32)
  new = by_bits if plan.has_bits else causal
  return lax.switch(kind, (lambda s: s, in_prefix, new), s)


def _clean(block: Block, s: jax.Array, tile: jax.Array, slot) -> None:
  """Zeroes what is not finite in the values of a tile that hides some rows.

  A weight of 0 does not silence a NaN. A query that sees such a row has it in
  its scores and gets NaN from its own weights.

  Args:
    block: the block.
    s: the tile's scores before the mask. What is not finite in a key makes its
      score such for every query, zeros included: scores are soon looked
      through, values are not.
    tile: its number.
    slot: where it is.
  """
  plan = block.plan
  suspect = tile >= lax.div(block.length, KEYS)
  if not plan.has_bits:
    # What comes after the block's first node; rows of two heads have node 0.
    node0 = lax.rem(block.row0, plan.n)
    node0 = jnp.where(node0 + ROWS > plan.n, 0, node0)
    last = (tile - block.num_prefix) * KEYS + (KEYS - 1)
    hidden = jnp.minimum(last, plan.n - 1) > node0
    suspect = suspect & ((tile < block.num_prefix) | hidden)

  def dirty():
    rows = jnp.where(jnp.abs(s) < jnp.inf, 0.0, 1.0).max(axis=1)
    return jnp.max(jnp.where(rows > 0, 1, 0)) > 0

  @pl.when(lax.cond(suspect, dirty, lambda: False))
  def _():
    chunks = block.plan.half // 64

    def clean(i, _):
      # A loop, not unrolled: this was half of the whole kernel's code.
      first = pl.multiple_of(lax.rem(i, chunks) * 64, 64)
      at = (slot, lax.div(i, chunks), slice(None), pl.ds(first, 64))
      v = plgpu.load(block.values.at[at], layout=plgpu.Layout.WGMMA)
      v = v.astype(jnp.float32)
      v = jnp.where(jnp.abs(v) < jnp.inf, v, 0.0)
      block.values[at] = v.astype(jnp.bfloat16)

    lax.fori_loop(0, 2 * chunks, clean, None)


def _softmax(block: Block, s, i, slot: int | jax.Array, zero, m, total):
  """Turns the i-th tile's scores into weights for the value warpgroups.

  Args:
    block: the block.
    s: products q k^T, float32 [ROWS, KEYS].
    i: index of the tile in the block.
    slot: its slot.
    zero: as for `_score`.
    m: the rows' maximum so far, base 2 and up to LAG too low, [ROWS].
    total: the rows' sum of weights so far, relative to 2^m, [ROWS].

  Returns:
    m and total, this tile included.
  """
  tile = block.tile(i)
  _clean(block, s, tile, slot + zero)
  scale = block.plan.scale * _LOG2E
  if scale <= 0:  # only then does the order of scores change, or inf * 0 arise
    s, scale = s * scale, 1.0
  s = _mask(block, s, tile)
  highest = s.max(axis=1) * scale
  raise_m = highest > m + LAG
  new_m = jnp.where(raise_m, highest, m)
  # Exactly 1 for a row whose own maximum stays, whatever its neighbours do.
  factor = jnp.where(raise_m, jnp.exp2(m - new_m), 1.0)
  base = jnp.where(new_m == -jnp.inf, 0.0, new_m)
  w = jnp.exp2(s * scale - lax.broadcast_in_dim(base, s.shape, (0,)))
  block.vectors[slot] = factor
  # This reduction synchronises the four warps. The store of the weights relies
  # on it: until then some warp's product may still read the rope columns.
  block.flags[slot] = jnp.max(jnp.where(raise_m, 1, 0))
  block.rope[slot + zero] = w.astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.barrier_arrive(block.ready.at[slot])
  return new_m, total * factor + w.sum(axis=1)


def _score_warpgroup(block: Block, lse) -> None:
  """Scores and softmax of all tiles; `lse` takes the rows' logarithms."""
  count = block.count
  _load_queries(block)
  for i in range(SLOTS):
    _load_half(block, i, i, 0)
    _load_half(block, i, i, 1)
    _load_rope(block, i, i)
  plgpu.barrier_wait(block.q_full)

  def start(acc, i, slot, zero):
    @pl.when(i >= SLOTS)
    def _():
      plgpu.barrier_wait(block.consumed.at[slot])
      _load_rope(block, i, slot)

    _score(block, acc, slot, zero)

  def pair(j, carry):
    i, zero = 2 * j, lax.shift_right_logical(j, 30)

    def compute(acc0, acc1):
      start(acc0, i, 0, zero)
      start(acc1, i + 1, 1, zero)
      # The second tile's PARTS products stay in flight.
      s = plgpu.wgmma_accumulator_load(acc0, wait_n=PARTS)
      between = _softmax(block, s, i, 0, zero, *carry)
      return _softmax(block, acc1[...], i + 1, 1, zero, *between)

    return pl.run_scoped(compute, accumulator, accumulator)

  def single(i, carry):
    slot, zero = lax.rem(i, SLOTS), lax.shift_right_logical(i, 30)

    def compute(acc):
      start(acc, i, slot, zero)
      return _softmax(block, acc[...], i, slot, zero, *carry)

    return pl.run_scoped(compute, accumulator)

  accumulator = plgpu.ACC((ROWS, KEYS), jnp.float32)
  carry = tuple(
    plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), _ROW)
    for x in (-jnp.inf, 0.0)
  )
  pairs = lax.div(count, 2)
  carry = lax.fori_loop(0, pairs, pair, carry)
  m, total = lax.fori_loop(2 * pairs, count, single, carry)
  block.vectors[SLOTS] = jnp.where(total > 0, 1 / total, 0.0)
  if lse is not None:
    block.vectors[SLOTS + 1] = m + jnp.log2(total)
  plgpu.commit_smem()
  plgpu.barrier_arrive(block.done)
  if lse is not None:
    stored = block.vectors.at[SLOTS + 1, pl.ds(0, block.plan.stored_rows)]
    plgpu.copy_smem_to_gmem(stored, lse)
  # Every phase of a barrier must be waited for.
  for slot in range(SLOTS):
    wait = functools.partial(plgpu.barrier_wait, block.consumed.at[slot])
    pl.when(count > slot)(wait)
  plgpu.wait_smem_to_gmem(0)


def _multiply(acc: jax.Array, a, b, interpret) -> Any:
  """Returns acc + a b, computed on tensor cores."""

  def compute(ref):
    plgpu.wgmma(ref, a, b)

  if not interpret:
    return pl.run_state(compute)(plgpu.ACC.init(acc))

  # The interpreter has no accumulator that starts with a value.
  def fresh(ref):
    compute(ref)
    return ref[...]

  return acc + pl.run_scoped(fresh, plgpu.ACC((ROWS, acc.shape[1]), acc.dtype))


def _value_warpgroup(block: Block, out, h: int | jax.Array) -> None:
  """Half h of the output columns: O = P V, rescaled when a maximum rises."""
  plan = block.plan

  def rescale(acc, slot):
    factor = plgpu.load(block.vectors.at[slot], layout=_ROW)
    return acc * lax.broadcast_in_dim(factor, acc.shape, (0,))

  def step(i, acc):
    slot = lax.rem(i, SLOTS)
    plgpu.barrier_wait(block.ready.at[slot])
    acc = lax.cond(
      block.flags[slot] > 0, lambda x: rescale(x, slot), lambda x: x, acc
    )
    values = block.values.at[slot, h]
    acc = _multiply(acc, block.rope.at[slot], values, plan.interpret)
    plgpu.barrier_arrive(block.consumed.at[slot])
    # All four warps have read the slot before one of them has it overwritten.
    plgpu.commit_smem()
    _load_half(block, i + SLOTS, slot, h)
    return acc

  acc = plgpu.layout_cast(
    jnp.zeros((ROWS, plan.half), jnp.float32), plgpu.Layout.WGMMA
  )
  acc = lax.fori_loop(0, block.count, step, acc)
  plgpu.barrier_wait(block.done)
  inverse = plgpu.load(block.vectors.at[SLOTS], layout=_ROW)
  acc = acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))
  block.values[0, h] = acc.astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(
    block.values.at[0, h, pl.ds(0, plan.stored_rows)],
    out.at[:, pl.ds(h * plan.half, plan.half)],
  )
  plgpu.wait_smem_to_gmem(0)


def _starts(num_prefix, num_new, split, splits):
  """The first tile of a split among those of the prefix and of the new rows.

  New tiles take longer, so they are spread evenly among the others: the j-th is
  at floor(j total / new). Splits are equal parts of that order, up to one tile.
  """
  total = num_prefix + num_new
  start = lax.div(total * split, splits)
  new = lax.div(start * num_new + total - 1, total)
  return start - new, new


def body(
  plan: VerifyConfig, layer, lengths, used, query, query_rope, cache, rows,
  *refs,
) -> None:  # fmt: skip
  """One block. `refs` are words, if any, outputs, and the shared memory."""
  words, *refs = refs if plan.has_bits else (None, *refs)
  out, *refs = refs
  lse, *refs = refs if plan.splits > 1 else (None, *refs)
  batch, split = lax.axis_index('batch'), lax.axis_index('split')
  row0 = lax.axis_index('tile') * ROWS
  length = lengths[batch]
  num_prefix = lax.div(length + (KEYS - 1), KEYS)
  num_new = pl.cdiv(plan.n, KEYS)
  if not plan.has_bits:
    node0 = lax.rem(row0, plan.n)
    # A tile with rows of two heads may need all nodes.
    last_node = jnp.minimum(node0 + (ROWS - 1), plan.n - 1)
    num_new = lax.div(last_node, KEYS) + 1
  splits = used[batch]
  prefix, new = _starts(num_prefix, num_new, split, splits)
  prefix_end, new_end = _starts(num_prefix, num_new, split + 1, splits)
  count_prefix = prefix_end - prefix
  block = Block(
    plan, layer[0], batch, row0, length, num_prefix, prefix, count_prefix,
    num_prefix + new - count_prefix, count_prefix + new_end - new,
    query, query_rope, cache, rows, words, *refs,
  )  # fmt: skip
  at = (batch, pl.ds(row0, plan.stored_rows))
  if plan.splits > 1:
    at = (split, *at)
  warpgroup = lax.axis_index('warpgroup')

  @pl.when((split < splits) & (warpgroup == 0))
  def _():
    _score_warpgroup(block, None if lse is None else lse.at[at])

  @pl.when((split < splits) & (warpgroup > 0))
  def _():
    _value_warpgroup(block, out.at[at], warpgroup - 1)


def scratch(value_dim: int) -> tuple[Any, ...]:
  """A block's shared memory, in the order of the fields of Block."""
  transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

  def tiled(*shape):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

  half = value_dim // 2
  return (
    tiled(2, ROWS, half),
    tiled(1, ROWS, ROPE),
    tiled(SLOTS, 2, KEYS, half),
    tiled(SLOTS, KEYS, ROPE),
    plgpu.SMEM((2 * SLOTS, ROWS), jnp.float32),
    plgpu.SMEM((SLOTS,), jnp.int32),
    plgpu.Barrier(num_arrivals=PARTS),  # q_full
    plgpu.Barrier(num_barriers=(SLOTS, PARTS)),  # full
    plgpu.Barrier(num_barriers=SLOTS),  # ready
    plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),  # consumed
    plgpu.Barrier(),  # done
  )
