"""Exact selection of the best of long rows, ties by lowest id, on a Hopper GPU.

`select` reduces every row of logits to a few more than the number wanted, in no
order; `sorted_by_rank` sorts those. Every row is cut into slices, each for one
block of threads. A block finds a threshold that enough of its elements reach,
by bisection on integers in the order of the floats: over the maxima of strided
columns, and then, if too many pass, over the elements. It writes those that
pass. Where many slices leave many candidates, the kernel runs again on those.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _float_order
from pallas_kernels._float_order import HIGHEST, LOWEST
from pallas_kernels._hopper import LANE, LANES, WARPS
from pallas_kernels._padding import round_up

MAX_COUNT = 1024

_COLUMNS = 1024  # least number of strided columns of a long slice
_SLICE = 20480  # longest slice of logits: 80 KB of shared memory
_SLICE_WITH_IDS = 12288  # the same where ids are kept beside the keys
_RANKED_AT_ONCE = 1152  # longest row whose ranks XLA counts, in square time
_PICKED = 256  # most ranks whose keys and ids are picked without their index
_UNROLL = 8
_IN_FLIGHT = 10  # blocks of columns loaded at once


def float_of_key(keys: jax.Array) -> jax.Array:
  """Inverse of `_key_of_float`."""
  return _float_order.float_of(_float_order.flip_negative(keys))


def _key_of_float(x: jax.Array) -> jax.Array:
  """int32 keys in the order of `reference.canonical` logits."""
  x = x.astype(jnp.float32)
  x = jnp.where(x != x, -jnp.inf, x)
  x = jnp.minimum(x, jnp.finfo(jnp.float32).max)
  x = jnp.where(x == 0, 0.0, x)
  return _float_order.flip_negative(_float_order.bits_of(x))


def sorted_by_rank(keys, ids, count):
  """The `count` best of `[R, n]` by (key descending, id ascending).

  An entry's rank is the number of entries before it, so no sort is needed: both
  steps are one fused reduction over all pairs.
  """
  mine, others = keys[:, :, None], keys[:, None, :]
  before = others > mine
  before |= (others == mine) & (ids[:, None, :] < ids[:, :, None])
  rank = jnp.sum(before, axis=2, dtype=jnp.int32)
  if count <= _PICKED:
    return inverse(rank, count, keys), inverse(rank, count, ids)
  index = np.arange(keys.shape[1], dtype=np.int32)[None, :]
  order = inverse(rank, count, index)
  return (
    jnp.take_along_axis(keys, order, axis=1),
    jnp.take_along_axis(ids, order, axis=1),
  )


def inverse(
  rank: jax.Array, count: int, values: jax.Array | np.ndarray
) -> jax.Array:
  """`[R, count]` of the int32 `values` `[R or 1, n]` at ranks 0..count-1."""
  wanted = np.arange(count, dtype=np.int32)[None, :, None]
  here = jnp.where(rank[:, None, :] == wanted, values[:, None, :], 0)
  return jnp.sum(here, axis=2, dtype=jnp.int32)


def _capacity(count: int, slack: int) -> int:
  """Candidates kept of a slice: slack lets the bisection end early."""
  return count + max(8, count // slack // 8 * 8)


def _columns(length: int, count: int) -> int:
  """Strided columns of a slice: about half of them hold a candidate."""
  columns = min(2 * _COLUMNS, max(LANES, 2 << (count - 1).bit_length()))
  return max(columns, _COLUMNS) if length >= 8 * _COLUMNS else columns


def select(rows: jax.Array, count: int, *, interpret):
  """A superset of the `count` best of every row, few and in no order.

  Args:
    rows: `[R, V]` float logits.
    count: how many of each row are wanted, at most V and `MAX_COUNT`.

  Returns:
    keys, ids: `[R, n]` int32. Unused entries have the key `LOWEST` and the
      id `HIGHEST`. Every id occurs once.
  """
  keys, ids, limit = rows, None, _SLICE
  while True:
    parts = -(-keys.shape[1] // limit)
    columns = _columns(keys.shape[1], count)
    n = round_up(-(-keys.shape[1] // parts), columns)
    padding = ((0, 0), (0, parts * n - keys.shape[1]))
    if padding[1][1]:
      fill = LOWEST if ids is not None else -jnp.inf
      keys = jnp.pad(
        keys, padding, constant_values=np.asarray(fill, keys.dtype)
      )
      if ids is not None:
        ids = jnp.pad(ids, padding, constant_values=HIGHEST)
    capacity = _capacity(count, 8 if parts == 1 else 4)
    keys, ids = _select_pass(keys, ids, count, capacity, n, columns, interpret)
    if parts == 1 or parts * capacity <= _RANKED_AT_ONCE:
      return keys, ids
    limit = _SLICE_WITH_IDS


def _select_pass(x, ids, count, capacity, n, columns, interpret):
  """One launch of `_select_kernel` over `[R, parts * n]`."""
  rows, length = x.shape
  parts = length // n
  has_ids = ids is not None
  out = jax.ShapeDtypeStruct((rows, parts * capacity), jnp.int32)

  def smem(shape):
    return plgpu.SMEM(shape, jnp.int32)

  scratch: dict[str, Any] = dict(
    keys=smem((n,)),
    column=dict.fromkeys(('many', 'first', 'last'), smem((columns,))),
    passing=smem((columns + WARPS * _UNROLL,)),
    found=smem((WARPS * (capacity + _UNROLL),)),
    found_count=smem((WARPS,)),
  )
  if has_ids:
    scratch['own_ids'] = smem((n,))
  return plgpu.kernel(
    functools.partial(
      _select_kernel, n=n, count=count, capacity=capacity, has_ids=has_ids
    ),
    out_type=(out, out),
    scratch_types=scratch,
    grid=(rows, parts),
    grid_names=('row', 'part'),
    compiler_params=LANE,
    interpret=interpret,
    kernel_name='tree_build_select',
  )(*((x, ids) if has_ids else (x,)))


def _select_kernel(
  x_ref, *refs, n, count, capacity, has_ids, keys, column, passing, found,
  found_count, own_ids=None,
):  # fmt: skip
  """Compacts one slice of one row to `count..capacity` candidates."""
  ids_ref, refs = (refs[0], refs[1:]) if has_ids else (None, refs)
  key_out, id_out = refs
  row, part = lax.axis_index('row'), lax.axis_index('part')
  base = part * n
  size = column['many'].shape[0]
  blocks = n // size
  best = None
  # Loads in groups, all of one in flight before the first store waits.
  for first in range(0, blocks, _IN_FLIGHT):
    group = range(first, min(first + _IN_FLIGHT, blocks))
    at = [pl.ds(base + j * size, size) for j in group]
    loaded = [x_ref[row, s] for s in at]
    loaded_ids = [] if ids_ref is None else [ids_ref[row, s] for s in at]
    loaded = loaded if has_ids else [_key_of_float(x) for x in loaded]
    for j, x in zip(group, loaded, strict=True):
      keys[pl.ds(j * size, size)] = x
      best = x if best is None else jnp.maximum(best, x)
    for j, x in zip(group, loaded_ids, strict=False):
      assert own_ids is not None
      own_ids[pl.ds(j * size, size)] = x
  block = functools.partial(_block, keys, own_ids, size)
  low, bound = _threshold(block, blocks, best, count, capacity)

  many = jnp.zeros((size,), jnp.int32)
  first, last = many + blocks, many - 1
  for j in range(blocks):
    passes = _passes(*block(j), low, bound)
    many += jnp.where(passes, 1, 0)
    first = jnp.minimum(first, jnp.where(passes, j, blocks))
    last = jnp.maximum(last, jnp.where(passes, j, -1))
  for name, x in (('many', many), ('first', first), ('last', last)):
    column[name][...] = x
  in_doubt = functools.partial(_passes, low=low, bound=bound)
  _compact(in_doubt, keys, own_ids, column, passing, found, found_count)

  @plgpu.warp_map
  def _write(warp):
    start, total = jnp.int32(0), jnp.int32(0)
    for w in range(WARPS):
      start += jnp.where(w < warp, found_count[w], 0)
      total += found_count[w]
    out, mine = part * capacity, found_count[warp]
    lists = warp * (capacity + _UNROLL)

    def write(step, _):
      # Past the end the last entry is written again: no branch.
      entry = [
        jnp.minimum(step * _UNROLL + u, mine - 1) for u in range(_UNROLL)
      ]
      index = [found[lists + e] for e in entry]
      key = [keys[i] for i in index]
      token = [base + i if own_ids is None else own_ids[i] for i in index]
      for e, k, t in zip(entry, key, token, strict=True):
        key_out[row, out + start + e] = k
        id_out[row, out + start + e] = t

    lax.fori_loop(0, (mine + _UNROLL - 1) // _UNROLL, write, None)

    def fill(step, _):
      at = total + warp + step * WARPS

      @pl.when(at < capacity)
      def _():
        key_out[row, out + at] = LOWEST
        id_out[row, out + at] = HIGHEST

    lax.fori_loop(0, (capacity - total + WARPS - 1) // WARPS, fill, None)


def _block(keys, own_ids, size, j):
  """Block j of a slice: its keys and ids, `[size]` each."""
  at = pl.ds(j * size, size)
  if own_ids is not None:
    return keys[at], own_ids[at]
  layout = plgpu.Layout.WG_STRIDED((size,), vec_size=min(2, size // LANES))
  iota = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
  return keys[at], iota + j * size


def _passes(key, own_id, low, bound):
  """Whether an element is above `low`, or at it with an id below `bound`."""
  return (key > low) | ((key == low) & (own_id < bound))


def _middle(low, high):
  """floor((low + high) / 2) without overflow."""
  return (low & high) + ((low ^ high) >> 1)


def _bisect(counted, low, high, passed, count, enough):
  """Raises `low`, at which `passed` >= count pass, until few enough do.

  Args:
    counted: how many pass a threshold.
    high: a threshold that fewer than `count` pass.

  Returns:
    (low, passed): at least `count`, and at most `enough` unless the surplus
      passes at `low` and not above.
  """

  def cond(state):
    low, high, passed = state
    return (passed > enough) & (_middle(low, high) > low)

  def body(state):
    low, high, passed = state
    middle = _middle(low, high)
    now = counted(middle)
    keep = now >= count
    return (
      jnp.where(keep, middle, low),
      jnp.where(keep, high, middle),
      jnp.where(keep, now, passed),
    )

  low, _, passed = lax.while_loop(cond, body, (low, high, passed))
  return low, passed


def _threshold(block, blocks, best, count, capacity):
  """(low, bound) so that `count..capacity` elements pass.

  An element passes with a key above `low`, or at `low` with an id below
  `bound`. `bound` is only used where more than `capacity` elements share keys.

  Args:
    block: `block(j)` gives the keys and ids of block j of `blocks`.
    best: `[columns]` maxima of the columns; each is one element that passes.
  """

  def elements(test):
    total = jnp.zeros(best.shape, jnp.int32)
    for j in range(blocks):
      total += jnp.where(test(*block(j)), 1, 0)
    return jnp.sum(total)

  top = jnp.max(best) + 1  # keys of floats are below the highest integer
  low, _ = _bisect(
    lambda t: jnp.sum(jnp.where(best >= t, 1, 0)), jnp.min(best), top,
    jnp.int32(best.shape[0]), count, count + count // 32,
  )  # fmt: skip
  reached = elements(lambda key, _: key >= low)
  low, reached = _bisect(
    lambda t: elements(lambda key, _: key >= t), low, top, reached, count,
    capacity,
  )  # fmt: skip
  # Now either few enough pass, or the surplus shares the key `low`: then the
  # lowest ids of those, by bisection for the smallest bound that suffices.
  surplus = reached > capacity

  def more(state):
    below, bound = state
    return surplus & (bound - below > 1)

  def halve(state):
    below, bound = state
    middle = _middle(below, bound)
    passed = elements(functools.partial(_passes, low=low, bound=middle))
    return (
      jnp.where(passed >= count, below, middle),
      jnp.where(passed >= count, middle, bound),
    )

  _, bound = lax.while_loop(more, halve, (jnp.int32(0), HIGHEST))
  return low, bound


def _compact(passes, keys, own_ids, column, passing, found, found_count):
  """Lists the positions that pass, each warp those of its own columns.

  First the columns with any, then their first and last element that passes
  (`column`), and those in between only where there are more. To avoid
  branches, an entry is always written after the list's end, which moves only if
  the entry counts.
  """
  size = column['many'].shape[0]
  own_columns = size // WARPS

  @plgpu.warp_map
  def _(warp):
    listed = warp * (own_columns + _UNROLL)
    lists = warp * (found.shape[0] // WARPS)

    def list_columns(step, end):
      first = warp * own_columns + step * _UNROLL
      many = [column['many'][first + u] for u in range(_UNROLL)]
      for u, m in enumerate(many):
        passing[listed + end] = first + u
        end += jnp.where(m > 0, 1, 0)
      return end

    total = lax.fori_loop(0, own_columns // _UNROLL, list_columns, jnp.int32(0))

    def between(c, end, j):
      """Adds block j of column c if it passes."""
      i = c + j * size
      found[lists + end] = i
      own = i if own_ids is None else own_ids[i]
      return end + jnp.where(passes(keys[i], own), 1, 0)

    def list_elements(step, end):
      at = [step * _UNROLL + u for u in range(_UNROLL)]
      columns = [passing[listed + jnp.minimum(i, total - 1)] for i in at]
      many, first, last = (
        [column[k][c] for c in columns] for k in ('many', 'first', 'last')
      )
      many = [jnp.where(i < total, m, 0) for i, m in zip(at, many, strict=True)]
      for c, m, j, k in zip(columns, many, first, last, strict=True):
        found[lists + end] = c + j * size
        end += jnp.where(m > 0, 1, 0)
        found[lists + end] = c + k * size
        end += jnp.where(m > 1, 1, 0)
      for c, m, j, k in zip(columns, many, first, last, strict=True):
        end = lax.fori_loop(
          j + 1,
          jnp.where(m > 2, k, 0),
          lambda j, end, c=c: between(c, end, j),
          end,
        )
      return end

    found_count[warp] = lax.fori_loop(
      0, (total + _UNROLL - 1) // _UNROLL, list_elements, jnp.int32(0)
    )
