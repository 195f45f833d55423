"""The heap against a search through all prefixes, and the walk."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_jax.reference import build_tree, chain_tree, make_tree, walk


def all_prefixes(log_probs: np.ndarray) -> list[tuple]:
  """Lists `(-score, rank path, token path)` of every prefix, best first."""
  rows = [
    sorted((-value, token) for token, value in enumerate(row))
    for row in np.minimum(log_probs, 0).tolist()
  ]
  prefixes = []
  for depth in range(1, len(rows) + 1):
    for path in itertools.product(range(len(rows[0])), repeat=depth):
      steps = [rows[level][rank] for level, rank in enumerate(path)]
      cost = 0
      for value, _ in steps:
        cost += value
      if cost != np.inf:
        tokens = tuple(token for _, token in steps)
        prefixes.append((cost, path, tokens))
  return sorted(prefixes)


def token_paths(tree) -> list[tuple[int, ...]]:
  """The tokens from the root to every node, without the root's own."""
  paths = [()]
  for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
    paths.append((*paths[parent], int(token)))
  return paths[1:]


def check(log_probs: np.ndarray, budget: int) -> None:
  tree = build_tree(log_probs, budget, root_token=77)
  best = all_prefixes(log_probs)[:budget]
  assert token_paths(tree) == [tokens for _, _, tokens in best]
  assert tree.scores.tolist() == [0, *(-cost for cost, _, _ in best)]
  assert tree.tokens[0] == 77 and tree.parents[0] == -1
  assert (tree.parents < np.arange(len(tree.parents))).all()
  assert (tree.visibility.sum(axis=-1) == tree.depths + 1).all()


def tables(elements, dtype):
  """Tables `[D, V]` small enough for every prefix to be listed."""
  return st.tuples(st.integers(1, 3), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(
      st.lists(elements, min_size=shape[1], max_size=shape[1]),
      min_size=shape[0],
      max_size=shape[0],
    ).map(lambda rows: np.array(rows, dtype))
  )


SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)


@SETTINGS
@given(tables(st.integers(-4, 0), np.int64), st.integers(0, 40))
def test_integers_with_ties(log_probs, budget):
  tree = build_tree(log_probs, budget)
  assert tree.scores.dtype == np.int64
  check(log_probs, budget)


@SETTINGS
@given(tables(st.integers(-(2**50), 1), np.int64), st.integers(0, 40))
def test_large_integers_are_exact(log_probs, budget):
  check(log_probs, budget)


@SETTINGS
@given(
  tables(st.sampled_from([0.0, -0.5, -1.25, -3.0, -np.inf]), np.float64),
  st.integers(0, 40),
)
def test_floats_with_impossible_tokens(log_probs, budget):
  check(log_probs, budget)


@SETTINGS
@given(tables(st.integers(-3, 0), np.int64), st.integers(1, 30))
def test_a_smaller_budget_gives_a_prefix(log_probs, budget):
  larger = build_tree(log_probs, budget)
  smaller = build_tree(log_probs, budget - 1)
  count = len(smaller.tokens)
  for field in ('tokens', 'parents', 'depths', 'scores'):
    np.testing.assert_array_equal(
      getattr(smaller, field), getattr(larger, field)[:count]
    )
  np.testing.assert_array_equal(
    smaller.visibility, larger.visibility[:count, :count]
  )


def test_random_floats_agree_with_the_listing():
  rng = np.random.default_rng(0)
  for budget in (1, 7, 30):
    logits = rng.standard_normal((3, 6))
    check(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), budget)


def test_positive_log_probs_count_as_zero():
  tree = build_tree(np.array([[1e-9, -2.0], [1e-9, -1.0]]), 2)
  np.testing.assert_array_equal(tree.parents, [-1, 0, 1])
  np.testing.assert_array_equal(tree.scores, [0, 0, 0])


@pytest.mark.parametrize('shape, budget', [((3, 4), 0), ((0, 4), 5)])
def test_root_only(shape, budget):
  tree = build_tree(np.zeros(shape), budget)
  assert tree.tokens.tolist() == [-1]
  assert walk(tree, [5]) == ([0], 5)


def test_all_prefixes_and_no_more():
  assert len(build_tree(np.zeros((2, 3)), 1000).tokens) == 1 + 3 + 9


def test_the_lowest_integer_has_no_negation_but_a_rank():
  lowest = np.iinfo(np.int64).min
  tree = build_tree(np.array([[lowest, -1, lowest]]), 2)
  assert tree.tokens.tolist() == [-1, 1, 0]


def test_nan_is_refused():
  with pytest.raises(ValueError, match='NaN'):
    build_tree(np.array([[0.0, np.nan]]), 1)


def test_chain():
  tree = chain_tree(np.array([[-3, -1], [-2, -2], [-9, -4]]), root_token=6)
  assert tree.tokens.tolist() == [6, 1, 0, 1]
  assert tree.parents.tolist() == [-1, 0, 1, 2]
  assert tree.depths.tolist() == [0, 1, 2, 3]
  assert tree.scores.tolist() == [0, -1, -3, -7]
  np.testing.assert_array_equal(tree.visibility, np.tri(4, dtype=bool))


def test_walk_takes_the_first_of_two_equal_siblings():
  # Both children of the root hold 5; only the second has a child 8.
  tree = make_tree([1, 5, 5, 8], [-1, 0, 0, 2], [0, -1, -1, -2])
  assert walk(tree, [5, 8, 8, 3]) == ([0, 1], 8)


def test_walk_follows_branches_and_stops():
  tree = make_tree([1, 4, 5, 6, 7], [-1, 0, 0, 2, 2], [0, -1, -2, -3, -4])
  assert walk(tree, [5, 0, 7, 0, 9]) == ([0, 2, 4], 9)
  assert walk(tree, [8, 0, 7, 0, 9]) == ([0], 8)
