"""Trees on a Hopper GPU, by all nodes down to a score at once.

For larger budgets, popping node by node takes too long. Here 16 warps collect
all prefixes down to a score that falls until there are enough, in no order. XLA
then ranks each of them by the number of those before it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._hopper import LANE, LANES, SHARED_BYTES, WARPS
from pallas_kernels._padding import round_up
from pallas_kernels.tree_build import reference
from pallas_kernels.tree_build.mosaic_common import (
  DEPTH_BITS,
  append_rank,
  copy_row,
)
from pallas_kernels.tree_build.mosaic_select import inverse
from pallas_kernels.tree_build.reference import DEAD

_GROUPS = 4  # warpgroups of the kernel
_AHEAD = 4  # children looked for at once
# What nodes may take of a block's shared memory; counts and barriers want some.
_NODE_BYTES = SHARED_BYTES - 7 * 1024
_WIDEST = 1 << 28  # fixed-point width of a band
_LOWEST_SCORE = DEAD + 1
_OUTPUTS = ('parents', 'places', 'depths', 'scores', 'hi', 'lo')


def grow(log_q, budget, *, interpret):
  """One launch of `_bands_kernel`, then `_order`, whose result it returns."""
  batch, depth, num_ranks = log_q.shape
  width = round_up(num_ranks + _AHEAD, LANES)
  levels = round_up(depth + 1, _GROUPS)
  padded = jnp.pad(
    log_q,
    ((0, 0), (0, levels - depth), (0, width - num_ranks)),
    constant_values=DEAD,
  ).reshape(batch, levels * width)
  names = _OUTPUTS + ('next_rank', 'saved_rank', 'children', 'used')
  # Room for twice the tree, so that the last band may overshoot; less where
  # many depths leave less. (At most 147 of 227 KB are taken before.)
  room = (_NODE_BYTES // 4 - (levels + 1) * width) // len(names)
  slots = min(round_up(2 * (1 + budget), LANES), room // LANES * LANES)
  out = jax.ShapeDtypeStruct((batch, slots), jnp.int32)
  smem = plgpu.SMEM((slots,), jnp.int32)
  *nodes, count = plgpu.kernel(
    functools.partial(
      _bands_kernel, width=width, num_ranks=num_ranks, budget=budget
    ),
    out_type=(out,) * 6 + (jax.ShapeDtypeStruct((batch, 1), jnp.int32),),
    scratch_types=dict(
      log_q=plgpu.SMEM((levels * width,), jnp.int32),
      bits_of=plgpu.SMEM((width,), jnp.int32),
      counts=plgpu.SMEM((_GROUPS * WARPS,), jnp.int32),
      size=plgpu.SMEM((1,), jnp.int32),
      barrier=plgpu.Barrier(num_arrivals=_GROUPS),
      node=dict.fromkeys(names, smem),
    ),
    grid=(batch,),
    grid_names=('row',),
    num_threads=_GROUPS,
    thread_name='group',
    compiler_params=LANE,
    interpret=interpret,
    kernel_name='tree_build_bands',
  )(padded)
  return _order(nodes, count, budget)


def _order(nodes, count, budget):
  """Sorts the nodes of `grow` and cuts them to 1 + budget.

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
  order = inverse(rank, n, index)
  count = jnp.minimum(count, n)
  alive = np.arange(n, dtype=np.int32)[None, :] < count

  def take(x, other):
    return jnp.where(alive, jnp.take_along_axis(x, order, axis=1), other)

  above = take(parents, -1)
  above = jnp.where(
    above >= 0,
    jnp.take_along_axis(rank, jnp.maximum(above, 0), axis=1),
    -1,
  )
  return above, take(places, 0), take(depths, 0), take(scores, DEAD), count


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
  copy_row(log_q_ref, row, log_q, group * share, share)
  vec = 2 if width % (2 * LANES) == 0 else 1
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
  workers = _GROUPS * WARPS
  start = first + group * WARPS + warp
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
      """How many of the next `_AHEAD` ranks reach it; they come first."""
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
    counts[group * WARPS + warp] = _shared_loop(
      group, warp, first, end, count, jnp.int32(0)
    )

  sync()
  new_end = end
  for w in range(_GROUPS * WARPS):
    new_end += counts[w]
  fits = new_end <= node['parents'].shape[0]

  @pl.when(fits)
  def _write():
    @plgpu.warp_map
    def _(warp):
      start = end
      for w in range(_GROUPS * WARPS):
        start += jnp.where(w < group * WARPS + warp, counts[w], 0)
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
  lo = lo >> DEPTH_BITS

  def write(c, _):
    k = context['bits_of'][rank + c]
    code_hi, code_lo = append_rank(hi, lo, used, rank + c, k)
    values = dict(
      parents=i,
      places=depth * context['num_ranks'] + rank + c,
      depths=depth + 1,
      scores=score + log_q[depth * context['width'] + rank + c],
      hi=code_hi,
      lo=(code_lo << DEPTH_BITS) | (depth + 1),
      used=used + 2 * k + 1,
      next_rank=jnp.int32(0),
    )
    for name, value in values.items():
      node[name][start + c] = value

  lax.fori_loop(0, many, write, None)
  node['next_rank'][i] = rank + many
  return start + many


def _preorder(context, tie, quota, size):
  """Builds the tree again, depth first, in one warp.

  It settles which nodes count where many have one score.

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
