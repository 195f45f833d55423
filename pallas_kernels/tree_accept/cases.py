"""Inputs of the acceptance walk, for the tests and the bench.

The bench times one tree, walked to its deepest leaf.
"""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import (
  INTERPRET,
  Case,
  check_equal,
  random_generator,
)
from pallas_kernels.tree_accept import api, mosaic_gpu

MAX_DEPTH = 15
NODES = (17, 65, 257, 1025)


def _inputs(n, key):
  """A random tree around a spine that the target's tokens follow."""
  rng = random_generator(key)
  parents = np.array(
    [-1] + [rng.integers(max(0, i - 40), i) for i in range(1, n)]
  )
  spine = np.unique(np.linspace(0, n - 1, MAX_DEPTH + 1).astype(int))
  parents[spine[1:]] = spine[:-1]
  tokens, target = rng.integers(0, 163840, (2, n))
  target[spine[:-1]] = tokens[spine[1:]]
  row = functools.partial(jnp.asarray, dtype=jnp.int32)
  return row(tokens[None]), row(parents[None]), row([n]), row(target[None])


def cases() -> list[Case]:
  """All cases of the op."""
  timed = [
    _case(f'{n} nodes', functools.partial(_inputs, n), MAX_DEPTH, bytes=moved)
    for n in NODES
    for moved in [float(4 * (3 * n + 1 + MAX_DEPTH + 3))]
  ]
  return timed + small_cases()


def small_cases() -> list[Case]:
  """Trees with repeated siblings and with corrupted parents."""
  shapes = ((1, 2), (33, 4), (128, 0), (301, 6))
  return [
    _case(
      f'3 random trees of {n} nodes, depth {depth}',
      functools.partial(_random_trees, 3, n),
      depth,
    )
    for n, depth in shapes
  ] + [_case('corrupted parents', _corrupted_trees, 5)]


def _case(name, make_inputs, max_depth, **sizes):
  walk = functools.partial(api.tree_accept, max_depth=max_depth)
  reference = functools.partial(walk, implementation='reference')
  return Case(
    op='tree_accept',
    name=name,
    make_inputs=make_inputs,
    kernel=functools.partial(walk, implementation='mosaic_gpu'),
    reference=reference,
    check=functools.partial(check_equal, reference),
    interpreted=functools.partial(
      mosaic_gpu.tree_accept, max_depth=max_depth, interpret=INTERPRET
    ),
    **sizes,
  )


def _random_trees(batch, n, key):
  """Trees over few tokens, so that walks go deep and siblings repeat."""
  rng = random_generator(key)
  parents = np.full((batch, n), -1)
  for i in range(1, n):
    parents[:, i] = rng.integers(max(0, i - 6), i, batch)
  tokens, target = rng.integers(0, 3, (2, batch, n))
  num_nodes = rng.integers(1, n + 1, batch)
  num_nodes[0] = n
  return tuple(
    jnp.asarray(x, jnp.int32) for x in (tokens, parents, num_nodes, target)
  )


def _corrupted_trees(key):
  """Parents that make cycles or do not exist, and too many nodes."""
  tokens, parents, num_nodes, target = _random_trees(4, 40, key)
  tokens, target = jnp.zeros_like(tokens), jnp.zeros_like(target)
  parents = parents.at[0].set(0).at[1, 5].set(5).at[2].set(2**31 - 1)
  parents = parents.at[3, :3].set(jnp.array([2, 0, 1], jnp.int32))
  return tokens, parents, num_nodes + 7, target
