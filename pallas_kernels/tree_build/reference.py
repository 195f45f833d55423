"""The best-first tree in plain jnp: one sort a depth, no heap.

Of all token prefixes u with score(u) = sum over depths of log q_d(u_d), the
tree holds the `budget` best: the tree of DDTree (github.com/liranringel/ddtree,
which pops a heap on the host), by score descending, then by the path of ranks
lexicographically, a prefix before its extensions.

Scores are fixed point, `SCALE` units to one nat. Their sums are exact, so the
order is total, no rounding can put a child before its parent, and every
implementation can agree to the last bit.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import _bits

SCALE = 1 << 20
"""Units of a fixed-point score to one nat."""
FLOOR = -50 * SCALE
"""Logits further than 50 nats below the depth's maximum count as 50."""
MAX_DEPTH = 31
MAX_VOCAB = 1 << 20
"""With these two a path sums to at least -31 (50 + ln 2^20) 2^20 > -2^31."""
DEAD = -(2**31 - 1)
"""Score of what can never be a node; its negation is the last sort key."""


class TreeArrays(NamedTuple):
  """A batch of draft trees; N = 1 + budget, the root is node 0.

  Padding nodes have token 0, parent -1, depth 0, score -inf and no bits.
  """

  tokens: jax.Array  # [B, N] int32
  parents: jax.Array  # [B, N] int32, -1 for root and padding
  depths: jax.Array  # [B, N] int32
  scores: jax.Array  # [B, N] float32, natural log
  num_nodes: jax.Array  # [B] int32, root included
  ancestors: jax.Array  # [B, N, ceil(N / 32)] uint32


class _Level(NamedTuple):
  """The best prefixes of one depth, M = budget of them, in tree order."""

  scores: jax.Array  # [M] int32, DEAD where there is no prefix
  paths: jax.Array  # [words, M] int32, packed ranks
  parents: jax.Array  # [M] int32, position in the level above
  ranks: jax.Array  # [M] int32


def tree_build(
  logits: Float[Array, 'B D V'], root: Int32[Array, ' B'], *, budget: int
) -> TreeArrays:
  """See `pallas_kernels.tree_build.api.tree_build`."""
  num_ranks = min(budget, logits.shape[2])
  log_q, token_ids = rank_marginals(logits, num_ranks)
  return tree_from_ranks(log_q, token_ids, root, budget=budget)


def rank_marginals(
  logits: jax.Array, num_ranks: int
) -> tuple[jax.Array, jax.Array]:
  """The best tokens of each depth and their fixed-point log probabilities.

  log q = z - lse with z = round((l - max l) SCALE), not below `FLOOR`, and
  lse = round(log(sum exp(l - max l)) SCALE). As the sum is at least 1, log q
  is never positive. It does not increase with the rank: the ranks are ordered
  by the float logits, of which z is a monotone function.

  Args:
    logits: `[B, D, V]` float32 or bfloat16. NaN counts as -inf, +inf as the
      largest finite float32, -0 as 0.
    num_ranks: K, static, at most V.

  Returns:
    log_q: `[B, D, K]` int32; `DEAD` where the logit is -inf, or less than one
      of +inf.
    token_ids: `[B, D, K]` int32, by (logit descending, id ascending).
  """
  logits = canonical(logits)
  highest = jnp.max(logits, axis=2, keepdims=True)
  # Where nothing is possible, keep -inf - (-inf) from making NaN.
  highest = jnp.where(highest == -jnp.inf, 0.0, highest)
  lse = log_sum_exp(logits, highest)
  values, token_ids = lax.top_k(logits, num_ranks)
  return log_q_of_values(values, highest, lse), token_ids


def canonical(logits: jax.Array) -> jax.Array:
  """Logits as float32, without NaN, +inf and -0; see `rank_marginals`."""
  logits = logits.astype(jnp.float32)
  logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
  logits = jnp.minimum(logits, jnp.finfo(jnp.float32).max)
  # top_k puts 0 before -0, but they are one logit.
  return jnp.where(logits == 0, 0.0, logits)


def log_sum_exp(logits: jax.Array, highest: jax.Array) -> jax.Array:
  """round(log(sum exp(l - highest)) SCALE), `[B, D, 1]` int32, at least 0.

  Every implementation takes it from here: the order of a float sum is the
  compiler's, and another order rounds to another unit now and then.

  Args:
    logits: `[B, D, V]`, canonical or not.
    highest: `[B, D, 1]` float32, finite.
  """
  exp = jnp.exp(canonical(logits) - highest)
  total = jnp.sum(exp, axis=2, keepdims=True)
  return jnp.round(jnp.log(jnp.maximum(total, 1.0)) * SCALE).astype(jnp.int32)


def log_q_of_values(
  values: jax.Array, highest: jax.Array, lse: jax.Array
) -> jax.Array:
  """Fixed-point log q `[B, D, K]` of canonical logits, see `rank_marginals`.

  Beside the largest float, which +inf became, no other has any probability.
  """
  z = jnp.maximum(jnp.round((values - highest) * SCALE), FLOOR)
  log_q = z.astype(jnp.int32) - lse
  beaten = (highest == jnp.finfo(jnp.float32).max) & (values < highest)
  return jnp.where((values == -jnp.inf) | beaten, DEAD, log_q)


