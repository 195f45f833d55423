"""The best-first tree on a Hopper GPU: two Mosaic kernels and some XLA.

1. `_select`: every row of logits is cut into slices, one block of threads
   each. A block finds a threshold that at least `count` of its elements reach
   (bisection on order-preserving integer keys, first over the maxima of strided
   columns, then over the elements only if too many pass) and compacts what
   passes. Of equal keys the lowest ids pass. Where many slices leave many
   candidates, the same kernel runs again over those.
2. XLA ranks the few hundred candidates by counting and turns them into
   fixed-point log probabilities, by the reference's own expressions.
3. `_grow`: one block of threads a tree pops one node after the other. The
   frontier holds one entry a node, the next child of that node, so a pop is a
   maximum over `budget` entries, and changes two of them.

Every step is exact: given the same log-sum-exp, the tree equals the
reference's to the last bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_build import bits, reference
from pallas_kernels.tree_build.reference import DEAD, TreeArrays

MAX_BUDGET = 1024

_LANES = 128  # threads of a warpgroup
_WARPS = 4  # warps of a warpgroup
_COLUMNS = 1024  # strided columns a long slice is seen as
_SLICE = 20480  # longest slice of logits: 80 KB of shared memory
_SLICE_WITH_IDS = 12288  # the same where ids are kept beside the keys
_RANKED_AT_ONCE = 1152  # longest row whose ranks XLA counts, in square time
_UNROLL = 8
_IN_FLIGHT = 10  # blocks of columns loaded at once
_LOWEST = np.int32(-(2**31))  # key below that of every float
_HIGHEST = np.int32(2**31 - 1)
_TIE = 1 << 16  # above every slot; two of them summed tell a tie

# A path as a binary number whose order is the lexicographic order of ranks:
# rank r becomes k ones, a zero and the k low bits of r + 1, k = floor(log2(r +
# 1)), left-aligned, so that longer paths only append. The ranks of a path in
# the frontier have a product of (r + 1) of at most 2 * budget, since nothing
# with more predecessors than that is ever reached, so a path of 31 ranks takes
# at most 2 * 11 + 31 = 53 bits. A path and its extensions by rank 0 share one
# number; the depth, in the last bits, puts the shorter one first.
_HI_BITS = 31
_LO_BITS = 26
_DEPTH_BITS = 5

_POPPED = 64  # largest budget for which nodes are popped one by one
_GROUPS = 4  # warpgroups of the kernel for larger ones
_AHEAD = 4  # children looked for at once
_WIDEST = 1 << 28  # fixed-point width of a band
_LOWEST_SCORE = DEAD + 1
_OUTPUTS = ('parents', 'places', 'depths', 'scores', 'hi', 'lo')


def unsupported(shape: tuple[int, ...], budget: int) -> str | None:
  """Why `[B, D, V]` logits with this budget cannot run; None if they can."""
  if 0 in shape:
    return f'no logits in {list(shape)}'
  if not 1 <= budget <= MAX_BUDGET:
    return f'budget {budget} is not in 1..{MAX_BUDGET}'
  return None


def tree_build(
  logits: jax.Array, root: jax.Array, *, budget: int, interpret=None
) -> TreeArrays:
  """See `pallas_kernels.tree_build.api.tree_build`.

  Args:
    logits: `[B, D, V]` float32 or bfloat16, D >= 1.
    root: `[B]` int32.
    budget: 1..MAX_BUDGET, static.
    interpret: `plgpu.InterpretGPUParams` to run without a GPU.
  """
  num_ranks = min(budget, logits.shape[2])
  log_q, token_ids = rank_marginals(logits, num_ranks, interpret=interpret)
  return tree_from_ranks(
    log_q, token_ids, root, budget=budget, interpret=interpret
  )


def rank_marginals(
  logits: jax.Array, num_ranks: int, *, interpret=None
) -> tuple[jax.Array, jax.Array]:
  """The same as `reference.rank_marginals`, see there."""
  batch, depth, vocab = logits.shape
  rows = logits.reshape(batch * depth, vocab)
  keys, ids = _select(rows, num_ranks, interpret=interpret)
  keys, token_ids = _sorted_by_rank(keys, ids, num_ranks)
  values = _float_of_key(keys)
  highest = values[:, :1].reshape(batch, depth, 1)
  highest = jnp.where(highest == -jnp.inf, 0.0, highest)
  lse = reference.log_sum_exp(logits, highest)
  log_q = reference.log_q_of_values(
    values.reshape(batch, depth, num_ranks), highest, lse
  )
  return log_q, token_ids.reshape(batch, depth, num_ranks)


def _float_of_key(keys: jax.Array) -> jax.Array:
  """Inverse of `_key_of_float`."""
  return lax.bitcast_convert_type(_flip(keys), jnp.float32)


def _key_of_float(x: jax.Array) -> jax.Array:
  """int32 keys in the order of `reference.canonical` logits."""
  x = x.astype(jnp.float32)
  x = jnp.where(x != x, -jnp.inf, x)
  x = jnp.minimum(x, jnp.finfo(jnp.float32).max)
  x = jnp.where(x == 0, 0.0, x)
  return _flip(lax.bitcast_convert_type(x, jnp.int32))


def _flip(x: jax.Array) -> jax.Array:
  """Reverses the order of negative floats' bits; its own inverse."""
  return x ^ ((x >> 31) & _HIGHEST)


