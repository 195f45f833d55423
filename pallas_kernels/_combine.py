"""Combines the splits of an attention, in Pallas Mosaic GPU.

Blocks that share the keys of a row each leave an output normalised by itself,
and the logarithm of the sum that normalised it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _hopper

WARPGROUPS = 4
# Up to so many splits a warpgroup has rows of its own; if there are more, all
# warpgroups share the splits of a row.
FEW_SPLITS = 8
# Rows that a warpgroup loads at once, before it waits for the first.
ROWS_AT_ONCE = 4
# The same for the splits of a row that warpgroups share.
SPLITS_AT_ONCE = 8
COMPILER_PARAMS = plgpu.CompilerParams(
  approx_math=True,
  # The barriers that are needed are written out.
  unsafe_no_auto_barriers=True,
  lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)


def combine(
  part: jax.Array,
  lse: jax.Array,
  num_rows: int,
  interpret: Any,
  *,
  used: jax.Array | None = None,
  source: Callable[[jax.Array], jax.Array] = lambda row: row,
  kernel_name: str,
) -> jax.Array:
  """Combines normalised outputs over K splits.

  out = sum_k 2^e_k o_k / sum_k 2^e_k, where o_k is the output of split k and
  e_k the logarithm of its sum, base 2; all relative to the largest e_k.

  Args:
    part: `[K, B, X, R]`, the outputs of the splits.
    lse: `[K, B, X]` float32, the logarithms of their sums, base 2.
    num_rows: number of rows of the result.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU, or None.
    used: `[B]` int32, the splits of a sequence that count, at least 1; the
      others may hold anything. None: all do.
    source: maps a row of the result to one of the X rows of the splits.
    kernel_name: name of the kernel in profiles.

  Returns:
    `[B, num_rows, R]` in the dtype of `part`.
  """
  num_splits, batch, _, dim = part.shape
  own = num_splits <= FEW_SPLITS
  rows = columns = 1
  if own:
    busy = _hopper.MULTIPROCESSORS * WARPGROUPS
    at_once = max(1, min(ROWS_AT_ONCE, batch * num_rows // busy))
    rows = WARPGROUPS * at_once
  else:
    # Columns of a row are split over blocks while some have nothing to do.
    whole = dim // 128
    most = _hopper.MULTIPROCESSORS
    columns = max(
      c
      for c in range(1, whole + 1)
      if whole % c == 0 and (c == 1 or batch * num_rows * c <= most)
    )
  operands = [part, lse] + ([] if used is None else [used])

  def body(part, lse, *refs, **scratch):
    *given, out = refs
    count = given[0][lax.axis_index('batch')] if given else num_splits
    if own:
      _combine_rows(source, at_once, count, part, lse, out)
    else:
      _combine_row(source, dim // columns, count, part, lse, out, **scratch)

  scratch = dict(
    sums=plgpu.SMEM((WARPGROUPS, dim // columns), jnp.float32),
    stats=plgpu.SMEM((2, WARPGROUPS), jnp.float32),
    filled=plgpu.Barrier(num_arrivals=WARPGROUPS),
  )
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((batch, num_rows, dim), part.dtype),
    scratch_types={} if own else scratch,
    grid=(batch, pl.cdiv(num_rows, rows), columns),
    grid_names=('batch', 'row', 'columns'),
    num_threads=WARPGROUPS,
    thread_name='warpgroup',
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=kernel_name,
  )(*operands)


def _layout(dim: int) -> Any:
  return plgpu.Layout.WG_STRIDED((dim,), vec_size=dim // 128)


def _combine_rows(source, at_once: int, count, part, lse, out) -> None:
  """Combines all splits of each of a warpgroup's rows."""
  num_splits, _, _, dim = part.shape
  num_rows = out.shape[1]
  batch = lax.axis_index('batch')
  first = lax.axis_index('row') * WARPGROUPS + lax.axis_index('warpgroup')
  rows = [first * at_once + i for i in range(at_once)]
  places = [source(jnp.minimum(row, num_rows - 1)) for row in rows]
  # A split that does not count is the first one again, with a weight of 0.
  splits = [jnp.where(k < count, k, 0) for k in range(num_splits)]
  # All loads come before what waits for one.
  values = [
    [plgpu.load(part.at[k, batch, at], layout=_layout(dim)) for at in places]
    for k in splits
  ]
  scores = [
    [jnp.where(i < count, lse[k, batch, at], -jnp.inf) for at in places]
    for i, k in enumerate(splits)
  ]
  for i, row in enumerate(rows):
    highest = functools.reduce(jnp.maximum, [score[i] for score in scores])
    base = jnp.where(highest == -jnp.inf, 0.0, highest)
    total, acc = jnp.float32(0), jnp.zeros((dim,), jnp.float32)
    for value, score in zip(values, scores, strict=True):
      weight = jnp.exp2(score[i] - base)
      total, acc = total + weight, acc + value[i].astype(jnp.float32) * weight

    @pl.when(row < num_rows)
    def _(row=row, acc=acc, total=total):
      out[batch, row] = _normalised(acc, total, out.dtype)


