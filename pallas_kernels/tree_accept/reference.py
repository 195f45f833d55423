"""The acceptance walk in plain jnp, one pass over the nodes a step."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32


class AcceptArrays(NamedTuple):
  """What a batch of trees accepted; W = max_depth + 1."""

  path: jax.Array  # [B, W] int32 node indices, the last one repeated
  num_accepted: jax.Array  # [B] int32, root not counted
  next_token: jax.Array  # [B] int32


def tree_accept(
  tokens: Int32[Array, 'B N'],
  parents: Int32[Array, 'B N'],
  num_nodes: Int32[Array, ' B'],
  target_tokens: Int32[Array, 'B N'],
  *,
  max_depth: int,
) -> AcceptArrays:
  """See `pallas_kernels.tree_accept.api.tree_accept`."""
  walk = functools.partial(_walk_unbatched, max_depth=max_depth)
  return jax.vmap(walk)(tokens, parents, num_nodes, target_tokens)


def _walk_unbatched(tokens, parents, num_nodes, target_tokens, *, max_depth):
  """One row of `tree_accept`: arrays `[N]`, `num_nodes` a scalar."""
  is_node = jnp.arange(tokens.shape[0], dtype=jnp.int32) < num_nodes

  def step(node, _):
    child = is_node & (parents == node) & (tokens == target_tokens[node])
    found = jnp.any(child)
    # argmax over bools is the lowest index that holds. A node without the child
    # is kept, so the walk stays there.
    node = jnp.where(found, lax.argmax(child, 0, jnp.int32), node)
    return node, (node, found)

  # The trip count bounds the walk, whatever the parents say.
  last, (visited, found) = lax.scan(step, jnp.int32(0), length=max_depth)
  return AcceptArrays(
    jnp.pad(visited, (1, 0)),
    jnp.sum(found, dtype=jnp.int32),
    target_tokens[last],
  )
