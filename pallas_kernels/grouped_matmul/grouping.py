"""Which rows go to which experts, on a Hopper GPU: `routing.group`, one launch.

XLA needs about a dozen small ops for it, which take up to twice as long as this
kernel. Every block has some tokens, and finds out by itself what it must know
of all others: their number on each expert, from which the places of its own
rows follow.

Counting is by sets: a token's experts are bits of a few words, so that repeats
and what is no expert need no care, and one bit is looked at for each of 64
experts by 32 tokens at a time. Only threads that hold the same expert's counts
are ever summed over: sums over a whole warpgroup share their shared memory with
those of the other warpgroups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import routing, tiles

__all__ = ('group', 'supported')

_MAX_TOKENS = 1056  # Every block counts them all. (8 for each of 132 blocks.)
_SHARED_BYTES = 232448 - 2048
_LANES = 128  # Threads of a warpgroup, and the narrowest vector.
_EXPERTS = 64  # Of a tile that counts: two words of 32.
_TOKENS = 32  # Of such a tile.
_PIECE = 64  # A row is copied as [H / 64, 64]:
_MAX_SIDE = 256  # no side of a copy may be longer.
_LAYOUT = plgpu.Layout.WGMMA


def supported(tokens: int, hidden: int, experts: int, cut: tiles.Plan) -> bool:
  """Whether `group` takes these sizes."""
  own = pl.cdiv(tokens, cut.blocks)
  lanes = routing.round_up(experts, _EXPERTS)
  masks = lanes // 32 * _padded(tokens, cut.groups)
  shared = own * hidden * 2 + (masks + lanes * (cut.groups + 2)) * 4
  return (
    tokens <= _MAX_TOKENS
    and own <= _MAX_SIDE
    and hidden <= _MAX_SIDE * _PIECE
    and shared <= _SHARED_BYTES
  )


def _step(tokens: int, groups: int) -> int:
  """How many tokens a warpgroup makes sets of."""
  return routing.round_up(pl.cdiv(tokens, groups), _LANES)


def _padded(tokens: int, groups: int) -> int:
  return routing.round_up(tokens, _step(tokens, groups))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def group(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  experts: int,
  cut: tiles.Plan,
  interpret: Any = None,
  front: int = 0,
) -> tuple[tuple[jax.Array, ...], jax.Array, routing.Places]:
  """What `routing.group` makes of the same, but for what nobody looks at.

  Args:
    x: `[T, H]` bfloat16, H a multiple of 64.
    ids: `[T, K]` int32, any values.
    weights: `[T, K]` float32.
    experts: E.
    cut: the op's plan.
    interpret: parameters of the interpreter, or None.
    front: 0, or at least T: so many rows come before the others, of which the
      first T are x, with weight 1.

  Returns:
    See `routing.group`. Entries of the table from the number of tiles on and
    rows (and weights) that belong to no token are not written; a repeat leaves
    a hole in its token's places. Places and the table's rows do not count the
    rows in front.
  """
  (tokens, choices), hidden = ids.shape, x.shape[1]
  own = pl.cdiv(tokens, cut.blocks)
  lanes = routing.round_up(experts, _EXPERTS)
  padded = _padded(tokens, cut.groups)
  capacity, entries = routing.sizes(tokens * choices, experts, cut.width)
  capacity += front
  # One fusion with what made the ids. Columns, as a lane takes a token.
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
      _kernel, own=own, experts=experts, width=cut.width, front=front
    ),
    out_type=(
      jax.ShapeDtypeStruct((entries, 5), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),
      jax.ShapeDtypeStruct((capacity + cut.width,), jnp.float32),
      jax.ShapeDtypeStruct((capacity, *pieces), x.dtype),
      jax.ShapeDtypeStruct((choices, tokens), jnp.int32),
    ),
    scratch_types=dict(
      rows=plgpu.SMEM((own, *pieces), x.dtype),
      loaded=plgpu.Barrier(),
      together=plgpu.Barrier(num_arrivals=cut.groups),
      masks=plgpu.SMEM((lanes // 32, padded), jnp.int32),
      partial=plgpu.SMEM((cut.groups, lanes), jnp.int32),
      counts=counts,
      starts=counts,
    ),
    grid=(pl.cdiv(tokens, own),),
    grid_names=('block',),
    num_threads=cut.groups,
    thread_name='group',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    interpret=interpret,
    kernel_name='expert_group',
  )
  x = x.reshape(tokens, *pieces)
  *tables, rows, places = kernel(columns, weights, x)
  places = [(jnp.maximum(row, 0), row >= 0) for row in places]
  return tuple(tables), rows.reshape(capacity, hidden), places


def _kernel(
  ids, weights, x, table, number, row_weights, out, places, *, rows, loaded,
  together, masks, partial, counts, starts, own, experts, width, front,
):  # fmt: skip
  """One block's part.

  Packed in the halves of a word are, in `partial` and `counts`, the tokens of
  an expert and those of them before this block's; in `starts` an expert's first
  row, in units of `ALIGN`, and its first tile.
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
    # A loop over pairs, not unrolled over choices: code is loaded just once.
    row, choice = lax.div(pair, choices), lax.rem(pair, choices)
    token = first + row
    here, slot, expert, weight = _look_up(ids, weights, token, choice)
    here &= expert < counts.shape[0]
    expert = jnp.minimum(expert, counts.shape[0] - 1)

    def earlier(i, rank):
      return rank + ((masks[expert >> 5, i] >> (expert & 31)) & 1)

    rank = lax.shift_right_logical(counts[expert], jnp.int32(16))
    rank = lax.fori_loop(first, token, earlier, rank)
    place = (starts[expert] & 0xFFFF) * routing.ALIGN + rank
    places[slot, token] = jnp.where(here, place, -1)

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
  """Some tokens' experts `[K, T]`, as sets `[E / 32, T]`."""
  columns = [ids[k, tokens] for k in range(ids.shape[0])]
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
  """Fills a warpgroup's part of `partial`: every so many-th step of tokens."""
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
  """Fills `counts` and `starts`; returns what would be the next start."""
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
  """Writes the entries of this warpgroup's experts."""
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
  """A vector in shared memory as every row of a tile."""
  layout = _LAYOUT.reduce(0)
  vector = plgpu.load(ref, layout=layout, optimized=False)
  return lax.broadcast_in_dim(vector, shape, (1,))


def _size(count, width):
  """What an expert of `count` rows adds to `starts`."""
  units = (count + (routing.ALIGN - 1)) >> 4
  # A division by the width, exact for such small numbers.
  parts = ((count + (width - 1)) * -(-(1 << 20) // width)) >> 20
  return units | (parts << 16)


def _look_up(ids, weights, token, choice):
  """One of a token's choices, among the others.

  Returns:
    Whether it is the first of its expert, its number in the order of experts,
    its expert, and the weight of this and later choices of it.
  """
  expert, weight = ids[choice, token], weights[token, choice]
  first, slot = jnp.int32(0) == 0, jnp.int32(0)
  for other in range(ids.shape[0]):
    that = ids[other, token]
    same, earlier = that == expert, other < choice
    first &= jnp.logical_not(same & earlier)
    slot += jnp.where((that < expert) | (same & earlier), 1, 0)
    # The same sum in the same order as `routing.merge_repeats`.
    later = same & (other > choice)
    weight += jnp.where(later, weights[token, other], 0.0)
  return first, slot, expert, weight
