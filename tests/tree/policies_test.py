"""What every registered policy must keep, and what sets two of them apart."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_jax import reference, registry
from kdtree_jax.tree import check_invariants, keep_top1_chain
from pallas_kernels.tree_build.reference import SCALE

POLICIES = registry.names('tree_policy')
SHAPES = ((1, 1, 1), (2, 3, 5), (3, 7, 33))
BUDGETS = (0, 1, 7, 40)
KINDS = ('normal', 'ties', 'flat', 'peaked', 'barred', 'infinite')
PROFILE = settings(max_examples=25, deadline=None, derandomize=True)


@functools.cache
def compiled(policy):
  return jax.jit(registry.get('tree_policy', policy), static_argnums=(2, 3))


def grown(policy, logits, budget):
  root = np.arange(len(logits), dtype=np.int32)
  return compiled(policy)(
    jnp.asarray(logits, jnp.float32), jnp.asarray(root), budget, None
  )


@st.composite
def drafts(draw):
  batch, depth, vocab = draw(st.sampled_from(SHAPES))
  seed = draw(st.integers(0, 2**31 - 1))
  rng = np.random.default_rng(seed)
  kind = draw(st.sampled_from(KINDS))
  logits = rng.normal(size=(batch, depth, vocab)) * 3
  if kind == 'ties':
    logits = np.round(logits)
  elif kind == 'flat':
    logits = np.zeros_like(logits)
  elif kind == 'peaked':
    logits = logits * 1e4
  elif kind == 'barred':
    logits[rng.random(logits.shape) < 0.6] = -np.inf
  elif kind == 'infinite':
    hostile = (*[np.inf] * 2, -np.inf, np.nan, *[1.5] * 12)
    logits = rng.choice(hostile, logits.shape)
  return logits


def possible(row):
  """Which tokens of a depth have a probability, `[V]` bool."""
  known = np.where(np.isnan(row), -np.inf, row)
  return known == np.inf if known.max() == np.inf else known > -np.inf


@pytest.mark.parametrize('policy', POLICIES)
@PROFILE
@given(logits=drafts(), budget=st.sampled_from(BUDGETS))
def test_invariants(policy, logits, budget):
  tree = grown(policy, logits, budget)
  assert tree.tokens.shape == (len(logits), 1 + budget)
  assert tree.ancestors.shape[2] == (1 + budget + 31) // 32
  check_invariants(tree)
  assert np.array_equal(tree.tokens[:, 0], np.arange(len(logits)))
  tokens, depths = np.asarray(tree.tokens), np.asarray(tree.depths)
  for b in range(len(logits)):
    nodes = slice(1, int(tree.num_nodes[b]))
    allowed = np.array([possible(row) for row in logits[b]])
    chosen = allowed[depths[b, nodes] - 1, tokens[b, nodes]]
    assert chosen.all(), 'an impossible token became a node'


@pytest.mark.parametrize('policy', POLICIES)
@PROFILE
@given(logits=drafts())
def test_rows_of_a_batch_are_independent(policy, logits):
  tree = grown(policy, logits, 7)
  for b in range(len(logits)):
    alone = grown(policy, logits[b : b + 1], 7)
    for name in ('tokens', 'parents', 'depths', 'scores', 'ancestors'):
      row, single = getattr(tree, name)[b], getattr(alone, name)[0]
      keep = slice(1, None) if name == 'tokens' else slice(None)
      assert np.array_equal(row[keep], single[keep]), name


@PROFILE
@given(seed=st.integers(0, 10**6), budget=st.sampled_from(BUDGETS[1:]))
def test_best_first_is_the_heap(seed, budget):
  """Scores on a grid of 1/1024: sums and ties are exact in both."""
  rng = np.random.default_rng(seed)
  logits = rng.integers(-2048, 0, (1, 7, 33)) / 1024
  tree = grown('best_first', logits, budget)
  shifted = logits[0] - logits[0].max(axis=1, keepdims=True)
  lse = np.log(np.exp(shifted.astype(np.float32)).sum(axis=1))
  fixed = np.round(shifted * SCALE).astype(np.int64)
  fixed -= np.round(lse.astype(np.float32) * SCALE).astype(np.int64)[:, None]
  heap = reference.build_tree(fixed, budget, root_token=0)
  count = int(tree.num_nodes[0])
  assert count == len(heap.tokens)
  assert tree.tokens[0, :count].tolist() == list(heap.tokens)
  assert tree.parents[0, :count].tolist() == list(heap.parents)
  assert tree.depths[0, :count].tolist() == list(heap.depths)


def test_best_first_grows_by_appending():
  logits = np.random.default_rng(0).normal(size=(2, 5, 33))
  small, large = grown('best_first', logits, 7), grown('best_first', logits, 40)
  for name in ('tokens', 'parents', 'depths', 'scores'):
    a, b = getattr(small, name), getattr(large, name)
    assert np.array_equal(a, b[:, : a.shape[1]]), name


def test_chain_is_best_first_over_one_rank():
  """A chain is the best-first tree of a drafter that ranks only its best."""
  logits = np.random.default_rng(1).normal(size=(3, 7, 33))
  best = logits.argmax(axis=2)
  only = np.full_like(logits, -np.inf)
  np.put_along_axis(only, best[:, :, None], 0.0, axis=2)
  chain, tree = grown('chain', logits, 7), grown('best_first', only, 7)
  for name in ('tokens', 'parents', 'depths', 'num_nodes', 'ancestors'):
    assert np.array_equal(getattr(chain, name), getattr(tree, name)), name


def paths(tree, b):
  """The scores of a tree's nodes, by the tokens that lead to them."""
  found = {0: ()}
  for i in range(1, int(tree.num_nodes[b])):
    found[i] = (*found[int(tree.parents[b, i])], int(tree.tokens[b, i]))
  return {path: float(tree.scores[b, i]) for i, path in found.items()}


def test_policies_agree_on_what_is_possible():
  """Depths of -inf, +inf and NaN, with room for every prefix and for few."""
  inf, nan = np.inf, np.nan
  depths = (
    [0.5, 3.0, 2.0], [inf, 0.0, 1.0], [0.0, inf, inf], [nan, 1.0, -inf],
    [nan, inf, 0.0], [-inf, -inf, nan], [nan] * 3, [-inf] * 3, [inf] * 3,
  )  # fmt: skip
  logits = np.float32([*itertools.product(depths, repeat=2)])
  chain, few = grown('chain', logits, 2), grown('best_first', logits, 2)
  seeded = jax.jit(keep_top1_chain)(few, jnp.asarray(logits))
  tree = grown('best_first', logits, 3 + 9)
  for b, rows in enumerate(logits):
    allowed = [possible(row).nonzero()[0].tolist() for row in rows]
    every = paths(tree, b)
    assert {*every} == {(), *itertools.product(*allowed[:1])} | {
      *itertools.product(*allowed)
    }
    spine = paths(chain, b)
    best = tuple(np.nan_to_num(rows, nan=-inf).argmax(axis=1).tolist())
    deepest = max(map(len, every))
    assert {*spine} == {best[:depth] for depth in range(1 + deepest)}
    for path, score in spine.items():
      assert np.isclose(score, every[path], atol=1e-5)
    assert {*spine} <= {*paths(seeded, b)} <= {*every}


@pytest.mark.parametrize('depth', (31,))
def test_chain_across_words(depth):
  logits = np.random.default_rng(2).normal(size=(1, depth, 4))
  tree = grown('chain', logits, 70)
  check_invariants(tree)
  assert int(tree.num_nodes[0]) == depth + 1
