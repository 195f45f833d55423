"""The acceptance walk on a Hopper GPU: one launch, one block a tree."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._hopper import LANES, WARPGROUP
from pallas_kernels._padding import round_up
from pallas_kernels.tree_accept.reference import AcceptArrays

MAX_NODES = 8192  # three arrays of them in shared memory

_IN_FLIGHT = 16  # blocks loaded before the first store waits


def why_not(
  tokens: jax.Array, *others: jax.Array, max_depth: int
) -> str | None:
  """Why the kernel cannot take these; None if it can."""
  del others, max_depth
  batch, n = tokens.shape
  if batch == 0:
    return 'an empty batch'
  if n > MAX_NODES:
    return f'{n} nodes, more than {MAX_NODES}'
  return None


def tree_accept(
  tokens: jax.Array,
  parents: jax.Array,
  num_nodes: jax.Array,
  target_tokens: jax.Array,
  *,
  max_depth: int,
  interpret=None,
) -> AcceptArrays:
  """See `pallas_kernels.tree_accept.api.tree_accept`.

  Args:
    tokens, parents, target_tokens: `[B, N]` int32, N at most `MAX_NODES`.
    num_nodes: `[B]` int32.
    max_depth: static.
    interpret: `plgpu.InterpretGPUParams` to run without a GPU.
  """
  batch, n = tokens.shape
  size = round_up(n, LANES)
  smem = plgpu.SMEM((size,), jnp.int32)
  path, accepted, following = plgpu.kernel(
    functools.partial(_walk_kernel, n=n, max_depth=max_depth),
    out_type=(
      jax.ShapeDtypeStruct((batch, max_depth + 1), jnp.int32),
      jax.ShapeDtypeStruct((batch,), jnp.int32),
      jax.ShapeDtypeStruct((batch,), jnp.int32),
    ),
    scratch_types=dict(tokens=smem, parents=smem, target=smem),
    grid=(batch,),
    grid_names=('row',),
    compiler_params=WARPGROUP,
    interpret=interpret,
    kernel_name='tree_accept_walk',
  )(tokens, parents, num_nodes, target_tokens)
  return AcceptArrays(path, accepted, following)


def _walk_kernel(
  tokens_ref, parents_ref, num_nodes_ref, target_ref, path_out, accepted_out,
  next_out, *, tokens, parents, target, n, max_depth,
):  # fmt: skip
  """Walks one tree: each step looks at all nodes at once for the child."""
  row = lax.axis_index('row')
  for source, copy in (
    (parents_ref, parents), (tokens_ref, tokens), (target_ref, target)
  ):  # fmt: skip
    _copy_row(source, row, copy, n)
  index = lax.iota(jnp.int32, parents.shape[0])
  # Entries of the copies from the n-th on are never a node.
  last = jnp.minimum(num_nodes_ref[row], n)

  def step(state):
    depth, node, _ = state
    child = (parents[...] == node) & (tokens[...] == target[node])
    child &= index < last
    first = jnp.min(jnp.where(child, index, n))
    found = first < n
    return (
      depth + jnp.where(found, 1, 0), jnp.where(found, first, node), found
    )  # fmt: skip

  def store(state):
    path_out[row, state[0]] = state[1]
    return state

  start = store((jnp.int32(0), jnp.int32(0), jnp.int32(0) == 0))
  depth, node, _ = lax.while_loop(
    lambda state: state[2] & (state[0] < max_depth),
    lambda state: store(step(state)),
    start,
  )

  def repeat(i, _):
    path_out[row, i] = node

  lax.fori_loop(depth + 1, max_depth + 1, repeat, None)
  accepted_out[row] = depth
  next_out[row] = target[node]


def _copy_row(source, row, target, n):
  """Copies `source[row, :n]`; rows start anywhere, so in 128-wide blocks.

  (Wider ones would load several entries a thread at once, which rows of an odd
  length do not align for.) The last block overlaps the one before it.
  """
  if n < LANES:
    for first in range(0, n, _IN_FLIGHT):
      at = range(first, min(first + _IN_FLIGHT, n))
      loaded = [source[row, i] for i in at]
      for i, x in zip(at, loaded, strict=True):
        target[i] = x
    return
  starts = [min(i, n - LANES) for i in range(0, n, LANES)]
  for first in range(0, len(starts), _IN_FLIGHT):
    at = [pl.ds(i, LANES) for i in starts[first : first + _IN_FLIGHT]]
    loaded = [source[row, s] for s in at]
    for s, x in zip(at, loaded, strict=True):
      target[s] = x
