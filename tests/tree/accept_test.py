"""The walk and where a stop token cuts it."""

import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import reference
from kdtree_jax.tree import accept
from tests.tree.draft_tree_test import small_tree


def accepted(target_tokens, stop_ids=(-1,)):
  result = accept(
    small_tree(),
    jnp.asarray([target_tokens], jnp.int32),
    jnp.asarray(stop_ids, jnp.int32),
    max_depth=2,
  )
  length = int(result.acceptance_length[0])
  return (
    result.path[0, :length].tolist(),
    result.tokens[0, :length].tolist(),
    bool(result.stopped[0]),
  )


@pytest.mark.parametrize(
  ('target', 'path', 'tokens'),
  (
    ([7, 0, 0, 0, 0], [0], [7]),
    ([5, 0, 8, 0, 0], [0, 2], [5, 8]),
    ([4, 6, 0, 1, 0], [0, 1, 3], [4, 6, 1]),
    ([4, 5, 0, 1, 0], [0, 1], [4, 5]),
    # Token 0 is padding's, and no child: the walk must not enter it.
    ([0, 0, 0, 0, 0], [0], [0]),
  ),
)
def test_walk(target, path, tokens):
  assert accepted(target) == (path, tokens, False)


@pytest.mark.parametrize(
  ('stops', 'path'),
  (([9], [0]), ([4], [0, 1]), ([6], [0, 1, 3]), ([6, 4], [0, 1])),
)
def test_stop_ends_the_walk(stops, path):
  found, _, stopped = accepted([4, 6, 0, 1, 0], stops)
  assert (found, stopped) == (path, True)


def test_stop_off_the_path_or_not_committed_yet():
  # 5 is a rejected sibling; 1 is the next root, chosen but not committed.
  assert accepted([4, 6, 0, 1, 0], [5, 1]) == ([0, 1, 3], [4, 6, 1], False)


def test_random_trees_against_the_reference_walk():
  rng = np.random.default_rng(0)
  n, batch = 12, 40
  parents = np.full((batch, n), -1, np.int32)
  tokens = rng.integers(0, 3, (batch, n)).astype(np.int32)
  depths = np.zeros((batch, n), np.int32)
  count = rng.integers(1, n + 1, batch).astype(np.int32)
  for b in range(batch):
    for i in range(1, count[b]):
      parents[b, i] = rng.integers(0, i)
      depths[b, i] = depths[b, parents[b, i]] + 1
  target = rng.integers(0, 3, (batch, n)).astype(np.int32)
  tree = small_tree().replace(
    tokens=jnp.asarray(tokens),
    parents=jnp.asarray(parents),
    depths=jnp.asarray(depths),
    scores=jnp.zeros((batch, n)),
    num_nodes=jnp.asarray(count),
    ancestors=jnp.zeros((batch, n, 1), jnp.uint32),
  )
  result = accept(
    tree, jnp.asarray(target), jnp.array([-1], jnp.int32), max_depth=n - 1
  )
  for b in range(batch):
    k = count[b]
    made = reference.make_tree(
      tokens[b, :k].tolist(), parents[b, :k].tolist(), [0.0] * int(k)
    )
    path, token = reference.walk(made, target[b, :k].tolist())
    length = int(result.acceptance_length[b])
    assert result.path[b, :length].tolist() == list(path)
    assert int(result.tokens[b, length - 1]) == token
