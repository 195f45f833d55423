"""How a draft tree is grown from the drafter's distributions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kdtree_jax.registry import register
from kdtree_jax.tree.draft_tree import NO_PARENT, DraftTree, root_only
from pallas_kernels.tree_build.api import tree_build

# (logits [B, D, V], root [B], tree_budget, implementation) -> DraftTree with
# 1 + tree_budget slots. Pure, traced inside the decoding loop.
TreePolicy = Callable[[jax.Array, jax.Array, int, str | None], DraftTree]


@register('tree_policy', 'best_first')
def best_first(
  logits: jax.Array,
  root: jax.Array,
  tree_budget: int,
  implementation: str | None = None,
) -> DraftTree:
  """The `tree_budget` most probable prefixes under the drafter (DDTree).

  Args:
    logits: `[B, D, V]`, the drafter's, for the D positions after the root.
    root: `[B]` int32.
    tree_budget: nodes, the root not counted.
    implementation: of the `tree_build` op.
  """
  arrays = tree_build(
    logits, root, budget=tree_budget, implementation=implementation
  )
  return DraftTree(**arrays._asdict())


@register('tree_policy', 'chain')
def chain(
  logits: jax.Array,
  root: jax.Array,
  tree_budget: int,
  implementation: str | None = None,
) -> DraftTree:
  """The most probable token of every depth: plain DFlash.

  A chain has at most D nodes; what `tree_budget` allows beyond is padding.
  """
  del implementation  # Nothing here is worth a kernel.
  batch, depth, _ = logits.shape
  if min(depth, tree_budget) == 0:
    return _pad(root_only(root), 1 + tree_budget)
  logits = logits[:, :tree_budget].astype(jnp.float32)
  logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
  depth = logits.shape[1]
  slots = jnp.arange(depth + 1, dtype=jnp.int32)
  tokens = jnp.concatenate(
    [root[:, None], logits.argmax(axis=-1).astype(jnp.int32)], axis=1
  )
  # A depth without any possible token ends the chain above it.
  possible = lax.cummin(
    jnp.isfinite(logits.max(axis=-1)).astype(jnp.int32), axis=1
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