def _normalised(acc, total, dtype):
  """The row `acc / total`; zeros if it sees nothing and its total is 0."""
  return (acc / jnp.where(total == 0, 1.0, total)).astype(dtype)


def _combine_row(source, dim, count, part, lse, out, *, sums, stats, filled):
  """Combines `dim` columns of a row whose splits the warpgroups share."""
  num_splits = part.shape[0]
  batch, row = lax.axis_index('batch'), lax.axis_index('row')
  columns = pl.ds(pl.multiple_of(lax.axis_index('columns') * dim, dim), dim)
  at, warpgroup = source(row), lax.axis_index('warpgroup')

  def score_of(split):
    score = lse[jnp.where(split < count, split, 0), batch, at]
    return jnp.where(split < count, score, -jnp.inf)

  highest = score_of(warpgroup)
  for first in range(WARPGROUPS, num_splits, WARPGROUPS):
    highest = jnp.maximum(highest, score_of(first + warpgroup))
  base = jnp.where(highest == -jnp.inf, 0.0, highest)

  def step(i, carry):
    total, acc = carry
    first = i * SPLITS_AT_ONCE * WARPGROUPS + warpgroup
    splits = [first + k * WARPGROUPS for k in range(SPLITS_AT_ONCE)]
    scores = [score_of(split) for split in splits]
    values = [
      plgpu.load(
        part.at[jnp.where(split < count, split, 0), batch, at, columns],
        layout=_layout(dim),
      )
      for split in splits
    ]
    for value, score in zip(values, scores, strict=True):
      weight = jnp.exp2(score - base)
      total, acc = total + weight, acc + value.astype(jnp.float32) * weight
    return total, acc

  steps = lax.div(
    jnp.int32(count + SPLITS_AT_ONCE * WARPGROUPS - 1),
    jnp.int32(SPLITS_AT_ONCE * WARPGROUPS),
  )
  zeros = plgpu.layout_cast(jnp.zeros((dim,), jnp.float32), _layout(dim))
  total, acc = lax.fori_loop(0, steps, step, (jnp.float32(0), zeros))
  sums[warpgroup] = acc
  stats[0, warpgroup], stats[1, warpgroup] = highest, total
  plgpu.commit_smem()
  plgpu.barrier_arrive(filled)
  plgpu.barrier_wait(filled)

  @pl.when(warpgroup == 0)
  def _():
    highest = stats[0, 0]
    for g in range(1, WARPGROUPS):
      highest = jnp.maximum(highest, stats[0, g])
    base = jnp.where(highest == -jnp.inf, 0.0, highest)
    total, acc = jnp.float32(0), jnp.zeros((dim,), jnp.float32)
    for g in range(WARPGROUPS):
      weight = jnp.exp2(stats[0, g] - base)
      total = total + weight * stats[1, g]
      acc = acc + plgpu.load(sums.at[g], layout=_layout(dim)) * weight
    out[batch, row, columns] = _normalised(acc, total, out.dtype)
