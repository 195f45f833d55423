"""The acceptance walk on a Hopper GPU: one launch, one block a tree."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._hopper import LANES, WARPGROUP, strided
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
  pairs = (parents_ref, parents), (tokens_ref, tokens), (target_ref, target)
  _copy_rows(pairs, row, n)
  layout = strided(parents.shape[0])
  index = plgpu.layout_cast(lax.iota(jnp.int32, parents.shape[0]), layout)
  # Entries of the copies from the n-th on are never a node.
  last = jnp.minimum(num_nodes_ref[row], n)

  def step(state):
    depth, node, _ = state
    above, own = (plgpu.load(x, layout=layout) for x in (parents, tokens))
    child = (above == node) & (own == target[node])
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


def _copy_rows(pairs, row, n):
  """Copies `source[row, :n]` to `target` for some pairs of the two."""
  if n >= LANES:
    for source, target in pairs:
      _copy_row(source, row, target, n)
    return

  # One loop over all pairs: unrolled, it is most of what there is to lower.
  def step(i, _):
    # Beyond the end the last entry is copied again.
    at = [jnp.minimum(i * _IN_FLIGHT + k, n - 1) for k in range(_IN_FLIGHT)]
    loaded = [[source[row, k] for k in at] for source, _ in pairs]
    for (_, target), values in zip(pairs, loaded, strict=True):
      for k, x in zip(at, values, strict=True):
        target[k] = x

  lax.fori_loop(0, pl.cdiv(n, _IN_FLIGHT), step, None)


def _copy_row(source, row, target, n):
  """Copies `source[row, :n]`, n at least 128, in 128-wide blocks.

  Rows start anywhere: wider blocks would load several entries a thread at once,
  which rows of an odd length do not align for. The last block overlaps the one
  before it.
  """
  starts = [min(i, n - LANES) for i in range(0, n, LANES)]
  for first in range(0, len(starts), _IN_FLIGHT):
    at = [pl.ds(i, LANES) for i in starts[first : first + _IN_FLIGHT]]
    loaded = [source[row, s] for s in at]
    for s, x in zip(at, loaded, strict=True):
      target[s] = x
