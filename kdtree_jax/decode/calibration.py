"""Corrected acceptance probabilities, learnt while a request is decoded.

A drafter's probabilities may be too sure or too shy. A verify shows the
target's token after every node, so for each child of such a node it shows
whether the target chose it. The edges of a tree are corrected by a logistic map
of their log-odds: its slope and intercept are those of all edges plus those of
the edge's bin of depth and rank. They are learnt online, by one Newton step a
round from a Gaussian prior around the neutral map.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from kdtree_jax.tree import DraftTree

# Bins: the least depth of each, once for first choices and once for others.
DEPTHS = (1, 2, 3, 5)
BINS = 2 * len(DEPTHS)
# Precisions of the prior on (slope, intercept): of all edges, and of a bin's
# difference from it. Chosen on recorded rounds of the trained pair.
PRECISION = (16.0, 4.0)
BIN_PRECISION = (80.0, 20.0)
# An edge after a node that was not accepted counts less: there the drafter's
# distribution, which is of a position, is of other text.
UNREACHED_WEIGHT = 0.1
MAX_LOG_ODDS = 8.0
SLOPES = (0.1, 3.0)
MAX_INTERCEPT = 4.0
MAX_BIN_DIFFERENCE = 1.0


class Calibration(flax.struct.PyTreeNode):
  """The logistic map and how sure it is.

  Attributes:
    weights: slope and intercept of all edges.
    precision: the inverse of their covariance.
    bin_weights: differences of the bins.
    bin_precision: likewise.
  """

  weights: Float32[Array, '2']
  precision: Float32[Array, '2 2']
  bin_weights: Float32[Array, 'bins 2']
  bin_precision: Float32[Array, 'bins 2 2']


def neutral() -> Calibration:
  """The map that changes nothing, with the prior's precision."""
  return Calibration(
    weights=jnp.array([1.0, 0.0], jnp.float32),
    precision=jnp.diag(jnp.array(PRECISION, jnp.float32)),
    bin_weights=jnp.zeros((BINS, 2), jnp.float32),
    bin_precision=jnp.tile(
      jnp.diag(jnp.array(BIN_PRECISION, jnp.float32)), (BINS, 1, 1)
    ),
  )


class Edges(flax.struct.PyTreeNode):
  """The edges from parents to the nodes of a tree; the root has none.

  Attributes:
    log_odds: of the drafter's probability of the node's token, clipped.
    bin: the bin of the node's depth and rank.
  """

  log_odds: Float32[Array, 'B N']
  bin: Int32[Array, 'B N']


def edges_of(tree: DraftTree) -> Edges:
  """The edges of a batch of trees."""
  parents = jnp.maximum(tree.parents, 0)
  above = jnp.take_along_axis(tree.scores, parents, axis=1)
  log_q = jnp.where(tree.valid, tree.scores - above, -jnp.inf)
  log_q = jnp.clip(log_q, -2 * MAX_LOG_ODDS, -1e-6)
  odds = log_q - jnp.log(-jnp.expm1(log_q))
  # A node's older sibling, if there is one, has a smaller index.
  slots = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)
  older = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (
    slots[None, None, :] < slots[None, :, None]
  )
  least = jnp.array(DEPTHS[1:], jnp.int32)
  depth_bin = (tree.depths[:, :, None] >= least[None, None, :]).sum(
    -1, dtype=jnp.int32
  )
  rank_bin = older.any(axis=-1).astype(jnp.int32)
  return Edges(
    log_odds=jnp.clip(odds, -MAX_LOG_ODDS, MAX_LOG_ODDS),
    bin=2 * depth_bin + rank_bin,
  )


def _probability(
  calibration: Calibration, edges: Edges
) -> Float32[Array, 'B N']:
  weights = calibration.weights[None, None, :]
  weights += calibration.bin_weights[edges.bin]
  return jax.nn.sigmoid(weights[..., 0] * edges.log_odds + weights[..., 1])


