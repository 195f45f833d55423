"""Dispatch of rows to experts on a Hopper GPU, in one launch.

XLA needs about a dozen small ops for `dispatch.dispatch`, which take up to
twice as long as this kernel. Every block has some tokens, and counts by itself
how many tokens each expert has, among all and before its own: the positions of
its own rows follow from that.

Counting is by sets: a token's experts are bits of a few words, so that repeated
experts and ids of no expert need no special case, and one step looks at a bit
for each of 64 experts by 32 tokens. Sums are taken only over threads that hold
the same expert's counts: a sum over a whole warpgroup would use shared memory
that the warpgroups have in common.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._hopper import (
  BARRIER_BYTES,
  LANES,
  SHARED_BYTES,
  WARPGROUP,
  strided,
)
from pallas_kernels._padding import round_up
from pallas_kernels.expert_mlp import tiles
from pallas_kernels.expert_mlp.dispatch import (
  ALIGN,
  CombineIndices,
  capacities,
)

__all__ = ('dispatch', 'why_not')

_MAX_TOKENS = 1056  # 8 for each of 132 blocks; every block counts them all.
_EXPERTS = 64  # Experts by tokens are counted in tiles of this size;
_TOKENS = 32  # 64 experts are two words of 32 bits.
_PIECE = 64  # A row is copied as [H / 64, 64], because
_MAX_SIDE = 256  # no side of a copy may be longer than this.
_LAYOUT = plgpu.Layout.WGMMA


def why_not(
  tokens: int, hidden: int, experts: int, config: tiles.TileConfig
) -> str | None:
  """Why `dispatch` cannot take these sizes; None if it can."""
  own = pl.cdiv(tokens, config.blocks)
  lanes = round_up(experts, _EXPERTS)
  masks = lanes // 32 * _padded(tokens, config.groups)
  shared = own * hidden * 2 + (masks + lanes * (config.groups + 2)) * 4
  if tokens > _MAX_TOKENS:
    return f'{tokens} tokens; at most {_MAX_TOKENS}'
  if own > _MAX_SIDE:
    return f'{own} tokens a block; at most {_MAX_SIDE}'
  if hidden > _MAX_SIDE * _PIECE:
    return f'rows of {hidden}; at most {_MAX_SIDE * _PIECE}'
  if shared > SHARED_BYTES - BARRIER_BYTES:
    return f'{shared} bytes of shared memory a block'
  return None


def _step(tokens: int, groups: int) -> int:
  """How many tokens one warpgroup turns into sets."""
  return round_up(pl.cdiv(tokens, groups), LANES)


def _padded(tokens: int, groups: int) -> int:
  return round_up(tokens, _step(tokens, groups))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def dispatch(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  experts: int,
  config: tiles.TileConfig,
  interpret: Any = None,
  front: int = 0,
) -> tuple[tuple[jax.Array, ...], jax.Array, CombineIndices]:
  """`dispatch.dispatch` of the same arguments, except in unused entries.

  Args:
    x: `[T, H]` bfloat16, H a multiple of 64.
    ids: `[T, K]` int32, any values.
    weights: `[T, K]` float32.
    experts: E.
    config: sizes of tiles and blocks.
    interpret: parameters of the interpreter, or None.
    front: 0, or at least T: number of rows before the others, for experts that
      every token has; the first T of them are x, with weight 1.

  Returns:
    See `dispatch.dispatch`. Entries of the table from the number of tiles on,
    and rows and weights that belong to no token, are not written. Where an
    expert is repeated, an index of its token does not count. Neither the
    indices nor the rows in the table count the rows in front.
  """
  (tokens, choices), hidden = ids.shape, x.shape[1]
  own = pl.cdiv(tokens, config.blocks)
  lanes = round_up(experts, _EXPERTS)
  padded = _padded(tokens, config.groups)
  capacity, entries = capacities(tokens * choices, experts, config.width)
  capacity += front
  # XLA fuses this with what computes the ids. Transposed, as a lane of the
  # kernel takes a token.
  valid = (ids >= 0) & (ids < experts)
  columns = jnp.pad(
    jnp.where(valid, ids, lanes).T,
    ((0, 0), (0, padded - tokens)),
    constant_values=lanes,
  )
  pieces = (hidden // _PIECE, _PIECE)
  counts = plgpu.SMEM((lanes,), jnp.int32)
  kernel = plgpu.kernel(
    functools.partial(
      _kernel, own=own, experts=experts, width=config.width, front=front
    ),
    out_type=(
      jax.ShapeDtypeStruct((entries, 5), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),
      jax.ShapeDtypeStruct((capacity + config.width,), jnp.float32),
      jax.ShapeDtypeStruct((capacity, *pieces), x.dtype),
      jax.ShapeDtypeStruct((choices, tokens), jnp.int32),
    ),
    scratch_types=dict(
      rows=plgpu.SMEM((own, *pieces), x.dtype),
      loaded=plgpu.Barrier(),
      together=plgpu.Barrier(num_arrivals=config.groups),
      masks=plgpu.SMEM((lanes // 32, padded), jnp.int32),
      partial=plgpu.SMEM((config.groups, lanes), jnp.int32),
      counts=counts,
      starts=counts,
    ),
    grid=(pl.cdiv(tokens, own),),
    grid_names=('block',),
    num_threads=config.groups,
    thread_name='group',
    compiler_params=WARPGROUP,
    interpret=interpret,
    kernel_name='expert_dispatch',
  )
  x = x.reshape(tokens, *pieces)
  *tables, rows, indices = kernel(columns, weights, x)
  combine: CombineIndices = [(jnp.maximum(row, 0), row >= 0) for row in indices]
  return tuple(tables), rows.reshape(capacity, hidden), combine


def _kernel(
  ids, weights, x, table, number, row_weights, out, indices, *, rows, loaded,
  together, masks, partial, counts, starts, own, experts, width, front,
):  # fmt: skip
  """Dispatches the tokens of one block.

  Some words hold two numbers of 16 bits, the lower half first. In `partial` and
  `counts` they are the tokens of an expert, and those of them before this
  block's; in `starts` an expert's first row, in units of `ALIGN`, and its first
  tile.
  """
  tokens, choices = weights.shape
  block, group = lax.axis_index('block'), lax.axis_index('group')
  groups = lax.axis_size('group')
  step = _step(tokens, groups)
  first = block * own

  def meet():
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)

  @pl.when(group == 0)
  def _():
    plgpu.copy_gmem_to_smem(x.at[pl.ds(first, own)], rows, loaded)

  @pl.when(group * step < tokens)
  def _():
    _write_masks(ids, masks, pl.ds(group * step, step))

  meet()
  _count(masks, partial, group, first, tokens)
  meet()

  @pl.when(group == 0)
  def _():
    total = _write_starts(partial, counts, starts, width)

    @pl.when(block == 0)
    def _():
      number[0] = total >> 16

  meet()
  _write_entries(counts, starts, table, block, group, experts, width)
  plgpu.barrier_wait(loaded)

  own_tokens = jnp.minimum(own, tokens - first)

  def write_front(row, _):
    row_weights[first + row] = jnp.float32(1.0)
    plgpu.copy_smem_to_gmem(rows.at[row], out.at[first + row])

  if front:
    _each(group, own_tokens, groups, write_front)

  def write_row(pair, _):
    # One loop over pairs, not unrolled over choices: loading the code of a
    # kernel takes time too.
    row, choice = lax.div(pair, choices), lax.rem(pair, choices)
    token = first + row
    here, slot, expert, weight = _look_up(ids, weights, token, choice)
    here &= expert < counts.shape[0]
    expert = jnp.minimum(expert, counts.shape[0] - 1)

    def earlier(i, rank):
      return rank + ((masks[expert >> 5, i] >> (expert & 31)) & 1)

    rank = lax.shift_right_logical(counts[expert], jnp.int32(16))
    rank = lax.fori_loop(first, token, earlier, rank)
    place = (starts[expert] & 0xFFFF) * ALIGN + rank
    indices[slot, token] = jnp.where(here, place, -1)

    @pl.when(here)
    def _():
      row_weights[front + place] = weight
      plgpu.copy_smem_to_gmem(rows.at[row], out.at[front + place])

  _each(group, own_tokens * choices, groups, write_row)
  plgpu.wait_smem_to_gmem(0)


def _each(first, end, step, body):
  """`body(i, None)` for every i of a range."""
  number = lax.div(end - first + (step - 1), jnp.int32(step))
  lax.fori_loop(0, number, lambda i, _: body(first + i * step, None), None)


def _write_masks(ids, masks, tokens):
  """Turns the experts `[K, T]` of some tokens into sets `[E / 32, T]`."""
  layout = strided(tokens.size)
  columns = [
    plgpu.load(ids.at[k, tokens], layout=layout) for k in range(ids.shape[0])
  ]
  bits = [lax.shift_left(jnp.ones_like(c), c & 31) for c in columns]
  columns = [c >> 5 for c in columns]

  def word(w, _):
    mask = jnp.zeros_like(bits[0])
    for column, bit in zip(columns, bits, strict=True):
      mask |= jnp.where(column == w, bit, 0)
    masks[w, tokens] = mask

  lax.fori_loop(0, masks.shape[0], word, None)


def _iota(shape, dimension):
  return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=_LAYOUT)


def _count(masks, partial, group, first, tokens):
  """Fills one warpgroup's part of `partial`, from its share of the tokens."""
  groups = partial.shape[0]
  shape = (_EXPERTS, _TOKENS)
  expert, token = _iota(shape, 0), _iota(shape, 1)
  bit = lax.shift_left(jnp.ones_like(expert), expert & 31)
  bits = jnp.where(expert < 32, bit, 0), jnp.where(expert < 32, 0, bit)

  def tile(i, _):
    def add(j, total):
      start = (group + j * groups) * _TOKENS
      lower, upper = (
        _columns(masks.at[i * 2 + half, pl.ds(start, _TOKENS)], shape)
        & bits[half]
        for half in range(2)
      )
      one = jnp.where(token < first - start, 0x10001, 1)
      return total + jnp.where((lower | upper) != 0, one, 0)

    steps = pl.cdiv(tokens, _TOKENS)
    number = lax.div(steps - group + (groups - 1), jnp.int32(groups))
    total = lax.fori_loop(0, number, add, jnp.zeros_like(token))
    partial[group, pl.ds(i * _EXPERTS, _EXPERTS)] = jnp.sum(total, axis=1)

  lax.fori_loop(0, partial.shape[1] // _EXPERTS, tile, None)


def _write_starts(partial, counts, starts, width):
  """Fills `counts` and `starts`; returns the start after the last expert."""
  shape = (_EXPERTS, _EXPERTS)
  earlier = _iota(shape, 1) < _iota(shape, 0)

  def tile(i, base):
    here = pl.ds(i * _EXPERTS, _EXPERTS)
    parts = [partial.at[g, here] for g in range(partial.shape[0])]
    counts[here] = sum(
      plgpu.load(part, layout=_LAYOUT.reduce(1), optimized=False)
      for part in parts
    )
    sizes = _size(_columns(counts.at[here], shape) & 0xFFFF, width)
    starts[here] = jnp.sum(jnp.where(earlier, sizes, 0), axis=1) + base
    last = (i + 1) * _EXPERTS - 1
    return starts[last] + _size(counts[last] & 0xFFFF, width)

  return lax.fori_loop(0, counts.shape[0] // _EXPERTS, tile, jnp.int32(0))


def _write_entries(counts, starts, table, block, group, experts, width):
  """Writes the table's entries for this warpgroup's share of the experts."""
  blocks, groups = lax.axis_size('block'), lax.axis_size('group')

  def write_entries(expert, _):
    count, start = counts[expert] & 0xFFFF, starts[expert]
    number = _size(count, width) >> 16

    def write(tile, _):
      entry = (start >> 16) + tile
      fields = (expert, start >> 16, number, start & 0xFFFF, count)
      for field, value in enumerate(fields):
        table[entry, field] = value

    lax.fori_loop(0, number, write, None)

  _each(group * blocks + block, experts, blocks * groups, write_entries)


def _columns(ref, shape):
  """A tile whose rows are all one vector from shared memory."""
  layout = _LAYOUT.reduce(0)
  vector = plgpu.load(ref, layout=layout, optimized=False)
  return lax.broadcast_in_dim(vector, shape, (1,))


def _size(count, width):
  """The size of an expert of `count` rows, as the entries of `starts` are."""
  units = (count + (ALIGN - 1)) >> 4
  # A division by the width, exact for such small numbers.
  parts = ((count + (width - 1)) * -(-(1 << 20) // width)) >> 20
  return units | (parts << 16)


def _look_up(ids, weights, token, choice):
  """Compares one of a token's choices with the others.

  Returns:
    Whether it is the first choice of its expert, its number in the order of
    experts, its expert, and the sum of the weights of this and later choices of
    that expert.
  """
  expert, weight = ids[choice, token], weights[token, choice]
  first, slot = jnp.int32(0) == 0, jnp.int32(0)
  for other in range(ids.shape[0]):
    that = ids[other, token]
    same, earlier = that == expert, other < choice
    first &= jnp.logical_not(same & earlier)
    slot += jnp.where((that < expert) | (same & earlier), 1, 0)
    # The same sum in the same order as `dispatch.sum_duplicates`.
    later = same & (other > choice)
    weight += jnp.where(later, weights[token, other], 0.0)
  return first, slot, expert, weight
