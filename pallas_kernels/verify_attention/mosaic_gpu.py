"""Verify attention for Hopper GPUs, in Pallas Mosaic GPU.

Queries flatten to rows (head, node) in tiles of 64, and their keys are split
over blocks: `block.py` computes one split, `_combine.py` combines them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _combine
from pallas_kernels._hopper import MULTIPROCESSORS
from pallas_kernels._padding import COPY_ROWS, pad_rows, round_up
from pallas_kernels.verify_attention import block


def why_not(
  query: jax.Array,
  cache: jax.Array,
  *others: jax.Array,
  value_dim: int,
  **static: Any,
) -> str | None:
  """Why the kernel cannot take these arguments; None if it can.

  The other arguments of the op fit the query and the cache.
  """
  del others, static
  batch, n, heads, width = query.shape
  capacity = cache.shape[2]
  if query.dtype != jnp.bfloat16:
    return f'it takes bfloat16 only, not {query.dtype}'
  if width - value_dim != block.ROPE:
    return f'it takes {block.ROPE} rope columns only, not {width - value_dim}'
  if value_dim % 128 or not 0 < value_dim <= 512:
    return f'it takes a value_dim of 128, 256, 384 or 512, not {value_dim}'
  if capacity % 8 or not capacity:
    return f'it takes a cache of a multiple of 8 rows only, not {capacity}'
  if not 0 < batch < 2**16 or not n or not heads:
    return f'it takes 1..65535 sequences, not {batch}, and no empty query'
  return None


def _num_splits(batch: int, row_tiles: int, key_tiles: int, dim: int) -> int:
  """The number of splits with the least time, in units of a key tile's.

  A wave of blocks takes the tiles of a split and 3 more to start and to end.
  Combining costs a launch and moves the splits' outputs, 5 MB a unit.
  """
  blocks = batch * row_tiles

  def time(splits):
    waves = pl.cdiv(blocks * splits, MULTIPROCESSORS)
    moved = 4 * splits * blocks * block.ROWS * dim
    combine = 0 if splits == 1 else 1 + moved / 5e6
    return waves * (pl.cdiv(key_tiles, splits) + 3) + combine

  return min(range(1, min(key_tiles, MULTIPROCESSORS) + 1), key=time)


def _row_words(ancestors: jax.Array, heads: int, num_rows: int) -> jax.Array:
  """Ancestor bits of every query row, `[B, even W, num_rows]` int32.

  They are the same for all layers of a model, and XLA computes them once.
  """
  words = lax.bitcast_convert_type(ancestors, jnp.int32).transpose(0, 2, 1)
  words = jnp.tile(words, heads)
  extra = ((0, 0), (0, words.shape[1] % 2), (0, num_rows - words.shape[2]))
  return jnp.pad(words, extra)


def verify_attention(
  query: jax.Array,
  cache: jax.Array,
  rows: jax.Array,
  lengths: jax.Array,
  *,
  layer: int,
  value_dim: int,
  scale: float,
  ancestors: jax.Array | None,
  splits: int | None = None,
  interpret: Any = None,
) -> jax.Array:
  """See `pallas_kernels.verify_attention.api.verify_attention`.

  Args:
    query: `[B, N, H, C]` bfloat16.
    cache: `[L, B, S, C]` bfloat16.
    rows: `[B, N, C]` bfloat16.
    lengths: `[B]` int32.
    layer: static.
    value_dim: R, static.
    scale: static.
    ancestors: `[B, N, ceil(N / 32)]` uint32, or None for a chain.
    splits: blocks that share the keys of a row, None for the best number.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU.

  Returns:
    `[B, N, H, R]` bfloat16.

  Raises:
    ValueError: the kernel does not take these shapes or dtypes.
  """
  reason = why_not(query, cache, value_dim=value_dim)
  if reason is not None:
    raise ValueError(f"implementation: verify_attention's mosaic_gpu: {reason}")
  batch, n, heads, _ = query.shape
  num_rows = n * heads
  row_tiles = pl.cdiv(num_rows, block.ROWS)
  padded = row_tiles * block.ROWS
  if splits is None:
    key_tiles = pl.cdiv(cache.shape[2], block.KEYS) + pl.cdiv(n, block.KEYS)
    splits = _num_splits(batch, row_tiles, key_tiles, value_dim)
  plan = block.VerifyConfig(
    n=n,
    stored_rows=min(block.ROWS, round_up(num_rows, COPY_ROWS)),
    value_dim=value_dim,
    scale=scale,
    has_bits=ancestors is not None,
    splits=splits,
    interpret=interpret,
  )
  words = None if ancestors is None else _row_words(ancestors, heads, padded)
  # Heads come first, as in the products before and after. XLA passes on the two
  # parts as they were before the query was concatenated from them.
  by_head = (
    part.swapaxes(1, 2).reshape(batch, num_rows, -1)
    for part in jnp.split(query, [value_dim], axis=-1)
  )
  layers = jnp.full((1,), layer, jnp.int32)
  # If the prefix is short, some splits have no tile and are not even written.
  tiles = -(-lengths // block.KEYS) + pl.cdiv(n, block.KEYS)
  used = jnp.minimum(tiles, splits)
  out = _run(plan, layers, lengths, used, *by_head, cache, rows, words)
  return out.reshape(batch, heads, n, value_dim).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnums=0)
def _run(
  plan: block.VerifyConfig,
  layer,
  lengths,
  used,
  query,
  query_rope,
  cache,
  rows,
  words,
) -> jax.Array:
  """Runs the two kernels; returns `[B, H N, R]`.

  The layer is an operand and this a jitted function, so that all layers of a
  model share one compilation, which takes a second or two.
  """
  batch, num_rows, _ = query.shape
  row_tiles = pl.cdiv(num_rows, block.ROWS)
  queries = pad_rows(query), pad_rows(query_rope)
  operands = [layer, lengths, used, *queries, cache, pad_rows(rows)]
  if words is not None:
    operands.append(words)
  shape = (batch, (row_tiles - 1) * block.ROWS + plan.stored_rows)
  if plan.splits > 1:
    shape = (plan.splits, *shape)
  out_type = [jax.ShapeDtypeStruct((*shape, plan.value_dim), query.dtype)]
  if plan.splits > 1:
    out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))

  def body(*refs):
    block.body(plan, *refs)

  outputs = plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=block.scratch(plan.value_dim),
    # The last axis runs fastest: blocks in flight share their keys.
    grid=(batch, plan.splits, row_tiles),
    grid_names=('batch', 'split', 'tile'),
    num_threads=3,
    thread_name='warpgroup',
    interpret=plan.interpret,
    compiler_params=block.COMPILER_PARAMS,
    kernel_name='verify_attention',
  )(*operands)
  if plan.splits > 1:
    return _combine.combine(
      outputs[0],
      outputs[1],
      num_rows,
      plan.interpret,
      used=used,
      kernel_name='verify_attention_combine',
    )
  return outputs[0][:, :num_rows]
