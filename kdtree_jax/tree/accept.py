"""The accepted path, from the target's tokens at the nodes of a tree."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kdtree_jax.tree.draft_tree import DraftTree
from pallas_kernels.tree_accept.api import tree_accept


class Acceptance(flax.struct.PyTreeNode):
  """The accepted path of one round; W = draft depth + 1.

  Attributes:
    path: node indices, the root first; entries from `acceptance_length` on
      repeat an accepted node.
    tokens: the tokens that follow the root, in order: the accepted ones, then
      the next root. Later entries are meaningless.
    acceptance_length: 1..W: tokens committed, the root included.
    stopped: the last committed token is a stop token.
  """

  path: Int32[Array, 'B W']
  tokens: Int32[Array, 'B W']
  acceptance_length: Int32[Array, ' B']
  stopped: Bool[Array, ' B']


def accept(
  tree: DraftTree,
  target_tokens: Int32[Array, 'B N'],
  stop_ids: Int32[Array, ' stops'],
  *,
  max_depth: int,
  implementation: str | None = None,
) -> Acceptance:
  """Walks from the root while a child holds the target's token.

  The walk ends at a stop token: nothing after it is accepted.

  Args:
    tree: the verified tree.
    target_tokens: the target's own choice after each node.
    stop_ids: -1 matches nothing.
    max_depth: the deepest node that can exist.
    implementation: which one of the `tree_accept` op.
  """
  walk = tree_accept(
    tree.tokens,
    tree.parents,
    tree.num_nodes,
    target_tokens,
    max_depth=max_depth,
    implementation=implementation,
  )
  committed = jnp.take_along_axis(tree.tokens, walk.path, axis=1)
  steps = jnp.arange(max_depth + 1, dtype=jnp.int32)[None, :]
  is_stop = (committed[:, :, None] == stop_ids[None, None, :]).any(axis=-1)
  is_stop &= steps <= walk.num_accepted[:, None]
  stopped = is_stop.any(axis=1)
  first_stop = jnp.argmax(is_stop, axis=1).astype(jnp.int32)
  last = jnp.where(stopped, first_stop, walk.num_accepted)
  return Acceptance(
    path=walk.path,
    tokens=jnp.take_along_axis(target_tokens, walk.path, axis=1),
    acceptance_length=last + 1,
    stopped=stopped,
  )