def tree_from_ranks(
  log_q: jax.Array, token_ids: jax.Array, root: jax.Array, *, budget: int
) -> TreeArrays:
  """Builds the trees from the ranked tokens of each depth.

  Args:
    log_q: `[B, D, K]` int32 as `rank_marginals` gives them: at most 0, not
      increasing along K, `DEAD` for tokens that must not occur.
    token_ids: `[B, D, K]` int32.
    root: `[B]` int32, the root's token.
    budget: nodes besides the root, static; K = min(budget, V).
  """
  build = functools.partial(_tree_from_ranks_unbatched, budget=budget)
  tokens, parents, depths, scores, num_nodes = jax.vmap(build)(
    log_q, token_ids, root
  )
  ancestors = _bits.ancestors_from_parents(parents, min(log_q.shape[1], budget))
  return TreeArrays(tokens, parents, depths, scores, num_nodes, ancestors)


def _tree_from_ranks_unbatched(log_q, token_ids, root, *, budget):
  """One row of `tree_from_ranks`, all fields but the ancestors."""
  if log_q.shape[0] == 0 or budget == 0:
    empty = jnp.zeros((budget,), jnp.int32)
    nodes = (empty, empty - 1, empty, empty + DEAD)
  else:
    nodes = _cut(_grow(log_q, budget), token_ids, budget)
  tokens, parents, depths, fixed = nodes
  scores = jnp.where(fixed == DEAD, -jnp.inf, fixed.astype(jnp.float32) / SCALE)
  return (
    jnp.concatenate([root[None], tokens]),
    jnp.pad(parents, (1, 0), constant_values=-1),
    jnp.pad(depths, (1, 0)),
    jnp.pad(scores, (1, 0)),
    1 + jnp.sum(fixed != DEAD, dtype=jnp.int32),
  )


def _candidates(budget: int, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
  """Pairs (parent, rank) that can survive a depth, as static index arrays.

  The child of parent i at rank r comes after every child of a parent i' <= i
  at a rank r' <= r. There are (i + 1)(r + 1) of those, itself included, so it
  is among the `budget` best only if that does not exceed `budget`.
  """
  counts = np.minimum(budget // np.arange(1, budget + 1), num_ranks)
  parents = np.repeat(np.arange(budget, dtype=np.int32), counts)
  ranks = np.concatenate([np.arange(c, dtype=np.int32) for c in counts])
  return parents, ranks


def _grow(log_q: jax.Array, budget: int) -> _Level:
  """The `budget` best prefixes of every depth; fields get a leading D.

  A path is packed most significant rank first, rank r as r + 1 and a missing
  depth as 0: comparing the words then is the lexicographic order, with a
  prefix before its extensions.
  """
  depth, num_ranks = log_q.shape
  rank_bits = num_ranks.bit_length()
  per_word = 31 // rank_bits
  words = np.arange(-(-depth // per_word), dtype=np.int32)
  from_parent, at_rank = _candidates(budget, num_ranks)
  index = jnp.arange(from_parent.size, dtype=jnp.int32)

  def step(above, inputs):
    scores, paths = above
    d, log_q_d = inputs
    parent_score, step_score = scores[from_parent], log_q_d[at_rank]
    dead = (parent_score == DEAD) | (step_score == DEAD)
    score = jnp.where(dead, DEAD, parent_score + step_score)
    digit = jnp.asarray(at_rank + 1) << (
      rank_bits * (per_word - 1 - d % per_word)
    )
    here = (words == d // per_word)[:, None]
    path = paths[:, from_parent] + jnp.where(here, digit[None, :], 0)
    key, *path, order = lax.sort(
      (-score, *path, index), num_keys=1 + len(words)
    )
    best = order[:budget]
    level = _Level(
      -key[:budget],
      jnp.stack([word[:budget] for word in path]),
      jnp.asarray(from_parent)[best],
      jnp.asarray(at_rank)[best],
    )
    return (level.scores, level.paths), level

  only_root = jnp.full((budget,), DEAD, jnp.int32).at[0].set(0)
  no_path = jnp.zeros((len(words), budget), jnp.int32)
  depths = jnp.arange(depth, dtype=jnp.int32)
  _, levels = lax.scan(step, (only_root, no_path), (depths, log_q))
  return levels


def _cut(levels: _Level, token_ids: jax.Array, budget: int):
  """The `budget` best nodes of all depths: tokens, parents, depths, scores."""
  depth = token_ids.shape[0]
  flat = jnp.arange(depth * budget, dtype=jnp.int32)
  paths = jnp.swapaxes(levels.paths, 0, 1).reshape(-1, flat.size)
  key, *_, order = lax.sort(
    (-levels.scores.reshape(-1), *paths, flat), num_keys=1 + paths.shape[0]
  )
  scores, node = -key[:budget], order[:budget]
  alive = scores != DEAD
  d = node // budget
  # A parent precedes its child, so it is in the tree whenever the child is;
  # the inverse of the permutation says where.
  position = jnp.zeros_like(flat).at[order].set(flat, unique_indices=True)
  parent = (d - 1) * budget + levels.parents.reshape(-1)[node]
  parents = jnp.where(d == 0, 0, 1 + position[jnp.maximum(parent, 0)])
  tokens = token_ids[d, levels.ranks.reshape(-1)[node]]
  return (
    jnp.where(alive, tokens, 0),
    jnp.where(alive, parents, -1),
    jnp.where(alive, d + 1, 0),
    scores,
  )