def _sorted_by_rank(keys, ids, count):
  """The `count` best of `[R, n]` by (key descending, id ascending).

  Ranks are counts of what goes before, so that no sort is needed: both steps
  are one fused reduction over all pairs.
  """
  mine, others = keys[:, :, None], keys[:, None, :]
  before = others > mine
  before |= (others == mine) & (ids[:, None, :] < ids[:, :, None])
  rank = jnp.sum(before, axis=2, dtype=jnp.int32)
  at_rank = rank[:, None, :] == np.arange(count, dtype=np.int32)[None, :, None]

  def pick(x):
    return jnp.sum(jnp.where(at_rank, x[:, None, :], 0), axis=2, dtype=x.dtype)

  return pick(keys), pick(ids)


def _capacity(count: int) -> int:
  """Candidates kept of a slice: some slack lets the bisection end early."""
  return count + max(8, count // 8 // 8 * 8)


def _select(rows: jax.Array, count: int, *, interpret):
  """A superset of the `count` best of every row, few and in no order.

  Args:
    rows: `[R, V]` float logits.
    count: how many of each row are wanted, at most V and `_COLUMNS`.

  Returns:
    keys, ids: `[R, n]` int32. Unused entries have the key `_LOWEST` and the
      id `_HIGHEST`. Every id occurs once.
  """
  keys, ids, limit = rows, None, _SLICE
  while True:
    parts = -(-keys.shape[1] // limit)
    # At least `count` columns, each of which has one element that passes.
    columns = min(_COLUMNS, max(128, 1 << (count - 1).bit_length()))
    if keys.shape[1] >= 8 * _COLUMNS:
      columns = _COLUMNS
    n = _round_up(-(-keys.shape[1] // parts), columns)
    padding = ((0, 0), (0, parts * n - keys.shape[1]))
    if padding[1][1]:
      fill = _LOWEST if ids is not None else -jnp.inf
      keys = jnp.pad(keys, padding, constant_values=np.asarray(fill, keys.dtype))
      if ids is not None:
        ids = jnp.pad(ids, padding, constant_values=_HIGHEST)
    capacity = _capacity(count)
    keys, ids = _select_pass(
      keys, ids, count, capacity, n, columns, interpret
    )
    if parts == 1 or parts * capacity <= _RANKED_AT_ONCE:
      return keys, ids
    limit = _SLICE_WITH_IDS


def _select_pass(x, ids, count, capacity, n, columns, interpret):
  """One launch of `_select_kernel` over `[R, parts * n]`."""
  rows, length = x.shape
  parts = length // n
  has_ids = ids is not None
  out = jax.ShapeDtypeStruct((rows, parts * capacity), jnp.int32)
  smem = functools.partial(plgpu.SMEM, dtype=jnp.int32)
  scratch = dict(
    keys=smem((n,)),
    columns=smem((columns,)),
    passing=smem((columns + _WARPS * _UNROLL,)),
    found=smem((_WARPS * (capacity + _UNROLL),)),
    found_count=smem((_WARPS,)),
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
    # Warps can load scalars under Lane semantics only.
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
    interpret=interpret,
    kernel_name='tree_build_select',
  )(*((x, ids) if has_ids else (x,)))


def _select_kernel(
  x_ref, *refs, n, count, capacity, has_ids, keys, columns, passing, found,
  found_count, own_ids=None,
):  # fmt: skip
  """Compacts one slice of one row to `count..capacity` candidates."""
  ids_ref, refs = (refs[0], refs[1:]) if has_ids else (None, refs)
  key_out, id_out = refs
  row, part = lax.axis_index('row'), lax.axis_index('part')
  base = part * n
  size = columns.shape[0]
  blocks = n // size
  best = None
  # Loads in groups, all of one in flight before the first store waits.
  for first in range(0, blocks, _IN_FLIGHT):
    group = range(first, min(first + _IN_FLIGHT, blocks))
    at = [pl.ds(base + j * size, size) for j in group]
    loaded = [x_ref[row, s] for s in at]
    loaded_ids = [ids_ref[row, s] for s in at] if has_ids else []
    loaded = loaded if has_ids else [_key_of_float(x) for x in loaded]
    for j, x in zip(group, loaded, strict=True):
      keys[pl.ds(j * size, size)] = x
      best = x if best is None else jnp.maximum(best, x)
    for j, x in zip(group, loaded_ids, strict=False):
      own_ids[pl.ds(j * size, size)] = x
  columns[...] = best
  block = functools.partial(_block, keys, own_ids, size)
  low, bound = _threshold(block, blocks, best, count, capacity)

  def passes(key, index):
    own = own_ids[index] if has_ids else index
    return (key > low) | ((key == low) & (own < bound))

  _compact(
    passes, low, blocks, keys, columns, passing, found, found_count, capacity
  )

  @plgpu.warp_map
  def _write(warp):
    start, total = jnp.int32(0), jnp.int32(0)
    for w in range(_WARPS):
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
      token = [own_ids[i] if has_ids else base + i for i in index]
      for e, k, t in zip(entry, key, token, strict=True):
        key_out[row, out + start + e] = k
        id_out[row, out + start + e] = t

    lax.fori_loop(0, (mine + _UNROLL - 1) // _UNROLL, write, None)

    def fill(step, _):
      at = total + warp + step * _WARPS

      @pl.when(at < capacity)
      def _():
        key_out[row, out + at] = _LOWEST
        id_out[row, out + at] = _HIGHEST

    lax.fori_loop(0, (capacity - total + _WARPS - 1) // _WARPS, fill, None)


def _block(keys, own_ids, size, j):
  """Block j of a slice: its keys and ids, `[size]` each."""
  at = pl.ds(j * size, size)
  if own_ids is not None:
    return keys[at], own_ids[at]
  layout = plgpu.Layout.WG_STRIDED((size,), vec_size=min(2, size // _LANES))
  iota = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
  return keys[at], iota + j * size


def _middle(low, high):
  """floor((low + high) / 2) without overflow."""
  return (low & high) + ((low ^ high) >> 1)


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

  def bisect(counted, low, high, passed, enough):
    """Raises `low`, at which `passed` >= count pass, until few enough do."""

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

  top = jnp.max(best) + 1  # keys of floats are below the highest integer
  low, _ = bisect(
    lambda t: jnp.sum(jnp.where(best >= t, 1, 0)),
    jnp.min(best), top, jnp.int32(best.shape[0]), count + count // 32,
  )  # fmt: skip
  reached = elements(lambda key, _: key >= low)
  low, reached = bisect(
    lambda t: elements(lambda key, _: key >= t), low, top, reached, capacity
  )
  # Now either few enough pass, or the surplus shares the key `low`: then the
  # lowest ids of those, by bisection for the smallest bound that suffices.
  surplus = reached > capacity

  def more(state):
    below, bound = state
    return surplus & (bound - below > 1)

  def halve(state):
    below, bound = state
    middle = _middle(below, bound)
    passed = elements(
      lambda key, own: (key > low) | ((key == low) & (own < middle))
    )
    return (
      jnp.where(passed >= count, below, middle),
      jnp.where(passed >= count, middle, bound),
    )

  _, bound = lax.while_loop(more, halve, (jnp.int32(0), _HIGHEST))
  return low, bound


def _compact(
  passes, low, blocks, keys, columns, passing, found, found_count, capacity
):  # fmt: skip
  """Lists the positions that pass, each warp those of its own columns.

  Branch-free: a position is always written behind the list, and the list grows
  by it only if it passes.
  """
  own_columns = columns.shape[0] // _WARPS

  @plgpu.warp_map
  def _(warp):
    listed = warp * (own_columns + _UNROLL)
    lists = warp * (capacity + _UNROLL)

    def columns_step(step, size):
      index = [
        warp * own_columns + step * _UNROLL + u for u in range(_UNROLL)
      ]
      value = [columns[i] for i in index]
      for i, v in zip(index, value, strict=True):
        passing[listed + size] = i
        size += jnp.where(v >= low, 1, 0)
      return size

    num_columns = lax.fori_loop(
      0, own_columns // _UNROLL, columns_step, jnp.int32(0)
    )

    def column(c, size):
      top = passing[listed + c]
      index = [top + j * columns.shape[0] for j in range(blocks)]
      good = [passes(keys[i], i) for i in index]
      for i, ok in zip(index, good, strict=True):
        found[lists + size] = i
        size += jnp.where(ok, 1, 0)
      return size

    found_count[warp] = lax.fori_loop(0, num_columns, column, jnp.int32(0))


def tree_from_ranks(
  log_q: jax.Array,
  token_ids: jax.Array,
  root: jax.Array,
  *,
  budget: int,
  interpret=None,
) -> TreeArrays:
  """The same as `reference.tree_from_ranks`, see there; D and budget >= 1."""
  batch, depth, num_ranks = log_q.shape
  n = 1 + budget
  grow = _grow if budget <= _POPPED else _grow_by_bands
  parents, places, depths, fixed, num_nodes = grow(
    log_q, budget, interpret=interpret
  )
  parents, places, depths, fixed = (
    x[:, :n] for x in (parents, places, depths, fixed)
  )
  ids = token_ids.reshape(batch, depth * num_ranks)
  tokens = jnp.take_along_axis(ids, places, axis=1)
  index = np.arange(n, dtype=np.int32)[None, :]
  alive = index < num_nodes
  tokens = jnp.where(alive, tokens, 0)
  scores = jnp.where(
    alive, fixed.astype(jnp.float32) / reference.SCALE, -jnp.inf
  )
  return TreeArrays(
    jnp.where(index == 0, root[:, None], tokens),
    parents,
    depths,
    scores,
    num_nodes[:, 0],
    ancestors_by_doubling(parents, min(depth, budget)),
  )


def ancestors_by_doubling(parents: jax.Array, max_depth: int) -> jax.Array:
  """`bits.ancestors_from_parents` for well-formed trees, in log2(D) gathers.

  Args:
    parents: `[B, N]` int32; -1 for the root (node 0) and for padding.
    max_depth: static bound on the depth of a node.
  """
  batch, n = parents.shape
  index = np.arange(n, dtype=np.int32)[None, :]
  own = jnp.where((parents >= 0) | (index == 0), index, -1)
  above, jump = own[:, :, None], parents

  def follow(x):
    """x at each node's `jump`, -1 beyond the root."""
    at = jnp.maximum(jump, 0).reshape(batch, n, *(1,) * (x.ndim - 2))
    found = jnp.take_along_axis(x, at, axis=1)
    return jnp.where(jump.reshape(at.shape) >= 0, found, -1)

  while above.shape[2] <= max_depth:
    above = jnp.concatenate([above, follow(above)], axis=2)
    jump = follow(jump)
  words = np.arange(bits.num_words(n), dtype=np.int32)[None, None, :, None]
  above = above[:, :, None, :]
  bit = jnp.uint32(1) << (above & (bits.WORD_BITS - 1)).astype(jnp.uint32)
  # Each ancestor occurs once, so the sum of their bits is the union.
  return jnp.sum(
    jnp.where((above >> 5) == words, bit, jnp.uint32(0)),
    axis=3,
    dtype=jnp.uint32,
  )


def _round_up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple


def _grow(log_q, budget, *, interpret):
  """One launch of `_grow_kernel`.

  Returns:
    parents, places (depth - 1) K + rank, depths, fixed-point scores: `[B, S]`
    int32, S at least 1 + budget; num_nodes `[B, 1]`, root included.
  """
  batch, depth, num_ranks = log_q.shape
  # Behind every row and below the last one a dead entry: no bounds to check.
  width = _round_up(num_ranks + 1, _LANES)
  padded = jnp.pad(
    log_q,
    ((0, 0), (0, 1), (0, width - num_ranks)),
    constant_values=DEAD,
  ).reshape(batch, (depth + 1) * width)
  slots = _round_up(1 + budget, 2 * _LANES)
  out = jax.ShapeDtypeStruct((batch, slots), jnp.int32)
  smem = plgpu.SMEM((slots,), jnp.int32)
  frontier = plgpu.SMEM((_round_up(budget, _LANES),), jnp.int32)
  nodes = 'parents places depths scores next_rank hi lo used'.split()
  return plgpu.kernel(
    functools.partial(
      _grow_kernel, width=width, num_ranks=num_ranks, budget=budget
    ),
    out_type=(out,) * 4 + (jax.ShapeDtypeStruct((batch, 1), jnp.int32),),
    scratch_types=dict(
      log_q=plgpu.SMEM(((depth + 1) * width,), jnp.int32),
      node=dict.fromkeys(nodes, smem),
      child=dict.fromkeys(('scores', 'hi', 'lo'), frontier),
    ),
    grid=(batch,),
    grid_names=('row',),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    interpret=interpret,
    kernel_name='tree_build_grow',
  )(padded)


def _append_rank(hi, lo, used, rank, k):
  """Appends a rank to a path's number of `used` bits; see `_HI_BITS`.

  `lo` holds code bits only, k = floor(log2(rank + 1)); returns (hi, lo).
  """
  code = (((1 << k) - 1) << (k + 1)) | (rank + 1 - (1 << k))
  shift = _HI_BITS + _LO_BITS - used - (2 * k + 1)
  in_hi = code << jnp.maximum(shift - _LO_BITS, 0)
  carry = code >> jnp.minimum(jnp.maximum(_LO_BITS - shift, 0), 31)
  low = (code << jnp.minimum(shift, 31)) & ((1 << _LO_BITS) - 1)
  fits = shift >= _LO_BITS
  return hi | jnp.where(fits, in_hi, carry), lo | jnp.where(fits, 0, low)


def _grow_kernel(
  log_q_ref, parent_out, place_out, depth_out, score_out, count_out, *, log_q,
  node, child, width, num_ranks, budget,
):  # fmt: skip
  """Pops the best prefixes of one tree, node by node.

  `node` are the arrays of the tree's nodes; `child` those of the frontier, the
  next child of each node, which has rank `node['next_rank']`.
  """
  row = lax.axis_index('row')
  slots = child['scores'].shape[0]
  _copy_row(log_q_ref, row, log_q)
  iota = lax.iota(jnp.int32, parent_out.shape[1])
  for name, value in (('parents', -1), ('places', 0), ('depths', 0)):
    node[name][...] = jnp.where(iota < 0, 0, value)
  node['scores'][...] = jnp.where(iota == 0, 0, DEAD)
  iota = lax.iota(jnp.int32, slots)
  child['scores'][...] = jnp.where(iota < 0, 0, DEAD)
  for name in ('next_rank', 'hi', 'lo', 'used'):
    node[name][0] = jnp.int32(0)
  child['scores'][0] = log_q[0]
  child['hi'][0] = jnp.int32(0)
  child['lo'][0] = jnp.int32(1)  # depth 1, one bit 0 for rank 0

  def untie(best):
    """The slot of the lexicographically first of several at `best`."""
    left = child['scores'][...] == best
    for word in ('hi', 'lo'):
      x = child[word][...]
      left &= x == jnp.min(jnp.where(left, x, _HIGHEST))
    return jnp.sum(jnp.where(left, iota, 0))

  def pop(state):
    n, best = state
    tied = child['scores'][...] == best
    total = jnp.sum(jnp.where(tied, iota + _TIE, 0))
    p = lax.cond(
      total >= 2 * _TIE, lambda: untie(best), lambda: total - _TIE
    )
    rank, depth = node['next_rank'][p], node['depths'][p]
    hi, lo = child['hi'][p], child['lo'][p]
    used = node['used'][p]
    above = node['scores'][p]
    next_step = log_q[depth * width + rank + 1]
    child_step = log_q[(depth + 1) * width]
    next_hi, next_lo = _append_rank(
      node['hi'][p], node['lo'][p] >> _DEPTH_BITS, used, rank + 1,
      31 - lax.clz(rank + 2),
    )  # fmt: skip
    node['parents'][n] = p
    node['places'][n] = depth * num_ranks + rank
    node['depths'][n] = depth + 1
    node['scores'][n] = best
    node['next_rank'][n] = jnp.int32(0)
    node['hi'][n], node['lo'][n] = hi, lo
    node['used'][n] = used + 2 * (31 - lax.clz(rank + 1)) + 1
    # The last node may have no slot, and takes another's: nobody looks again.
    slot = jnp.minimum(n, slots - 1)
    child['scores'][slot] = jnp.where(child_step == DEAD, DEAD, best + child_step)
    child['hi'][slot], child['lo'][slot] = hi, lo + 1
    child['scores'][p] = jnp.where(next_step == DEAD, DEAD, above + next_step)
    child['hi'][p] = next_hi
    child['lo'][p] = (next_lo << _DEPTH_BITS) | (depth + 1)
    node['next_rank'][p] = rank + 1
    return n + 1, jnp.max(child['scores'][...])

  n, _ = lax.while_loop(
    lambda state: (state[0] <= budget) & (state[1] > DEAD),
    pop,
    (jnp.int32(1), log_q[0]),
  )
  count_out[row, 0] = n
  for out, name in (
    (parent_out, 'parents'), (place_out, 'places'), (depth_out, 'depths'),
    (score_out, 'scores'),
  ):  # fmt: skip
    out[row] = node[name][...]


def _copy_row(source, row, target, start=0, size=None):
  """Copies a multiple of 128 int32 of a row, several loads in flight."""
  size = target.shape[0] if size is None else size
  block = max(b for b in (1024, 512, 256, 128) if size % b == 0)
  for first in range(0, size, 4 * block):
    last = min(first + 4 * block, size)
    at = [pl.ds(start + i, block) for i in range(first, last, block)]
    loaded = [source[row, s] for s in at]
    for s, x in zip(at, loaded, strict=True):
      target[s] = x


def _order(nodes, count, budget):
  """Sorts the nodes of `_grow_by_bands` and cuts them to 1 + budget.

  Args:
    nodes: parents, places, depths, scores, hi, lo: `[B, S]` int32, unordered.
    count: `[B, 1]`, how many of them there are.

  Returns:
    parents, places, depths, scores `[B, 1 + budget]` and num_nodes `[B, 1]`.
  """
  parents, places, depths, scores, hi, lo = nodes
  size, n = parents.shape[1], 1 + budget
  index = np.arange(size, dtype=np.int32)[None, :]
  scores = jnp.where(index < count, scores, DEAD)

  def pair(x):
    return x[:, None, :], x[:, :, None]

  (s, s_own), (h, h_own), (t, t_own) = pair(scores), pair(hi), pair(lo)
  first = (h < h_own) | ((h == h_own) & (t < t_own))
  before = (s > s_own) | ((s == s_own) & first)
  rank = jnp.sum(before, axis=2, dtype=jnp.int32)
  rank = jnp.where(index < count, rank, size)
  wanted = np.arange(n, dtype=np.int32)[None, :, None]
  at_rank = rank[:, None, :] == wanted
  order = jnp.sum(
    jnp.where(at_rank, index[:, None, :], 0), axis=2, dtype=jnp.int32
  )
  count = jnp.minimum(count, n)
  alive = wanted[:, :, 0] < count

  def take(x, other):
    return jnp.where(alive, jnp.take_along_axis(x, order, axis=1), other)

  above = take(parents, -1)
  above = jnp.where(
    above >= 0,
    jnp.take_along_axis(rank, jnp.maximum(above, 0), axis=1),
    -1,
  )
  return above, take(places, 0), take(depths, 0), take(scores, DEAD), count


def _grow_by_bands(log_q, budget, *, interpret):
  """One launch of `_bands_kernel`, then `_order`; returns as `_grow` does."""
  batch, depth, num_ranks = log_q.shape
  width = _round_up(num_ranks + _AHEAD, _LANES)
  levels = _round_up(depth + 1, _GROUPS)
  padded = jnp.pad(
    log_q,
    ((0, 0), (0, levels - depth), (0, width - num_ranks)),
    constant_values=DEAD,
  ).reshape(batch, levels * width)
  slots = _round_up(2 * (1 + budget), _LANES)
  out = jax.ShapeDtypeStruct((batch, slots), jnp.int32)
  smem = plgpu.SMEM((slots,), jnp.int32)
  names = _OUTPUTS + ('next_rank', 'saved_rank', 'children', 'used')
  *nodes, count = plgpu.kernel(
    functools.partial(
      _bands_kernel, width=width, num_ranks=num_ranks, budget=budget
    ),
    out_type=(out,) * 6 + (jax.ShapeDtypeStruct((batch, 1), jnp.int32),),
    scratch_types=dict(
      log_q=plgpu.SMEM((levels * width,), jnp.int32),
      bits_of=plgpu.SMEM((width,), jnp.int32),
      counts=plgpu.SMEM((_GROUPS * _WARPS,), jnp.int32),
      size=plgpu.SMEM((1,), jnp.int32),
      barrier=plgpu.Barrier(num_arrivals=_GROUPS),
      node=dict.fromkeys(names, smem),
    ),
    grid=(batch,),
    grid_names=('row',),
    num_threads=_GROUPS,
    thread_name='group',
    # Warps can load scalars under Lane semantics only.
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
    interpret=interpret,
    kernel_name='tree_build_bands',
  )(padded)
  return _order(nodes, count, budget)


def _bands_kernel(
  log_q_ref, *refs, log_q, bits_of, counts, size, barrier, node, width,
  num_ranks, budget,
):  # fmt: skip
  """Collects all prefixes down to some score, at least `budget` of them.

  The score is lowered in bands. In a band every known node looks for further
  children, then the new nodes do, until there are no new ones. 16 warps share
  the nodes of a round: they count their children, then each knows where to
  write its own. A band that does not fit is undone and made narrower; one that
  is a single score wide and still does not fit is settled by `_preorder`.
  """
  *outs, count_out = refs
  row, group = lax.axis_index('row'), lax.axis_index('group')
  share = log_q.shape[0] // _GROUPS
  _copy_row(log_q_ref, row, log_q, group * share, share)
  vec = 2 if width % (2 * _LANES) == 0 else 1
  layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vec)
  rank = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)

  @pl.when(group == 0)
  def _start():
    bits_of[...] = 31 - lax.clz(rank + 1)
    for name in node:
      node[name][0] = jnp.int32(-1 if name == 'parents' else 0)

  sync = functools.partial(_sync, barrier)
  sync()
  context = dict(
    log_q=log_q, bits_of=bits_of, counts=counts, node=node, width=width,
    num_ranks=num_ranks, group=group, sync=sync,
  )  # fmt: skip

  def band(state):
    known, low, step = state
    target = jnp.maximum(low, _LOWEST_SCORE + step) - step

    def more(state):
      first, end, fits = state
      return (first < end) & fits

    _, end, fits = lax.while_loop(
      more,
      lambda state: _band_round(context, target, *state[:2]),
      (jnp.int32(0), known, known > 0),
    )

    @pl.when(jnp.logical_not(fits))
    def _undo():
      @plgpu.warp_map
      def _(warp):
        def restore(i, _):
          node['next_rank'][i] = node['saved_rank'][i]

        _shared_loop(group, warp, 0, known, restore, None)

      sync()

    # Bands that grow the tree by 1.4 to 2: few, and the last one fits.
    wider = jnp.where(5 * end < 7 * known, jnp.minimum(2 * step, _WIDEST), step)
    wider = jnp.where(end > 2 * known, jnp.maximum(step >> 1, 1), wider)
    narrower = jnp.where(step == 1, 0, jnp.maximum(step >> 2, 1))
    return (
      jnp.where(fits, end, known),
      jnp.where(fits, target, low),
      jnp.where(fits, wider, narrower),
    )

  known, low, step = lax.while_loop(
    lambda state: (
      (state[0] <= budget) & (state[2] > 0) & (state[1] > _LOWEST_SCORE)
    ),
    band,
    (jnp.int32(1), jnp.int32(0), jnp.int32(reference.SCALE)),
  )

  @pl.when(group == 0)
  def _write():
    size[0] = known

    @pl.when(step == 0)
    def _settle():
      _preorder(context, low - 1, budget + 1 - known, size)

    count_out[row, 0] = size[0]
    for out, name in zip(outs, _OUTPUTS, strict=True):
      out[row] = node[name][...]


def _sync(barrier):
  """Waits for all groups of warps."""
  plgpu.barrier_arrive(barrier)
  plgpu.barrier_wait(barrier)


def _shared_loop(group, warp, first, end, body, carry):
  """Folds `body(i, carry)` over this warp's share of first..end-1."""
  workers = _GROUPS * _WARPS
  start = first + group * _WARPS + warp
  trips = jnp.maximum((end - start + workers - 1) // workers, 0)
  return lax.fori_loop(
    0, trips, lambda t, carry: body(start + t * workers, carry), carry
  )


def _band_round(context, target, first, end):
  """Gives nodes first..end-1 their children that reach `target`.

  Returns:
    (end, new end, whether the new nodes fit; if not, none is written).
  """
  log_q, node, counts = (context[k] for k in ('log_q', 'node', 'counts'))
  group, width, sync = (context[k] for k in ('group', 'width', 'sync'))

  def count(i, total):
    rank = node['next_rank'][i]
    at = node['depths'][i] * width + rank
    least = jnp.maximum(target - node['scores'][i], DEAD + 1)

    def ahead(c):
      """Of the next `_AHEAD` ranks those that do; they come first."""
      near = [log_q[at + c + u] for u in range(_AHEAD)]
      return sum(jnp.where(x >= least, 1, 0) for x in near)

    def grow(state):
      found = ahead(state[0])
      return state[0] + found, found

    found = ahead(0)
    c, _ = lax.while_loop(
      lambda state: state[1] == _AHEAD, grow, (found, found)
    )
    node['children'][i] = c
    node['saved_rank'][i] = rank
    return total + c

  @plgpu.warp_map
  def _count(warp):
    counts[group * _WARPS + warp] = _shared_loop(
      group, warp, first, end, count, jnp.int32(0)
    )

  sync()
  new_end = end
  for w in range(_GROUPS * _WARPS):
    new_end += counts[w]
  fits = new_end <= node['parents'].shape[0]

  @pl.when(fits)
  def _write():
    @plgpu.warp_map
    def _(warp):
      start = end
      for w in range(_GROUPS * _WARPS):
        start += jnp.where(w < group * _WARPS + warp, counts[w], 0)
      write = functools.partial(_write_children, context)
      _shared_loop(group, warp, first, end, write, start)

  sync()
  return end, jnp.where(fits, new_end, end), fits


def _write_children(context, i, start):
  """Writes the counted children of node i from `start` on; returns the end."""
  log_q, node = context['log_q'], context['node']
  rank, depth, used = (node[k][i] for k in ('next_rank', 'depths', 'used'))
  score, hi, lo = (node[k][i] for k in ('scores', 'hi', 'lo'))
  many = node['children'][i]
  lo = lo >> _DEPTH_BITS

  def write(c, _):
    k = context['bits_of'][rank + c]
    code_hi, code_lo = _append_rank(hi, lo, used, rank + c, k)
    values = dict(
      parents=i,
      places=depth * context['num_ranks'] + rank + c,
      depths=depth + 1,
      scores=score + log_q[depth * context['width'] + rank + c],
      hi=code_hi,
      lo=(code_lo << _DEPTH_BITS) | (depth + 1),
      used=used + 2 * k + 1,
      next_rank=jnp.int32(0),
    )
    for name, value in values.items():
      node[name][start + c] = value

  lax.fori_loop(0, many, write, None)
  node['next_rank'][i] = rank + many
  return start + many


def _preorder(context, tie, quota, size):
  """The tree anew, depth first, by one warp: for many nodes of one score.

  It keeps all nodes that score above `tie`, and of those at `tie` the first
  `quota` in lexicographic order, which is the order of the walk.
  """
  log_q, node = context['log_q'], context['node']

  def step(state):
    n, at, left = state
    rank, depth = node['next_rank'][at], node['depths'][at]
    gain = log_q[depth * context['width'] + rank]
    score = jnp.where(gain == DEAD, DEAD, node['scores'][at] + gain)
    tied = score == tie
    taken = (score > tie) | (tied & (left > 0))

    @pl.when(taken)
    def _():
      values = dict(
        parents=at,
        places=depth * context['num_ranks'] + rank,
        depths=depth + 1,
        scores=score,
        hi=jnp.int32(0),
        lo=n,
        next_rank=jnp.int32(0),
      )
      for name, value in values.items():
        node[name][n] = value
      node['next_rank'][at] = rank + 1

    return (
      n + jnp.where(taken, 1, 0),
      jnp.where(taken, n, node['parents'][at]),
      left - jnp.where(taken & tied, 1, 0),
    )

  @plgpu.warp_map
  def _(warp):
    @pl.when(warp == 0)
    def _():
      node['next_rank'][0] = jnp.int32(0)
      n, _, _ = lax.while_loop(
        lambda state: state[1] >= 0,
        step,
        (jnp.int32(1), jnp.int32(0), quota),
      )
      size[0] = n
