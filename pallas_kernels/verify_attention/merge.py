"""Merges the splits of an attention, in Pallas Mosaic GPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.verify_attention import block

WARPGROUPS = 4
# Up to so many splits a warpgroup has rows of its own; of more than that, all
# warpgroups share the splits of a row.
FEW_SPLITS = 8
# Rows of a warpgroup at once: as long as it waits it loads no others.
ROWS_AT_ONCE = 4
MULTIPROCESSORS = 132


def merge(
  part: jax.Array,
  lse: jax.Array,
  num_rows: int,
  interpret: Any,
  *,
  source: Callable[[jax.Array], jax.Array] = lambda row: row,
  kernel_name: str = 'verify_attention_merge',
) -> jax.Array:
  """Merges normalised outputs over K splits.

  With a split's logarithm of the sum e_k (base 2) and its output o_k:
  out = sum_k 2^e_k o_k / sum_k 2^e_k, all relative to the largest e_k.

  Args:
    part: `[K, B, X, R]`, what each split has of a row.
    lse: `[K, B, X]` float32, the logarithms of their sums, base 2.
    num_rows: of the result.
    interpret: as everywhere.
    source: which of the X rows of the splits a row of the result is.
    kernel_name: for profiles.

  Returns:
    `[B, num_rows, R]` in the dtype of `part`.
  """
  num_splits, batch, _, dim = part.shape
  own = num_splits <= FEW_SPLITS
  warpgroups = WARPGROUPS if own else min(WARPGROUPS, num_splits)
  rows = 1
  if own:
    busy = MULTIPROCESSORS * WARPGROUPS
    at_once = max(1, min(ROWS_AT_ONCE, batch * num_rows // busy))
    rows = WARPGROUPS * at_once

  def body(part, lse, out, **scratch):
    if own:
      _merge_rows(source, at_once, part, lse, out)
    else:
      _merge_row(source, part, lse, out, **scratch)

  scratch = dict(
    sums=plgpu.SMEM((warpgroups, dim), jnp.float32),
    stats=plgpu.SMEM((2, warpgroups), jnp.float32),
    filled=plgpu.Barrier(num_arrivals=warpgroups),
  )
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((batch, num_rows, dim), part.dtype),
    scratch_types={} if own else scratch,
    grid=(batch, pl.cdiv(num_rows, rows)),
    grid_names=('batch', 'row'),
    num_threads=warpgroups,
    thread_name='warpgroup',
    interpret=interpret,
    compiler_params=block.COMPILER_PARAMS,
    kernel_name=kernel_name,
  )(part, lse)


def _layout(dim: int) -> plgpu.Layout:
  return plgpu.Layout.WG_STRIDED((dim,), vec_size=dim // 128)


def _merge_rows(source, at_once: int, part, lse, out) -> None:
  """Merges all splits of each of a warpgroup's rows."""
  num_splits, _, _, dim = part.shape
  num_rows = out.shape[1]
  batch = lax.axis_index('batch')
  first = lax.axis_index('row') * WARPGROUPS + lax.axis_index('warpgroup')
  rows = [first * at_once + i for i in range(at_once)]
  places = [source(jnp.minimum(row, num_rows - 1)) for row in rows]
  # All loads come before what waits for one.
  values = [
    [plgpu.load(part.at[k, batch, at], layout=_layout(dim)) for at in places]
    for k in range(num_splits)
  ]
  scores = [[lse[k, batch, at] for at in places] for k in range(num_splits)]
  for i, row in enumerate(rows):
    highest = functools.reduce(jnp.maximum, [score[i] for score in scores])
    base = jnp.where(highest == -jnp.inf, 0.0, highest)
    total, acc = jnp.float32(0), jnp.zeros((dim,), jnp.float32)
    for value, score in zip(values, scores, strict=True):
      weight = jnp.exp2(score[i] - base)
      total, acc = total + weight, acc + value[i].astype(jnp.float32) * weight
    _store(out, batch, row, acc, total)


def _store(out, batch, row, acc, total) -> None:
  """Stores a row, if there is such, normalised."""

  @pl.when(row < out.shape[1])
  def _():
    # A row that sees nothing has a total of 0.
    value = acc / jnp.where(total == 0, 1.0, total)
    out[batch, row] = value.astype(out.dtype)


def _merge_row(source, part, lse, out, *, sums, stats, filled) -> None:
  """Merges the splits of one row, a share of them in each warpgroup."""
  num_splits, (mergers, dim) = part.shape[0], sums.shape
  batch, row = lax.axis_index('batch'), lax.axis_index('row')
  at, warpgroup = source(row), lax.axis_index('warpgroup')
  splits, scores = [], []
  for first in range(0, num_splits, mergers):
    split = first + warpgroup
    score = lse[jnp.minimum(split, num_splits - 1), batch, at]
    splits.append(jnp.minimum(split, num_splits - 1))
    scores.append(jnp.where(split < num_splits, score, -jnp.inf))
  highest = scores[0]
  for score in scores[1:]:
    highest = jnp.maximum(highest, score)
  base = jnp.where(highest == -jnp.inf, 0.0, highest)
  total, acc = jnp.float32(0), jnp.zeros((dim,), jnp.float32)
  for split, score in zip(splits, scores, strict=True):
    weight = jnp.exp2(score - base)
    value = plgpu.load(part.at[split, batch, at], layout=_layout(dim))
    total, acc = total + weight, acc + value.astype(jnp.float32) * weight
  sums[warpgroup] = acc
  stats[0, warpgroup], stats[1, warpgroup] = highest, total
  plgpu.commit_smem()
  plgpu.barrier_arrive(filled)
  plgpu.barrier_wait(filled)

  @pl.when(warpgroup == 0)
  def _():
    highest = stats[0, 0]
    for g in range(1, mergers):
      highest = jnp.maximum(highest, stats[0, g])
    base = jnp.where(highest == -jnp.inf, 0.0, highest)
    total, acc = jnp.float32(0), jnp.zeros((dim,), jnp.float32)
    for g in range(mergers):
      weight = jnp.exp2(stats[0, g] - base)
      total = total + weight * stats[1, g]
      acc = acc + plgpu.load(sums.at[g], layout=_layout(dim)) * weight
    _store(out, batch, row, acc, total)
