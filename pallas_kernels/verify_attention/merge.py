"""Merges the splits of an attention, in Pallas Mosaic GPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.verify_attention import block

MERGERS = 4  # warpgroups that share the splits of a row


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
  mergers = min(MERGERS, num_splits)

  def body(*refs):
    _merge_body(num_splits, source, *refs)

  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((batch, num_rows, dim), part.dtype),
    scratch_types=(
      plgpu.SMEM((mergers, dim), jnp.float32),
      plgpu.SMEM((2, mergers), jnp.float32),
      plgpu.Barrier(num_arrivals=mergers),
    ),
    grid=(batch, num_rows),
    grid_names=('batch', 'row'),
    num_threads=mergers,
    thread_name='warpgroup',
    interpret=interpret,
    compiler_params=block.COMPILER_PARAMS,
    kernel_name=kernel_name,
  )(part, lse)


def _merge_body(
  num_splits: int, source, part, lse, out, sums, stats, filled
) -> None:
  """Merges the splits of one row, a share of them in each warpgroup.

  With the split's logarithm of the sum e_k (base 2) and its output o_k:
  out = sum_k 2^e_k o_k / sum_k 2^e_k, all relative to the largest e_k.
  """
  mergers, dim = sums.shape
  batch, row = lax.axis_index('batch'), lax.axis_index('row')
  at, warpgroup = source(row), lax.axis_index('warpgroup')
  layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=dim // 128)
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
    value = plgpu.load(part.at[split, batch, at], layout=layout)
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
      acc = acc + plgpu.load(sums.at[g], layout=layout) * weight
    # A row that sees nothing has a total of 0.
    acc = acc / jnp.where(total == 0, 1.0, total)
    out[batch, row] = acc.astype(out.dtype)
