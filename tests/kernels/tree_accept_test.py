"""tree_accept against a plain Python walk."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tree_accept import api

accept = jax.jit(api.tree_accept, static_argnames=('max_depth',))


@pytest.fixture(autouse=True, scope='module')
def strict():
  with (
    jax.numpy_dtype_promotion('strict'),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


def walk(tokens, parents, num_nodes, target, max_depth):
  """The walk of one row: (path, num_accepted, next_token)."""
  path = [0]
  while len(path) <= max_depth:
    node = path[-1]
    children = [
      j
      for j in range(min(num_nodes, len(parents)))
      if parents[j] == node and tokens[j] == target[node]
    ]
    if not children:
      break
    path.append(children[0])
  accepted = len(path) - 1
  path += [path[-1]] * (max_depth - accepted)
  return path, accepted, target[path[-1]]


def check(arrays, max_depth):
  got = accept(*arrays, max_depth=max_depth)
  for b, row in enumerate(zip(*arrays, strict=True)):
    path, accepted, token = walk(*row, max_depth)
    np.testing.assert_array_equal(got.path[b], path)
    assert got.num_accepted[b] == accepted and got.next_token[b] == token
  return got


def random_trees(seed, batch=10, n=13, vocab=2):
  """Random trees with duplicate siblings; few tokens make long walks."""
  rng = np.random.default_rng(seed)
  parents = np.stack(
    [[-1, *(rng.integers(max(0, i - 4), i) for i in range(1, n))]] * batch
  ).astype(np.int32)
  tokens = rng.integers(0, vocab, (batch, n), dtype=np.int32)
  target = rng.integers(0, vocab, (batch, n), dtype=np.int32)
  num_nodes = rng.integers(1, n + 1, batch, dtype=np.int32)
  return [tokens, parents, num_nodes, target]


def test_two_hundred_random_trees():
  lengths = set()
  for seed in range(20):
    got = check(random_trees(seed), 5)
    lengths.update(np.asarray(got.num_accepted).tolist())
  assert lengths == {0, 1, 2, 3, 4, 5}


@settings(derandomize=True, database=None, deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_corrupted_parents_terminate(seed):
  arrays = random_trees(seed)
  rng = np.random.default_rng(seed)
  parents = rng.integers(-3, 16, (10, 13), dtype=np.int32)
  parents[0] = 2**31 - 1
  parents[1] = -(2**31)
  parents[2, [1, 2]] = [2, 1]
  arrays[1] = parents
  check(arrays, 5)


def test_literal_trees():
  #        0:7 -> 1:5, 2:6;  1 -> 3:8;  2 -> 4:9, 5:8;  5 -> 6:4
  tokens = np.array([[7, 5, 6, 8, 9, 8, 4]] * 4, np.int32)
  parents = np.array([[-1, 0, 0, 1, 2, 2, 5]] * 4, np.int32)
  target = np.array(
    [
      [1, 0, 0, 0, 0, 0, 0],  # nothing accepted
      [6, 8, 1, 0, 0, 0, 0],  # node 2, then no child
      [6, 9, 8, 0, 0, 4, 3],  # 2, 5, 6: the longest path
      [6, 9, 8, 0, 0, 4, 3],  # the same, node 6 beyond num_nodes
    ],
    np.int32,
  )
  num_nodes = np.array([7, 7, 7, 6], np.int32)
  got = check([tokens, parents, num_nodes, target], 3)
  np.testing.assert_array_equal(
    got.path, [[0, 0, 0, 0], [0, 2, 2, 2], [0, 2, 5, 6], [0, 2, 5, 5]]
  )
  np.testing.assert_array_equal(got.num_accepted, [0, 1, 3, 2])
  np.testing.assert_array_equal(got.next_token, [1, 1, 3, 4])
  # The bound cuts the walk, the next token is that of the last node reached.
  got = check([tokens, parents, num_nodes, target], 2)
  np.testing.assert_array_equal(got.next_token, [1, 1, 4, 4])


def test_lowest_index_wins_among_duplicates():
  tokens = np.array([[0, 3, 3, 4]], np.int32)
  parents = np.array([[-1, 0, 0, 2]], np.int32)
  target = np.array([[3, 4, 4, 1]], np.int32)
  got = check([tokens, parents, np.array([4], np.int32), target], 3)
  np.testing.assert_array_equal(got.path, [[0, 1, 1, 1]])


def test_root_only_and_depth_zero():
  one = np.array([[4], [5]], np.int32)
  arrays = [one, np.full((2, 1), -1, np.int32), np.ones(2, np.int32), one]
  got = check(arrays, 3)
  np.testing.assert_array_equal(got.num_accepted, [0, 0])
  np.testing.assert_array_equal(got.next_token, [4, 5])
  assert check(random_trees(0), 0).path.shape == (10, 1)


def test_larger_tree_never_accepts_less():
  tokens, parents, num_nodes, target = random_trees(4, batch=40)
  before = np.zeros(40, np.int32)
  for n in range(1, 14):
    sizes = np.full_like(num_nodes, n)
    got = accept(tokens, parents, sizes, target, max_depth=12)
    # Without duplicates a superset of nodes can only lengthen the walk.
    unique = [
      len({(p, t) for p, t in zip(parents[b, :n], tokens[b, :n], strict=True)})
      == n
      for b in range(40)
    ]
    assert (np.asarray(got.num_accepted) >= before)[unique].all()
    before = np.asarray(got.num_accepted)


@pytest.mark.parametrize(
  'name,change',
  [
    ('tokens', dict(tokens=np.zeros((2, 3), np.float32))),
    ('tokens', dict(tokens=np.zeros((2, 0), np.int32))),
    ('parents', dict(parents=np.zeros((2, 4), np.int32))),
    ('num_nodes', dict(num_nodes=np.zeros((1,), np.int32))),
    ('target_tokens', dict(target_tokens=np.zeros((3,), np.int32))),
    ('max_depth', dict(max_depth=-1)),
    ("implementation.*'reference'", dict(implementation='fast')),
  ],
)
def test_invalid_arguments_name_the_argument(name, change):
  arguments = dict(
    tokens=np.zeros((2, 3), np.int32),
    parents=np.zeros((2, 3), np.int32),
    num_nodes=np.ones((2,), np.int32),
    target_tokens=np.zeros((2, 3), np.int32),
    max_depth=2,
  )
  with pytest.raises(ValueError, match=f'^{name}'):
    api.tree_accept(**(arguments | change))
