"""Policies that build a draft tree from the drafter's distributions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kdtree_jax.registry import register
from kdtree_jax.tree.draft_tree import NO_PARENT, DraftTree, root_only
from pallas_kernels.tree_build.api import (
  ancestors_from_parents,
  canonical,
  tree_build,
)

# (logits, root, tree_budget, implementation) -> DraftTree with 1 + tree_budget
# slots. Pure; traced inside the decoding loop.
TreePolicy = Callable[
  [Float[Array, 'B D V'], Int32[Array, ' B'], int, str | None], DraftTree
]


@register('tree_policy', 'best_first')
def best_first(
  logits: Float[Array, 'B D V'],
  root: Int32[Array, ' B'],
  tree_budget: int,
  implementation: str | None = None,
) -> DraftTree:
  """The `tree_budget` most probable prefixes under the drafter (DDTree).

  Args:
    logits: the drafter's, for the D positions after the root.
    root: the roots' tokens.
    tree_budget: nodes, the root not counted.
    implementation: which one of the `tree_build` op.
  """
  arrays = tree_build(
    logits, root, budget=tree_budget, implementation=implementation
  )
  return DraftTree(**arrays._asdict())


@register('tree_policy', 'chain')
def chain(
  logits: Float[Array, 'B D V'],
  root: Int32[Array, ' B'],
  tree_budget: int,
  implementation: str | None = None,
) -> DraftTree:
  """The most probable token of every depth: plain DFlash.

  A chain has at most D nodes; a larger `tree_budget` adds padding.
  """
  del implementation  # There is no kernel for chains.
  batch, depth, _ = logits.shape
  if min(depth, tree_budget) == 0:
    return _pad(root_only(root), 1 + tree_budget)
  # The tokens that are possible here are those of `best_first`.
  logits = canonical(logits[:, :tree_budget])
  depth = logits.shape[1]
  slots = jnp.arange(depth + 1, dtype=jnp.int32)
  tokens = jnp.concatenate(
    [root[:, None], logits.argmax(axis=-1).astype(jnp.int32)], axis=1
  )
  # A depth without any possible token ends the chain above it.
  possible = lax.cummin(
    (logits.max(axis=-1) > -jnp.inf).astype(jnp.int32), axis=1
  )
  num_nodes = 1 + possible.sum(axis=1, dtype=jnp.int32)
  log_q = jnp.minimum(jax.nn.log_softmax(logits, axis=-1).max(axis=-1), 0.0)
  scores = jnp.concatenate(
    [jnp.zeros((batch, 1)), jnp.cumsum(log_q, axis=1)], axis=1
  )
  real = slots[None, :] < num_nodes[:, None]
  # Row i of a chain sees the slots 0..i: all bits of the words before its
  # own, and the low bits of its own.
  word = jnp.arange((depth + 32) // 32, dtype=jnp.int32)
  bits = jnp.clip(slots[:, None] + 1 - 32 * word[None, :], 0, 32)
  full = jnp.uint32(0xFFFFFFFF)
  low = jnp.where(
    bits == 32, full, (jnp.uint32(1) << (bits % 32).astype(jnp.uint32)) - 1
  )
  tree = DraftTree(
    tokens=jnp.where(real, tokens, 0),
    parents=jnp.where(real, slots[None, :] - 1, NO_PARENT),
    depths=jnp.where(real, slots[None, :], 0),
    scores=jnp.where(real, scores, -jnp.inf),
    num_nodes=num_nodes,
    ancestors=jnp.where(real[:, :, None], low[None], jnp.uint32(0)),
  )
  return _pad(tree, 1 + tree_budget)


def keep_top1_chain(
  tree: DraftTree, logits: Float[Array, 'B D V']
) -> DraftTree:
  """A tree of the same size that holds the whole chain of top-1 tokens.

  A best-first tree of noisy drafts may end that chain early. The result is the
  longest prefix of `tree` that leaves space for the chain's missing nodes, then
  those nodes, which score below all that are kept.

  Args:
    tree: a tree whose nodes are in order of score.
    logits: the logits that it was built from.
  """
  slots = tree.tokens.shape[1]
  depth = min(logits.shape[1], slots - 1)
  if depth == 0:
    return tree
  top1 = chain(logits, tree.tokens[:, 0], slots - 1)
  wanted = top1.num_nodes[:, None]
  on_chain = _on_chain(tree, top1, depth)
  # have[j]: nodes of the chain among the first j + 1. Keeping those j + 1
  # takes j + 1 slots, and one for each node of the chain that they lack.
  have = jnp.cumsum(on_chain.astype(jnp.int32), axis=1)
  index = jnp.arange(slots, dtype=jnp.int32)[None, :]
  fits = tree.valid & (index + 1 + wanted - have <= slots)
  kept = fits.sum(axis=1, dtype=jnp.int32)[:, None]
  had = jnp.take_along_axis(have, kept - 1, axis=1)
  deepest = jnp.where(on_chain & (index < kept), index, 0).max(axis=1)[:, None]
  # Slot kept + i holds the chain's node at depth had + i.
  added = (index >= kept) & (index < kept + wanted - had)
  at = jnp.clip(had + index - kept, 0, slots - 1)

  def merge(of_tree, of_chain, fill):
    new = jnp.take_along_axis(of_chain, at, axis=1)
    return jnp.where(index < kept, of_tree, jnp.where(added, new, fill))

  # The two round scores differently, but no child may outscore its parent.
  ceiling = jnp.take_along_axis(tree.scores, deepest, axis=1)
  top1 = top1.replace(scores=jnp.minimum(top1.scores, ceiling))
  above = jnp.where(index == kept, deepest, index - 1)
  parents = jnp.where(
    index < kept, tree.parents, jnp.where(added, above, NO_PARENT)
  )
  return DraftTree(
    tokens=merge(tree.tokens, top1.tokens, 0),
    parents=parents,
    depths=merge(tree.depths, top1.depths, 0),
    scores=merge(tree.scores, top1.scores, -jnp.inf),
    num_nodes=(kept + wanted - had)[:, 0],
    ancestors=ancestors_from_parents(parents, depth),
  )


def _on_chain(
  tree: DraftTree, top1: DraftTree, depth: int
) -> Bool[Array, 'B N']:
  """The nodes of `tree` whose path is a prefix of the chain `top1`."""
  at_depth = jnp.take_along_axis(top1.tokens, tree.depths, axis=1)
  matches = tree.valid & (tree.tokens == at_depth)
  on = matches & (tree.depths == 0)
  parents = jnp.maximum(tree.parents, 0)
  for level in range(1, depth + 1):
    above = jnp.take_along_axis(on, parents, axis=1)
    on |= matches & above & (tree.depths == level)
  return on


def _pad(tree: DraftTree, slots: int) -> DraftTree:
  """Appends padding nodes up to `slots`."""
  extra = slots - tree.tokens.shape[1]
  words = (slots + 31) // 32 - tree.ancestors.shape[2]

  def pad(x, fill):
    return jnp.pad(x, ((0, 0), (0, extra)), constant_values=fill)

  return DraftTree(
    tokens=pad(tree.tokens, 0),
    parents=pad(tree.parents, NO_PARENT),
    depths=pad(tree.depths, 0),
    scores=pad(tree.scores, -jnp.inf),
    num_nodes=tree.num_nodes,
    ancestors=jnp.pad(tree.ancestors, ((0, 0), (0, extra), (0, words))),
  )
