"""Which rows go to which experts, on a Hopper GPU: `routing.group`, one launch.

In a captured graph every small op costs as much as this kernel, and XLA needs
about fifteen. Every block has some tokens, and finds out by itself what it must
know of all others: their number on each expert, by which its own rows' places
follow. Counting is by sets: a token's experts are the bits of a few words, so
that what occurs twice or is no expert needs no care, and a lane of a tile of
64 experts by 32 tokens looks at one bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import routing

__all__ = ('group', 'supported')

_MAX_TOKENS = 1056  # Every block counts them all; 8 for each of 132 blocks.
_SHARED_BYTES = 232448 - 2048
_LANES = 128  # Threads of a warpgroup, and the narrowest vector.
_EXPERTS = 64  # Of a tile that counts: two words of 32.
_TOKENS = 32  # Of such a tile.
_PIECE = 64  # A row is copied as [H / 64, 64]: no side of a copy exceeds 256.
_LAYOUT = plgpu.Layout.WGMMA


def supported(tokens: int, hidden: int, experts: int, blocks: int) -> bool:
  """Whether `group` takes these sizes."""
  words = routing.round_up(experts, _EXPERTS) // 32
  masks = words * _padded(tokens)[1] * 4
  rows = pl.cdiv(tokens, blocks) * hidden * 2
  return (
    tokens <= _MAX_TOKENS
    and hidden <= 256 * _PIECE
    and pl.cdiv(tokens, blocks) <= 256
    and masks + rows <= _SHARED_BYTES - words * 32 * 8
  )


def _padded(tokens: int) -> tuple[int, int]:
  """How many tokens a step of `_write_masks` takes, and all steps."""
  steps = pl.cdiv(tokens, 4 * _LANES)
  step = routing.round_up(pl.cdiv(tokens, steps), _LANES)
  return step, step * steps


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def group(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  experts: int,
  width: int,
  blocks: int,
  interpret: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array, routing.Places]:
  """`routing.group` of what `routing.merge_repeats` makes of the arguments.

  Args:
    x: `[T, H]` bfloat16, H a multiple of 64.
    ids: `[T, K]` int32, any values.
    weights: `[T, K]` float32.
    experts: E.
    width: rows of a tile.
    blocks: how many blocks share the tokens, at most.
    interpret: parameters of the interpreter, or None.

  Returns:
    See `routing.group`. Entries of the table from the number of tiles on and
    rows (and weights) that belong to no token are not written.
  """
  (tokens, choices), hidden = ids.shape, x.shape[1]
  own = pl.cdiv(tokens, blocks)
  lanes = routing.round_up(experts, _EXPERTS)
  padded = _padded(tokens)[1]
  capacity, entries = routing.sizes(tokens * choices, experts, width)
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
    functools.partial(_kernel, own=own, experts=experts, width=width),
    out_type=(
      jax.ShapeDtypeStruct((entries, 5), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),
      jax.ShapeDtypeStruct((capacity + width,), jnp.float32),
      jax.ShapeDtypeStruct((capacity, *pieces), x.dtype),
      jax.ShapeDtypeStruct((choices, tokens), jnp.int32),
    ),
    scratch_types=dict(
      rows=plgpu.SMEM((own, *pieces), x.dtype),
      loaded=plgpu.Barrier(),
      masks=plgpu.SMEM((lanes // 32, padded), jnp.int32),
      counts=counts,
      starts=counts,
    ),
    grid=(pl.cdiv(tokens, own),),
    grid_names=('block',),
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
  masks, counts, starts, own, experts, width,
):  # fmt: skip
  """One block's part.

  Packed in the halves of a word are, in `counts`, the tokens of an expert and
  those of them before this block's; in `starts` its first row, in units of
  `ALIGN`, and its first tile.
  """
  block = lax.axis_index('block')
  blocks = pl.cdiv(weights.shape[0], own)
  first = block * own
  plgpu.copy_gmem_to_smem(x.at[pl.ds(first, own)], rows, loaded)
  _write_masks(ids, masks)
  total = _count(masks, counts, starts, first, weights.shape[0], width)

  @pl.when(block == 0)
  def _():
    number[0] = total >> 16

  def write_entries(i, _):
    expert = block + i * blocks
    count, start = counts[expert] & 0xFFFF, starts[expert]
    tiles = lax.div(count + width - 1, jnp.int32(width))

    def write(tile, _):
      entry = (start >> 16) + tile
      fields = (expert, start >> 16, tiles, start & 0xFFFF, count)
      for field, value in enumerate(fields):
        table[entry, field] = value

    lax.fori_loop(0, tiles, write, None)

  lax.fori_loop(
    0, lax.div(experts - block + blocks - 1, blocks), write_entries, None
  )
  plgpu.barrier_wait(loaded)

  def write_rows(i, _):
    token = first + i
    for slot, place, weight, here in _places(
      ids, weights, masks, counts, starts, first, token
    ):
      places[slot, token] = jnp.where(here, place, -1)

      @pl.when(here)
      def _(place=place, weight=weight):
        row_weights[place] = weight
        plgpu.copy_smem_to_gmem(rows.at[i], out.at[place])

  last = jnp.minimum(own, weights.shape[0] - first)
  lax.fori_loop(0, last, write_rows, None)
  plgpu.wait_smem_to_gmem(0)


def _write_masks(ids, masks):
  """The tokens' experts `[K, T]`, as sets `[E / 32, T]`."""
  step = _padded(ids.shape[1])[0]

  def one(i, _):
    tokens = pl.ds(i * step, step)
    columns = [ids[k, tokens] for k in range(ids.shape[0])]
    bits = [lax.shift_left(jnp.ones_like(c), c & 31) for c in columns]
    columns = [c >> 5 for c in columns]

    def word(w, _):
      mask = jnp.zeros_like(bits[0])
      for column, bit in zip(columns, bits, strict=True):
        mask |= jnp.where(column == w, bit, 0)
      masks[w, tokens] = mask

    lax.fori_loop(0, masks.shape[0], word, None)

  lax.fori_loop(0, ids.shape[1] // step, one, None)


def _count(masks, counts, starts, first, tokens, width):
  """Fills `counts` and `starts`; returns what would be the next start."""
  shape = (_EXPERTS, _TOKENS)
  expert = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_LAYOUT)
  token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)
  square = (_EXPERTS, _EXPERTS)
  row = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=_LAYOUT)
  column = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=_LAYOUT)

  def tile(i, base):
    def add(j, total):
      at = pl.ds(j * _TOKENS, _TOKENS)
      lower, upper = (
        _columns(masks.at[i * 2 + half, at], shape) for half in range(2)
      )
      word = jnp.where(expert < 32, lower, upper)
      bit = lax.shift_right_logical(word, expert & 31) & 1
      one = jnp.where(token < first - j * _TOKENS, 0x10001, 1)
      return total + bit * one

    zeros = jnp.where(expert < 0, 1, 0)
    total = lax.fori_loop(0, pl.cdiv(tokens, _TOKENS), add, zeros)
    here = pl.ds(i * _EXPERTS, _EXPERTS)
    counts[here] = jnp.sum(total, axis=1)
    sizes = _size(_columns(counts.at[here], square) & 0xFFFF, width)
    starts[here] = jnp.sum(jnp.where(column < row, sizes, 0), axis=1) + base
    last = (i + 1) * _EXPERTS - 1
    return starts[last] + _size(counts[last] & 0xFFFF, width)

  return lax.fori_loop(0, counts.shape[0] // _EXPERTS, tile, jnp.int32(0))


def _columns(ref, shape):
  """A vector in shared memory as every row of a tile."""
  layout = _LAYOUT.reduce(0)
  vector = plgpu.load(ref, layout=layout, optimized=False)
  return lax.broadcast_in_dim(vector, shape, (1,))


def _size(count, width):
  """What an expert of `count` rows adds to `starts`."""
  units = (count + (routing.ALIGN - 1)) >> 4
  # A division by the width, exact for such small numbers.
  tiles = ((count + (width - 1)) * -(-(1 << 20) // width)) >> 20
  return units | (tiles << 16)


def _places(ids, weights, masks, counts, starts, first, token):
  """Per choice of a token: its slot, its place, its weight, if it has any.

  The slots are the choices in order of expert; those of no expert come last.
  """
  choices = ids.shape[0]
  expert = [ids[k, token] for k in range(choices)]
  weight = [weights[token, k] for k in range(choices)]
  here = []
  for k in range(choices):
    # `merge_repeats`: the same sums in the same order.
    here.append(expert[k] < counts.shape[0])
    for other in range(k):
      here[k] &= expert[other] != expert[k]
    for other in range(k + 1, choices):
      same = expert[other] == expert[k]
      weight[k] += jnp.where(same, weight[other], 0.0)
  key = [
    jnp.where(here[k], expert[k], counts.shape[0] + k) for k in range(choices)
  ]
  for k in range(choices):
    slot = sum(
      (key[other] < key[k]).astype(jnp.int32)
      for other in range(choices)
      if other != k
    )
    own = jnp.minimum(expert[k], counts.shape[0] - 1)

    def earlier(i, rank, own=own):
      return rank + ((masks[own >> 5, i] >> (own & 31)) & 1)

    rank = lax.shift_right_logical(counts[own], jnp.int32(16))
    rank = lax.fori_loop(first, token, earlier, rank)
    place = (starts[own] & 0xFFFF) * routing.ALIGN + rank
    yield slot, place, weight[k], here[k]
