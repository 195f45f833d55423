"""Verify attention for Hopper GPUs, in Pallas Mosaic GPU."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
KEYS = 64
ROPE = 64
HALVES = 5  # slots for half key tiles
SLOTS = 3  # slots for rope columns and weights
NUM_SMS = 132
MERGERS = 4
LAG = 8.0
_FLAG = SLOTS
_LOG2E = math.log2(math.e)
_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Tuning:
  splits: int | None = None
  skip_rescale: bool = True
  partial_dtype: str = "bfloat16"
  registers: tuple[int, int] | None = (184, 160)
  auto_barriers: bool = False
  merge_kernel: bool = True


@dataclasses.dataclass(frozen=True)
class _Plan:
  n: int
  heads: int
  value_dim: int
  layer: int
  scale: float
  bits: bool
  splits: int
  tuning: Tuning
  interpret: Any


@dataclasses.dataclass(frozen=True)
class _Block:
  """What one block works on, and its buffers."""

  plan: _Plan
  batch: jax.Array
  row0: jax.Array
  length: jax.Array
  num_prefix: jax.Array
  start: jax.Array
  count: jax.Array
  query: Any
  cache: Any
  rows: Any
  words: Any
  q_right: Any
  q_rope: Any
  kv: Any
  rope: Any
  small: Any
  q_full: Any
  full: Any
  rope_full: Any
  ready: Any
  consumed: Any
  done: Any
  q_left: Any

  @property
  def half(self):
    return self.plan.value_dim // 2


def _half(i, h):
  """Slot of half h of the i-th key tile."""
  return lax.rem(2 * i + h, HALVES)


def _load(block: _Block, i, part: int) -> None:
  """Starts copying a part of the i-th key tile, if there is one.

  Parts 0 and 1 are the halves of the value columns, 2 are the rope columns.
  """
  tile = block.start + i
  columns = pl.ds(part * block.half, ROPE if part == 2 else block.half)
  if part == 2:
    slot = lax.rem(i, SLOTS)
    target, barrier = block.rope.at[slot], block.rope_full.at[slot]
  else:
    slot = _half(i, part)
    target, barrier = block.kv.at[slot], block.full.at[slot]

  @pl.when((i < block.count) & (tile < block.num_prefix))
  def _():
    first = pl.ds(tile * KEYS, KEYS)
    source = block.cache.at[block.plan.layer, block.batch, first, columns]
    plgpu.copy_gmem_to_smem(source, target, barrier)

  @pl.when((i < block.count) & (tile >= block.num_prefix))
  def _():
    first = pl.ds((tile - block.num_prefix) * KEYS, KEYS)
    source = block.rows.at[block.batch, first, columns]
    plgpu.copy_gmem_to_smem(source, target, barrier)


def _scores(block: _Block, acc, q, i, part: int) -> None:
  """Starts acc += q k^T for a part of the columns of the i-th key tile."""
  if part == 2:
    slot = lax.rem(i, SLOTS)
    keys, barrier = block.rope.at[slot], block.rope_full.at[slot]
  else:
    slot = _half(i, part)
    keys, barrier = block.kv.at[slot], block.full.at[slot]

  @pl.when(i < block.count)
  def _():
    plgpu.barrier_wait(barrier)

  # Behind the last tile this multiplies what the slot happens to hold.
  plgpu.wgmma(acc, q[part], keys.transpose((1, 0)))


def _iota(axis):
  return plgpu.broadcasted_iota(
    jnp.int32, (ROWS, KEYS), axis, layout=plgpu.Layout.WGMMA
  )


def _mask(block: _Block, s, tile):
  plan = block.plan

  def prefix(s):
    return jnp.where(_iota(1) < block.length - tile * KEYS, s, -jnp.inf)

  def new(s):
    j = tile - block.num_prefix
    if not plan.bits:
      node = lax.div(_iota(0) + block.row0, plan.heads)
      return jnp.where(_iota(1) + j * KEYS <= node, s, -jnp.inf)
    low, high = (
      lax.broadcast_in_dim(
        plgpu.load(
          block.words.at[block.batch, 2 * j + k, pl.ds(block.row0, ROWS)],
          layout=_ROW_LAYOUT,
          optimized=False,
        ),
        (ROWS, KEYS),
        (0,),
      )
      for k in range(2)
    )
    column = _iota(1)
    word = jnp.where(column < 32, low, high)
    seen = lax.shift_right_logical(word, column & 31) & 1
    return jnp.where(seen != 0, s, -jnp.inf)

  kind = (tile >= lax.div(block.length, KEYS)).astype(jnp.int32)
  kind = kind + (tile >= block.num_prefix).astype(jnp.int32)
  return lax.switch(kind, (lambda s: s, prefix, new), s)


def _clean(block: _Block, i) -> None:
  tile = block.start + i
  dirty = tile >= lax.div(block.length, KEYS)
  if not block.plan.bits:
    dirty = dirty & (tile < block.num_prefix)

  @pl.when(dirty)
  def _():
    for h in range(2):
      for k in range(block.half // 64):
        slot = _half(i, h)
        ref = block.kv.at[slot, :, pl.ds(k * 64, 64)]
        v = plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        v = jnp.where(jnp.abs(v) < jnp.inf, v, 0.0)
        block.kv[slot, :, pl.ds(k * 64, 64)] = v.astype(jnp.bfloat16)


def _softmax(block: _Block, s, i, m, l):
  """Turns scores into weights for the value warpgroups."""
  plan = block.plan
  c = plan.scale * _LOG2E
  tile = block.start + i
  slot = lax.rem(i, SLOTS)
  if c <= 0:
    s, c = s * c, 1.0
  s = _mask(block, s, tile)
  _clean(block, i)
  highest = s.max(axis=1) * c
  need = highest > m + LAG
  new_m = jnp.where(need, highest, m)
  a = jnp.where(need, jnp.exp2(m - new_m), 1.0)
  base = jnp.where(new_m == -jnp.inf, 0.0, new_m)
  w = jnp.exp2(s * c - lax.broadcast_in_dim(base, s.shape, (0,)))
  block.small[slot] = a
  if plan.tuning.skip_rescale:
    block.small[_FLAG, slot] = jnp.max(jnp.where(need, 1.0, 0.0))
  block.rope[slot] = w.astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.barrier_arrive(block.ready.at[slot])
  return new_m, l * a + w.sum(axis=1)


def _score_warpgroup(block: _Block, lse) -> None:
  plan, half, count = block.plan, block.half, block.count
  rows = pl.ds(block.row0, ROWS)
  # The left queries pass through a slot on their way to registers.
  left = block.kv.at[HALVES - 1] if block.q_left is None else block.q_left
  q = (left, block.q_right.at[0], block.q_rope.at[0])
  for part in range(3):
    plgpu.copy_gmem_to_smem(
      block.query.at[
        block.batch, rows, pl.ds(part * half, ROPE if part == 2 else half)
      ],
      q[part],
      block.q_full,
    )
  for i, part in ((0, 0), (0, 2), (0, 1), (1, 0), (1, 2)):
    _load(block, i, part)
  plgpu.barrier_wait(block.q_full)
  if block.q_left is None:
    left = plgpu.load(left, layout=plgpu.Layout.WGMMA)
    plgpu.commit_smem()

  def queries(i):
    # Always 0, unknown to the compiler: it would compute all addresses of the
    # products before the loop, and spill them.
    zero = lax.shift_right_logical(i, 30)
    return left, block.q_right.at[zero], block.q_rope.at[zero]

  def first(acc):
    for part in (0, 2, 1):
      _scores(block, acc, queries(count), 0, part)
    return acc[...]

  def step(i, carry):
    s, *stats = carry

    @pl.when(i > 0)
    def _():
      plgpu.barrier_wait(block.consumed.at[lax.rem(i + (SLOTS - 1), SLOTS)])

    _load(block, i + 1, 1)
    _load(block, i + 2, 0)
    _load(block, i + 2, 2)

    def compute(acc):
      q = queries(i)
      _scores(block, acc, q, i + 1, 0)
      _scores(block, acc, q, i + 1, 2)
      new_stats = _softmax(block, s, i, *stats)
      _scores(block, acc, q, i + 1, 1)
      return acc[...], *new_stats

    return pl.run_scoped(compute, acc)

  acc = plgpu.ACC((ROWS, KEYS), jnp.float32)
  m, l = (
    plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), _ROW_LAYOUT)
    for x in (-jnp.inf, 0.0)
  )
  s = pl.run_scoped(first, acc)
  _, m, l = lax.fori_loop(0, count, step, (s, m, l))
  # Only the last tile's slot is still in use.
  inverse = lax.rem(count, SLOTS)
  spare = lax.rem(count + 1, SLOTS)
  block.small[inverse] = jnp.where(l > 0, 1 / l, 0.0)
  if lse is not None:
    block.small[spare] = m + jnp.log2(l)
  plgpu.commit_smem()
  plgpu.barrier_arrive(block.done)
  if lse is not None:
    plgpu.copy_smem_to_gmem(block.small.at[spare], lse)

  @pl.when(count > 0)
  def _():
    plgpu.barrier_wait(block.consumed.at[lax.rem(count - 1, SLOTS)])

  plgpu.wait_smem_to_gmem(0)


def _multiply(acc, a, b, interpret):
  """acc + a b on tensor cores."""
  if interpret:

    def fresh(ref):
      plgpu.wgmma(ref, a, b)
      return ref[...]

    return acc + pl.run_scoped(fresh, plgpu.ACC(acc.shape, jnp.float32))

  def compute(ref):
    plgpu.wgmma(ref, a, b)

  return pl.run_state(compute)(plgpu.ACC.init(acc))


def _value_warpgroup(block: _Block, out, h) -> None:
  plan, half = block.plan, block.half

  def rescale(acc, slot):
    a = plgpu.load(block.small.at[slot], layout=_ROW_LAYOUT)
    return acc * lax.broadcast_in_dim(a, acc.shape, (0,))

  def step(i, acc):
    slot = lax.rem(i, SLOTS)
    plgpu.barrier_wait(block.ready.at[slot])
    if plan.tuning.skip_rescale:
      acc = lax.cond(
        block.small[_FLAG, slot] > 0, lambda x: rescale(x, slot), lambda x: x, acc
      )
    else:
      acc = rescale(acc, slot)
    acc = _multiply(
      acc, block.rope.at[slot], block.kv.at[_half(i, h)], plan.interpret
    )
    plgpu.barrier_arrive(block.consumed.at[slot])
    return acc

  acc = plgpu.layout_cast(
    jnp.zeros((ROWS, half), jnp.float32), plgpu.Layout.WGMMA
  )
  acc = lax.fori_loop(0, block.count, step, acc)
  plgpu.barrier_wait(block.done)
  inverse = plgpu.load(block.small.at[lax.rem(block.count, SLOTS)], layout=_ROW_LAYOUT)
  acc = acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))
  plgpu.commit_smem()
  # Of all slots only that of its own last half is surely free.
  slot = _half(jnp.maximum(block.count - 1, 0), h)
  block.kv[slot] = acc.astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(
    block.kv.at[slot], out.at[:, pl.ds(h * half, half)]
  )
  plgpu.wait_smem_to_gmem(0)


def _body(plan: _Plan, lengths, query, cache, rows, *refs):
  words = lse = None
  if plan.bits:
    words, *refs = refs
  out, *refs = refs
  if plan.splits > 1:
    lse, *refs = refs
  batch = lax.axis_index("batch")
  split = lax.axis_index("split")
  row0 = lax.axis_index("tile") * ROWS
  wg = lax.axis_index("wg")
  length = lengths[batch]
  num_prefix = lax.div(length + (KEYS - 1), KEYS)
  num_new = pl.cdiv(plan.n, KEYS)
  if not plan.bits:
    last = lax.div(row0 + (ROWS - 1), plan.heads)
    num_new = jnp.minimum(lax.div(last, KEYS) + 1, num_new)
  total = num_prefix + num_new
  start = lax.div(total * split, plan.splits)
  count = lax.div(total * (split + 1), plan.splits) - start
  block = _Block(
    plan, batch, row0, length, num_prefix, start, count,
    query, cache, rows, words, *refs, *(() if plan.interpret else (None,)),
  )
  where = pl.ds(row0, ROWS)

  @pl.when(wg == 0)
  def _():
    if plan.tuning.registers:
      plgpu.set_max_registers(plan.tuning.registers[0], action="increase")
    _score_warpgroup(
      block, None if lse is None else lse.at[split, batch, where]
    )

  @pl.when(wg > 0)
  def _():
    if plan.tuning.registers:
      plgpu.set_max_registers(plan.tuning.registers[1], action="decrease")
    if lse is None:
      target = out.at[batch, where]
    else:
      target = out.at[split, batch, where]
    _value_warpgroup(block, target, wg - 1)


def _scratch(plan):
  transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

  def smem(*shape):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

  half = plan.value_dim // 2
  scratch = (
    smem(1, ROWS, half),  # q_right
    smem(1, ROWS, ROPE),  # q_rope
    smem(HALVES, KEYS, half),  # kv
    smem(SLOTS, KEYS, ROPE),  # rope, then the weights
    plgpu.SMEM((SLOTS + 1, ROWS), jnp.float32),  # small
    plgpu.Barrier(num_arrivals=3),  # q_full
    plgpu.Barrier(num_barriers=HALVES),  # full
    plgpu.Barrier(num_barriers=SLOTS),  # rope_full
    plgpu.Barrier(num_barriers=SLOTS),  # ready
    plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),  # consumed
    plgpu.Barrier(),  # done
  )
  return (*scratch, smem(ROWS, half)) if plan.interpret else scratch


def _merge_body(part, lse, out, sums, stats, filled):
  num_splits, dim = part.shape[0], part.shape[3]
  batch, row = lax.axis_index("batch"), lax.axis_index("row")
  wg = lax.axis_index("wg")
  layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=dim // 128)
  splits = [wg + MERGERS * i for i in range(_ceil(num_splits, MERGERS))]
  there = [
    None if MERGERS * (i + 1) <= num_splits else k < num_splits
    for i, k in enumerate(splits)
  ]
  splits = [
    k if ok is None else jnp.minimum(k, num_splits - 1)
    for k, ok in zip(splits, there, strict=True)
  ]
  scores = [lse[k, batch, row] for k in splits]
  scores = [
    x if ok is None else jnp.where(ok, x, -jnp.inf)
    for x, ok in zip(scores, there, strict=True)
  ]
  highest = scores[0]
  for x in scores[1:]:
    highest = jnp.maximum(highest, x)
  base = jnp.where(highest == -jnp.inf, 0.0, highest)
  total, acc = jnp.float32(0), None
  for k, x in zip(splits, scores, strict=True):
    weight = jnp.exp2(x - base)
    total = total + weight
    value = plgpu.load(part.at[k, batch, row], layout=layout, optimized=False)
    value = value.astype(jnp.float32) * weight
    acc = value if acc is None else acc + value
  sums[wg] = acc
  stats[0, wg] = highest
  stats[1, wg] = total
  plgpu.commit_smem()
  plgpu.barrier_arrive(filled)
  plgpu.barrier_wait(filled)

  @pl.when(wg == 0)
  def _():
    base = stats[0, 0]
    for g in range(1, MERGERS):
      base = jnp.maximum(base, stats[0, g])
    base = jnp.where(base == -jnp.inf, 0.0, base)
    total, acc = jnp.float32(0), None
    for g in range(MERGERS):
      weight = jnp.exp2(stats[0, g] - base)
      total = total + weight * stats[1, g]
      value = plgpu.load(sums.at[g], layout=layout) * weight
      acc = value if acc is None else acc + value
    acc = acc / jnp.where(total > 0, total, 1.0)
    out[batch, row] = acc.astype(out.dtype)


def _merge_kernel(part, lse, rows, interpret):
  _, b, _, dim = part.shape
  return plgpu.kernel(
    _merge_body,
    out_type=jax.ShapeDtypeStruct((b, rows, dim), part.dtype),
    scratch_types=(
      plgpu.SMEM((MERGERS, dim), jnp.float32),
      plgpu.SMEM((2, MERGERS), jnp.float32),
      plgpu.Barrier(num_arrivals=MERGERS),
    ),
    grid=(b, rows),
    grid_names=("batch", "row"),
    num_threads=MERGERS,
    thread_name="wg",
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      unsafe_no_auto_barriers=True,
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    ),
    kernel_name="verify_attention_merge",
  )(part, lse)


def _merge(part, lse, dtype):
  highest = lse.max(axis=0)
  highest = jnp.where(highest == -jnp.inf, 0.0, highest)
  weight = jnp.exp2(lse - highest[None])
  total = weight.sum(axis=0)
  weight = weight / jnp.where(total == 0, 1.0, total)[None]
  out = (part.astype(jnp.float32) * weight[..., None]).sum(axis=0)
  return out.astype(dtype)


def _pad8(x):
  n = x.shape[1]
  extra = -n % 8 if n > 8 else 0
  return jnp.pad(x, ((0, 0), (0, extra), (0, 0))) if extra else x


def _ceil(a: int, b: int) -> int:
  return -(-a // b)


def verify_attention(
  query,
  cache,
  rows,
  lengths,
  *,
  layer,
  value_dim,
  scale,
  ancestors,
  interpret=None,
  tuning: Tuning = Tuning(),
):
  b, n, h, c = query.shape
  num_rows = n * h
  tiles = _ceil(num_rows, ROWS)
  splits = tuning.splits or 2
  padded = tiles * ROWS
  plan = _Plan(
    n=n, heads=h, value_dim=value_dim, layer=layer, scale=scale,
    bits=ancestors is not None, splits=splits, tuning=tuning,
    interpret=interpret,
  )
  operands = [
    lengths, _pad8(query.reshape(b, num_rows, c)), cache, _pad8(rows)
  ]
  if ancestors is not None:
    words = lax.bitcast_convert_type(ancestors, jnp.int32)
    words = jnp.repeat(words.transpose(0, 2, 1), h, axis=2)
    words = jnp.pad(
      words,
      ((0, 0), (0, words.shape[1] % 2), (0, padded - num_rows)),
    )
    operands.append(words)
  if splits == 1:
    out_type = jax.ShapeDtypeStruct((b, padded, value_dim), jnp.bfloat16)
  else:
    out_type = (
      jax.ShapeDtypeStruct((splits, b, padded, value_dim), jnp.bfloat16),
      jax.ShapeDtypeStruct((splits, b, padded), jnp.float32),
    )

  def body(*refs):
    _body(plan, *refs)

  result = plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=_scratch(plan),
    grid=(b, splits, tiles),
    grid_names=("batch", "split", "tile"),
    num_threads=3,
    thread_name="wg",
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      reduction_scratch_bytes=128,
      unsafe_no_auto_barriers=not tuning.auto_barriers,
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    ),
    kernel_name="verify_attention",
  )(*operands)
  if splits > 1:
    if tuning.merge_kernel:
      result = _merge_kernel(*result, num_rows, interpret)
    else:
      result = _merge(*result, query.dtype)
  return result[:, :num_rows].reshape(b, n, h, value_dim)
