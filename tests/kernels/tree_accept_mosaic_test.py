"""The Mosaic acceptance walk: interpreted, and lowered for a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.tree_accept import api, bench_cases, mosaic_gpu, reference

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def random_trees(batch, n, seed=0):
  """Trees over few tokens, so that walks go deep and siblings repeat."""
  rng = np.random.default_rng(seed)
  parents = np.full((batch, n), -1)
  for i in range(1, n):
    parents[:, i] = rng.integers(max(0, i - 6), i, batch)
  tokens, target = rng.integers(0, 3, (2, batch, n))
  num_nodes = rng.integers(1, n + 1, batch)
  num_nodes[0] = n
  return [
    jnp.asarray(x, jnp.int32) for x in (tokens, parents, num_nodes, target)
  ]


def check(trees, max_depth):
  walk = jax.jit(
    functools.partial(
      mosaic_gpu.tree_accept, max_depth=max_depth, interpret=INTERPRET
    )
  )
  got = walk(*trees)
  want = reference.tree_accept(*trees, max_depth=max_depth)
  for x, again, y in zip(got, walk(*trees), want, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(x, again)


@pytest.mark.parametrize('n, max_depth', [(1, 2), (33, 4), (128, 0), (301, 6)])
def test_walks_equal_the_reference(n, max_depth):
  check(random_trees(3, n), max_depth)


def test_corrupted_parents_end_the_walk():
  tokens, parents, num_nodes, target = random_trees(4, 40)
  tokens, target = jnp.zeros_like(tokens), jnp.zeros_like(target)
  parents = parents.at[0].set(0).at[1, 5].set(5).at[2].set(2**31 - 1)
  parents = parents.at[3, :3].set(jnp.array([2, 0, 1], jnp.int32))
  check((tokens, parents, num_nodes + 7, target), 5)


@pytest.mark.parametrize('n', bench_cases.NODES)
def test_lowers_for_hopper(n):
  device = AbstractDevice('NVIDIA H200', 132, 'gpu')
  row = jax.ShapeDtypeStruct((2, n), jnp.int32)
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=device)
  ):
    jax.jit(functools.partial(mosaic_gpu.tree_accept, max_depth=15)).trace(
      row, row, jax.ShapeDtypeStruct((2,), jnp.int32), row
    ).lower(lowering_platforms=('cuda',))


def test_named_kernel_that_cannot_run_raises():
  trees = random_trees(1, 4)
  with pytest.raises(ValueError, match='tree_accept has no mosaic_gpu'):
    api.tree_accept(*trees, max_depth=2, implementation='mosaic_gpu')
