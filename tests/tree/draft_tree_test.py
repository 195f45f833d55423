"""The pytree's own checks and its drawing."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from kdtree_jax.tree import (
  NO_PARENT,
  DraftTree,
  check_invariants,
  format_tree,
  root_only,
)


def small_tree():
  """Root 9 with children 4 and 5, and 6 below 4; one slot of padding."""
  return DraftTree(
    tokens=jnp.array([[9, 4, 5, 6, 0]], jnp.int32),
    parents=jnp.array([[-1, 0, 0, 1, -1]], jnp.int32),
    depths=jnp.array([[0, 1, 1, 2, 0]], jnp.int32),
    scores=jnp.array([[0.0, -0.5, -1.0, -1.5, -jnp.inf]]),
    num_nodes=jnp.array([4], jnp.int32),
    ancestors=jnp.array([[[1], [3], [5], [11], [0]]], jnp.uint32),
  )


def test_accepts_good_trees():
  check_invariants(small_tree())
  check_invariants(root_only(jnp.array([3, 7], jnp.int32)))


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  (
    ('num_nodes', [6], 'num_nodes'),
    ('parents', [[0, 0, 0, 1, -1]], 'the root has a parent'),
    ('parents', [[-1, 0, 2, 1, -1]], 'node 2 has parent 2'),
    ('parents', [[-1, 0, 0, 1, 0]], 'padding has a parent'),
    ('depths', [[0, 1, 2, 2, 0]], 'node 2 is not one deeper'),
    ('depths', [[0, 1, 1, 2, 1]], 'padding has a depth'),
    ('tokens', [[9, 4, 4, 6, 0]], 'node 2 repeats a sibling'),
    ('scores', [[0, -0.5, -1, -0.25, 0]], 'node 3 outscores its parent'),
    ('ancestors', [[[1], [3], [7], [11], [0]]], 'ancestor bits'),
    ('ancestors', [[[1], [3], [5], [11], [1]]], 'ancestor bits'),
  ),
)
def test_names_what_is_wrong(field, value, message):
  tree = small_tree()
  wrong = jnp.asarray(value, getattr(tree, field).dtype)
  with pytest.raises(ValueError, match=message):
    check_invariants(dataclasses.replace(tree, **{field: wrong}))


def test_drawing():
  assert format_tree([9, 4, 5, 6], [NO_PARENT, 0, 0, 1], [0, 1]) == '\n'.join(
    ['9 *', '|- 4 *', '|  `- 6', '`- 5']
  )


def test_drawing_with_probabilities():
  scores = [math.log(p) for p in (1.0, 0.5, 0.25, 0.4)]
  drawn = format_tree(
    [9, 4, 5, 6],
    [NO_PARENT, 0, 0, 1],
    [0, 1, 3],
    label=lambda token: repr(chr(96 + token)),
    scores=scores,
  )
  assert drawn.splitlines() == [
    "'i' *",
    "|- 'd' 50%, path 50% *",
    "|  `- 'f' 80%, path 40% *",
    "`- 'e' 25%, path 25%",
  ]
