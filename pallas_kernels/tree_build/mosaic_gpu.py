"""The best-first tree on a Hopper GPU: three Mosaic kernels and some XLA.

1. `mosaic_select`: the best tokens of every depth, exactly.
2. XLA turns them into fixed-point log probabilities, by the reference's own
   expressions.
3. `mosaic_pops` for small budgets, `mosaic_bands` for larger ones: the tree.

Every step is exact, and the log-sum-exp is the reference's, so the trees are
equal to its trees to the last bit.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bits
from pallas_kernels.tree_build import (
  mosaic_bands,
  mosaic_pops,
  mosaic_select,
  reference,
)
from pallas_kernels.tree_build.reference import TreeArrays

MAX_BUDGET = mosaic_select.MAX_COUNT

_POPPED = 64  # largest budget for which nodes are popped one by one


def why_not(logits: jax.Array, root: jax.Array, *, budget: int) -> str | None:
  """Why the kernels cannot take these; None if they can."""
  del root
  if 0 in logits.shape:
    return f'no logits in {list(logits.shape)}'
  if not 1 <= budget <= MAX_BUDGET:
    return f'budget {budget} is not in 1..{MAX_BUDGET}'
  return None


def tree_build(
  logits: jax.Array, root: jax.Array, *, budget: int, interpret=None
) -> TreeArrays:
  """See `pallas_kernels.tree_build.api.tree_build`.

  Args:
    logits: `[B, D, V]` float32 or bfloat16, D >= 1.
    root: `[B]` int32.
    budget: 1..MAX_BUDGET, static.
    interpret: `plgpu.InterpretGPUParams` to run without a GPU.
  """
  num_ranks = min(budget, logits.shape[2])
  log_q, token_ids = rank_marginals(logits, num_ranks, interpret=interpret)
  return tree_from_ranks(
    log_q, token_ids, root, budget=budget, interpret=interpret
  )


def rank_marginals(
  logits: jax.Array, num_ranks: int, *, interpret=None
) -> tuple[jax.Array, jax.Array]:
  """The same as `reference.rank_marginals`, see there."""
  batch, depth, vocab = logits.shape
  rows = logits.reshape(batch * depth, vocab)
  keys, ids = mosaic_select.select(rows, num_ranks, interpret=interpret)
  keys, token_ids = mosaic_select.sorted_by_rank(keys, ids, num_ranks)
  values = mosaic_select.float_of_key(keys)
  highest = values[:, :1].reshape(batch, depth, 1)
  highest = jnp.where(highest == -jnp.inf, 0.0, highest)
  lse = reference.log_sum_exp(logits, highest)
  log_q = reference.log_q_of_values(
    values.reshape(batch, depth, num_ranks), highest, lse
  )
  return log_q, token_ids.reshape(batch, depth, num_ranks)


def tree_from_ranks(
  log_q: jax.Array,
  token_ids: jax.Array,
  root: jax.Array,
  *,
  budget: int,
  interpret=None,
) -> TreeArrays:
  """The same as `reference.tree_from_ranks`, see there; D and budget >= 1."""
  batch, depth, num_ranks = log_q.shape
  n = 1 + budget
  if budget <= _POPPED:
    *nodes, ancestors, num_nodes = mosaic_pops.grow(
      log_q, budget, interpret=interpret
    )
    parents, places, depths, fixed = (x[:, :n] for x in nodes)
  else:
    parents, places, depths, fixed, num_nodes = mosaic_bands.grow(
      log_q, budget, interpret=interpret
    )
    ancestors = ancestors_by_doubling(parents, min(depth, budget))
  ids = token_ids.reshape(batch, depth * num_ranks)
  tokens = jnp.take_along_axis(ids, places, axis=1)
  index = np.arange(n, dtype=np.int32)[None, :]
  alive = index < num_nodes
  tokens = jnp.where(alive, tokens, 0)
  scores = jnp.where(
    alive, fixed.astype(jnp.float32) / reference.SCALE, -jnp.inf
  )
  return TreeArrays(
    jnp.where(index == 0, root[:, None], tokens),
    parents,
    depths,
    scores,
    num_nodes[:, 0],
    ancestors,
  )


def ancestors_by_doubling(parents: jax.Array, max_depth: int) -> jax.Array:
  """`_bits.ancestors_from_parents` for well-formed trees, in log2(D) gathers.

  Args:
    parents: `[B, N]` int32; -1 for the root (node 0) and for padding.
    max_depth: static bound on the depth of a node.
  """
  batch, n = parents.shape
  index = np.arange(n, dtype=np.int32)[None, :]
  own = jnp.where((parents >= 0) | (index == 0), index, -1)
  above, jump = own[:, :, None], parents

  def follow(x):
    """x at each node's `jump`, -1 beyond the root."""
    at = jnp.maximum(jump, 0).reshape(batch, n, *(1,) * (x.ndim - 2))
    found = jnp.take_along_axis(x, at, axis=1)
    return jnp.where(jump.reshape(at.shape) >= 0, found, -1)

  while above.shape[2] <= max_depth:
    above = jnp.concatenate([above, follow(above)], axis=2)
    jump = follow(jump)
  words = np.arange(_bits.num_words(n), dtype=np.int32)[None, None, :, None]
  above = above[:, :, None, :]
  bit = jnp.uint32(1) << (above & (_bits.WORD_BITS - 1)).astype(jnp.uint32)
  # Each ancestor occurs once, so the sum of their bits is the union.
  return jnp.sum(
    jnp.where((above >> 5) == words, bit, jnp.uint32(0)),
    axis=3,
    dtype=jnp.uint32,
  )