def path_probabilities(
  calibration: Calibration, tree: DraftTree
) -> Float32[Array, 'B N']:
  """The probability that each node is accepted: the product along its path.

  It is 1 for the root and 0 for padding.
  """
  log_edge = jnp.log(_probability(calibration, edges_of(tree)))
  slots = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)
  words = tree.ancestors[:, :, slots // 32]
  shift = (slots % 32).astype(jnp.uint32)[None, None, :]
  on_path = (words >> shift) & jnp.uint32(1) == 1
  # The root has no edge.
  on_path &= (slots > 0)[None, None, :]
  total = jnp.where(on_path, log_edge[:, None, :], 0.0).sum(axis=-1)
  return jnp.where(tree.valid, jnp.exp(total), 0.0)


def learn(
  calibration: Calibration,
  tree: DraftTree,
  verified: Int32[Array, ' B'],
  target_tokens: Int32[Array, 'B N'],
  reached: Bool[Array, 'B N'],
) -> Calibration:
  """The map after the labels of one round.

  Args:
    calibration: the map before.
    tree: the whole draft tree; nodes that were not verified have labels too, if
      their parents were.
    verified: number of nodes verified; 0 for rows that took no part.
    target_tokens: the target's token after each verified node.
    reached: the nodes of the walk.
  """
  edges = edges_of(tree)
  parents = jnp.maximum(tree.parents, 0)

  def of_parent(values):
    return jnp.take_along_axis(values, parents, axis=1)

  hit = of_parent(target_tokens) == tree.tokens
  known = tree.valid & (tree.parents >= 0) & (parents < verified[:, None])
  weight = jnp.where(of_parent(reached), 1.0, UNREACHED_WEIGHT)
  weight = jnp.where(known, weight, 0.0).reshape(-1)
  p = _probability(calibration, edges).reshape(-1)
  x = jnp.stack([edges.log_odds.reshape(-1), jnp.ones_like(p)], axis=1)
  missed = hit.reshape(-1).astype(jnp.float32) - p
  slope = (weight * missed)[:, None] * x
  curvature = weight * p * (1 - p)
  curvature = curvature[:, None, None] * x[:, :, None] * x[:, None, :]
  member = jax.nn.one_hot(edges.bin.reshape(-1), BINS, axis=0)
  bin_slope = (member[:, :, None] * slope[None]).sum(axis=1)
  bin_curvature = (member[:, :, None, None] * curvature[None]).sum(axis=1)
  precision = calibration.precision + curvature.sum(axis=0)
  bin_precision = calibration.bin_precision + bin_curvature
  weights = calibration.weights + _solve(precision, slope.sum(axis=0))
  bin_weights = calibration.bin_weights + _solve(bin_precision, bin_slope)
  low = jnp.array([SLOPES[0], -MAX_INTERCEPT], jnp.float32)
  high = jnp.array([SLOPES[1], MAX_INTERCEPT], jnp.float32)
  return Calibration(
    weights=jnp.clip(weights, low, high),
    precision=precision,
    bin_weights=jnp.clip(bin_weights, -MAX_BIN_DIFFERENCE, MAX_BIN_DIFFERENCE),
    bin_precision=bin_precision,
  )


def _solve(
  a: Float32[Array, '*batch 2 2'], b: Float32[Array, '*batch 2']
) -> Float32[Array, '*batch 2']:
  """The solution of `a x = b` for symmetric positive definite 2 x 2 `a`."""
  determinant = a[..., 0, 0] * a[..., 1, 1] - a[..., 0, 1] * a[..., 1, 0]
  x0 = a[..., 1, 1] * b[..., 0] - a[..., 0, 1] * b[..., 1]
  x1 = a[..., 0, 0] * b[..., 1] - a[..., 1, 0] * b[..., 0]
  return jnp.stack([x0, x1], axis=-1) / determinant[..., None]


def expected_calibration_error(
  probabilities: Float32[np.ndarray, ' nodes'],
  accepted: Bool[np.ndarray, ' nodes'],
  bins: int = 10,
) -> float:
  """The mean gap of predicted and observed rates over bins of equal width.

  Guo et al., arXiv:1706.04599, section 2: weighted by a bin's share of nodes.
  """
  where = np.minimum((probabilities * bins).astype(int), bins - 1)
  gaps = [
    abs((probabilities[where == i] - accepted[where == i]).sum())
    for i in range(bins)
  ]
  return float(sum(gaps) / max(len(probabilities), 1))
