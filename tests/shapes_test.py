"""Annotations of arrays are checked, and their letters are explained."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int32, TypeCheckError, jaxtyped

from kdtree_jax.model.cache import KVCache, commit
from kdtree_jax.tree.accept import accept
from kdtree_jax.tree.draft_tree import DraftTree, root_only
from tests import shapes

ROOT = pathlib.Path(__file__).parents[1]
NODES = jnp.zeros((2, 3), jnp.int32)
TREE = DraftTree(
  tokens=NODES,
  parents=NODES,
  depths=NODES,
  scores=NODES.astype(jnp.float32),
  num_nodes=NODES[:, 0],
  ancestors=jnp.zeros((2, 3, 1), jnp.uint32),
)
STOPS = jnp.zeros(1, jnp.int32)


@pytest.mark.parametrize(
  'tree, tokens',
  (
    (TREE, NODES[:, :2]),
    (TREE, NODES[0]),
    (TREE, NODES.astype(jnp.float32)),
    (TREE.replace(scores=NODES), NODES),
    (TREE.replace(num_nodes=STOPS), NODES),
    (TREE.replace(depths=NODES[:, :2]), NODES),
  ),
)
def test_another_shape_or_dtype_is_refused(tree, tokens):
  """Under a trace as well, and inside of pytrees."""
  with pytest.raises(TypeCheckError):
    jax.eval_shape(lambda t, n: accept(t, n, STOPS, max_depth=2), tree, tokens)


def test_axes_are_those_of_all_arguments():
  cache = KVCache(
    latent=jnp.zeros((1, 2, 8, 4)), length=jnp.zeros(2, jnp.int32)
  )
  rows, path = jnp.zeros((1, 2, 3, 5)), NODES[:, :2]
  with pytest.raises(TypeCheckError, match='rows'):
    jax.eval_shape(commit, cache, rows, path, cache.length)
  jax.eval_shape(commit, cache, rows[..., :4], path, cache.length)


def test_results_are_checked():
  """Against the arguments; a tree among them only against itself."""

  @jaxtyped(typechecker=shapes.check)
  def cut(x: Int32[Array, 'B N'], size: int) -> Int32[Array, 'B N']:
    return x[:, :size]

  @jaxtyped(typechecker=shapes.check)
  def grow(tree: DraftTree, root: DraftTree) -> DraftTree:
    return root

  cut(NODES, 3)
  grow(TREE, TREE)
  host = jax.tree.map(np.asarray, TREE)
  grow(host, host)
  with pytest.raises(TypeCheckError, match='the parameters'):
    grow(host, host.replace(scores=host.tokens))
  with pytest.raises(TypeCheckError, match='return value'):
    cut(NODES, 2)
  with pytest.raises(TypeCheckError, match='the parameters'):
    grow(TREE, root_only(STOPS))


def test_every_letter_is_in_the_glossary():
  glossary = (ROOT / 'docs/GLOSSARY.md').read_text()
  known = set(re.findall(r'^\| `([^`]+)` \|', glossary, re.M))
  used = set()
  for folder in ('kdtree_jax', 'pallas_kernels'):
    for path in (ROOT / folder).rglob('*.py'):
      for shape in re.findall(
        r"\b(?:Bool|U?Int\d*|B?Float\d*|Shaped)\[[^\[\]]*?, '(.*?)'\]",
        path.read_text(),
      ):
        used |= {axis.lstrip('*#') for axis in shape.split()}
  used = {axis for axis in used if axis[0] != '{' and not axis.isdigit()}
  assert {'B', 'N', 'M', 'words'} <= used <= known
