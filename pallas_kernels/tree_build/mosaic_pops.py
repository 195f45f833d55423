"""Trees on a Hopper GPU, node by node: for small budgets.

Each tree has one block of threads, which pops one node after the other. The
frontier holds one entry a node, the next child of that node, so a pop is a
maximum over `budget` entries, and changes two of them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _bits
from pallas_kernels._float_order import HIGHEST
from pallas_kernels._hopper import LANES, WARPGROUP, strided
from pallas_kernels._padding import round_up
from pallas_kernels.tree_build.mosaic_common import (
  DEPTH_BITS,
  append_rank,
  copy_row,
)
from pallas_kernels.tree_build.reference import DEAD

_TIE = 1 << 16  # above every slot; a sum that has it twice means a tie


def grow(log_q, budget, *, interpret):
  """One launch of `_grow_kernel`.

  Returns:
    parents, places (depth - 1) K + rank, depths, fixed-point scores: `[B, S]`
    int32, S at least 1 + budget; ancestors `[B, 1 + budget, W]` uint32;
    num_nodes `[B, 1]`, root included.
  """
  batch, depth, num_ranks = log_q.shape
  # A dead entry after every row, and a dead row, save the checks of bounds.
  width = round_up(num_ranks + 1, LANES)
  padded = jnp.pad(
    log_q,
    ((0, 0), (0, 1), (0, width - num_ranks)),
    constant_values=DEAD,
  ).reshape(batch, (depth + 1) * width)
  slots = round_up(1 + budget, 2 * LANES)
  out = jax.ShapeDtypeStruct((batch, slots), jnp.int32)
  smem = plgpu.SMEM((slots,), jnp.int32)
  frontier = plgpu.SMEM((round_up(budget, LANES),), jnp.int32)
  words = _bits.num_words(1 + budget)
  nodes = 'parents places depths scores next_rank hi lo used'.split()
  *found, ancestors, num_nodes = plgpu.kernel(
    functools.partial(
      _grow_kernel, width=width, num_ranks=num_ranks, budget=budget
    ),
    out_type=(
      *(out,) * 4,
      jax.ShapeDtypeStruct((batch, words, slots), jnp.int32),
      jax.ShapeDtypeStruct((batch, 1), jnp.int32),
    ),
    scratch_types=dict(
      log_q=plgpu.SMEM(((depth + 1) * width,), jnp.int32),
      ancestors=[smem] * words,
      node=dict.fromkeys(nodes, smem),
      child=dict.fromkeys(('hi', 'lo'), frontier),
    ),
    grid=(batch,),
    grid_names=('row',),
    compiler_params=WARPGROUP,
    interpret=interpret,
    kernel_name='tree_build_grow',
  )(padded)
  ancestors = lax.bitcast_convert_type(ancestors, jnp.uint32)
  ancestors = jnp.swapaxes(ancestors[:, :, : 1 + budget], 1, 2)
  return *found, ancestors, num_nodes


def _grow_kernel(
  log_q_ref, parent_out, place_out, depth_out, score_out, ancestor_out,
  count_out, *, log_q, ancestors, node, child, width, num_ranks, budget,
):  # fmt: skip
  """Pops the best prefixes of one tree, node by node.

  `node` are the arrays of the tree's nodes; `child` those of the frontier, the
  next child of each node, which has rank `node['next_rank']`; its scores stay
  in registers.

  All warps run the same scalar code, and only the reductions synchronise them:
  the sum comes between the stores of a pop and the loads of the next one, the
  maximum between the loads and the stores of one pop.
  """
  row = lax.axis_index('row')
  slots = child['hi'].shape[0]
  copy_row(log_q_ref, row, log_q)
  size = parent_out.shape[1]
  iota = plgpu.layout_cast(lax.iota(jnp.int32, size), strided(size))
  for name, value in (('parents', -1), ('places', 0), ('depths', 0)):
    node[name][...] = jnp.where(iota < 0, 0, value)
  node['scores'][...] = jnp.where(iota == 0, 0, DEAD)
  for word, row_bits in enumerate(ancestors):
    row_bits[...] = jnp.where(iota == 0, 1 if word == 0 else 0, 0)
  iota = plgpu.layout_cast(lax.iota(jnp.int32, slots), strided(slots))
  for name in ('next_rank', 'hi', 'lo', 'used'):
    node[name][0] = jnp.int32(0)
  child['hi'][0] = jnp.int32(0)
  child['lo'][0] = jnp.int32(1)  # depth 1, one bit 0 for rank 0

  def untie(left):
    """The slot of the lexicographically first of those `left`."""
    for word in ('hi', 'lo'):
      x = plgpu.load(child[word], layout=strided(slots))
      left &= x == jnp.min(jnp.where(left, x, HIGHEST))
    return jnp.sum(jnp.where(left, iota, 0))

  def pop(state):
    n, best, scores = state
    tied = scores == best
    total = jnp.sum(jnp.where(tied, iota + _TIE, 0))
    p = lax.cond(total >= 2 * _TIE, lambda: untie(tied), lambda: total - _TIE)
    rank, depth = node['next_rank'][p], node['depths'][p]
    hi, lo = child['hi'][p], child['lo'][p]
    used = node['used'][p]
    above = node['scores'][p]
    next_step = log_q[depth * width + rank + 1]
    child_step = log_q[(depth + 1) * width]
    next_hi, next_lo = append_rank(
      node['hi'][p], node['lo'][p] >> DEPTH_BITS, used, rank + 1,
      31 - lax.clz(rank + 2),
    )  # fmt: skip
    sets = [row_bits[p] for row_bits in ancestors]
    # The last node may have no slot; it takes another's, read no more.
    slot = jnp.minimum(n, slots - 1)
    below = jnp.where(child_step == DEAD, DEAD, best + child_step)
    beside = jnp.where(next_step == DEAD, DEAD, above + next_step)
    scores = jnp.where(iota == slot, below, scores)
    scores = jnp.where(iota == p, beside, scores)
    next_best = jnp.max(scores)  # loads above, stores below
    for word, row_bits in enumerate(ancestors):
      own = jnp.where(n >> 5 == word, 1 << (n & 31), 0)
      row_bits[n] = sets[word] | own
    node['parents'][n] = p
    node['places'][n] = depth * num_ranks + rank
    node['depths'][n] = depth + 1
    node['scores'][n] = best
    node['next_rank'][n] = jnp.int32(0)
    node['hi'][n], node['lo'][n] = hi, lo
    node['used'][n] = used + 2 * (31 - lax.clz(rank + 1)) + 1
    child['hi'][slot], child['lo'][slot] = hi, lo + 1
    child['hi'][p] = next_hi
    child['lo'][p] = (next_lo << DEPTH_BITS) | (depth + 1)
    node['next_rank'][p] = rank + 1
    return n + 1, next_best, scores

  n, _, _ = lax.while_loop(
    lambda state: (state[0] <= budget) & (state[1] > DEAD),
    pop,
    (jnp.int32(1), log_q[0], jnp.where(iota == 0, log_q[0], DEAD)),
  )
  count_out[row, 0] = n
  for out, name in (
    (parent_out, 'parents'), (place_out, 'places'), (depth_out, 'depths'),
    (score_out, 'scores'),
  ):  # fmt: skip
    out[row] = node[name][...]
  for word, row_bits in enumerate(ancestors):
    ancestor_out[row, word] = row_bits[...]
