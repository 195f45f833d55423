"""The router in plain jnp: what is correct."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import dense


@dataclasses.dataclass(frozen=True)
class RouterConfig:
  """How experts are chosen, in the words of Hugging Face configs.

  Source: DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2.

  Attributes:
    num_experts_per_tok: K, number of experts of a row.
    scoring_func: "sigmoid" or "softmax", which makes scores of logits.
    norm_topk_prob: whether a row's weights are divided by their sum.
    routed_scaling_factor: factor of the weights, applied last.
    n_group: number of groups of equal size that the experts are in.
    topk_group: number of groups, the best ones, that a row may choose from.
    group_score_experts: a group's score is the sum of the scores of so many of
      its best experts.
    masked_score: score of the experts in the other groups.
  """

  num_experts_per_tok: int
  scoring_func: str
  norm_topk_prob: bool
  routed_scaling_factor: float
  n_group: int = 1
  topk_group: int = 1
  group_score_experts: int = 1
  masked_score: float = 0.0

  def __post_init__(self):
    """Refuses a scoring function that does not exist."""
    if self.scoring_func not in ('sigmoid', 'softmax'):
      raise ValueError(
        f'scoring_func: expected sigmoid or softmax, got {self.scoring_func!r}'
      )


class Routing(NamedTuple):
  """The experts of T rows.

  Attributes:
    ids: `[T, K]` int32, ties to the lowest expert.
    weights: `[T, K]` float32.
    choice: `[T, E]` float32, the scores by which experts and groups are
      chosen: biased, before groups are masked.
  """

  ids: Int32[Array, 'rows K']
  weights: Float32[Array, 'rows K']
  choice: Float32[Array, 'rows E']


def expert_router(
  x: Float[Array, 'rows M'],
  gate: Float32[Array, 'E M'],
  bias: Float32[Array, ' E'] | None,
  valid: Bool[Array, ' rows'] | None,
  config: RouterConfig,
) -> tuple[Routing, Int32[Array, 'rows K']]:
  """See `pallas_kernels.expert_router.api.expert_router`."""
  routing = route(dense.matmul(x.astype(jnp.float32), gate), bias, config)
  return routing, dispatch_ids(routing.ids, valid, gate.shape[0])


def dispatch_ids(
  ids: Int32[Array, 'rows K'],
  valid: Bool[Array, ' rows'] | None,
  experts: int,
) -> Int32[Array, 'rows K']:
  """`ids [T, K]`, but E, which is no expert, in rows not `valid [T]`."""
  return ids if valid is None else jnp.where(valid[:, None], ids, experts)


def choice_scores(
  logits: Float32[Array, 'rows E'],
  bias: Float32[Array, ' E'] | None,
  config: RouterConfig,
) -> tuple[Float32[Array, 'rows E'], Float32[Array, 'rows E']]:
  """Scores from which weights are taken, and by which experts are chosen.

  Args:
    logits: `[T, E]` float32.
    bias: `[E]` float32, added to the second; or None.
    config: has the scoring function.

  Returns:
    Both are `[T, E]` float32.
  """
  if config.scoring_func == 'sigmoid':
    scores = jax.nn.sigmoid(logits)
  else:
    scores = jax.nn.softmax(logits, axis=-1)
  return scores, scores if bias is None else scores + bias[None, :]


def route(
  logits: Float32[Array, 'rows E'],
  bias: Float32[Array, ' E'] | None,
  config: RouterConfig,
) -> Routing:
  """Chooses experts and mixing weights.

  Args:
    logits: `[T, E]` float32.
    bias: `[E]` float32, used for the choice only, never for the weights; or
      None.
    config: scoring, grouping and scaling.
  """
  scores, choice = choice_scores(logits, bias, config)
  _, ids = lax.top_k(mask_groups(choice, config), config.num_experts_per_tok)
  weights = jnp.take_along_axis(scores, ids, axis=-1)
  if config.norm_topk_prob:
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
  return Routing(ids, weights * config.routed_scaling_factor, choice)


def group_scores(
  scores: Float32[Array, 'rows E'], config: RouterConfig
) -> Float32[Array, 'rows groups']:
  """The scores by which groups of experts are chosen."""
  grouped = scores.reshape(scores.shape[0], config.n_group, -1)
  return lax.top_k(grouped, config.group_score_experts)[0].sum(axis=-1)


def mask_groups(
  scores: Float32[Array, 'rows E'], config: RouterConfig
) -> Float32[Array, 'rows E']:
  """Masks the scores of all but the `topk_group` best groups."""
  rows, groups = scores.shape[0], config.n_group
  if groups == 1:
    return scores
  grouped = scores.reshape(rows, groups, -1)
  _, kept = lax.top_k(group_scores(scores, config), config.topk_group)
  keep = jax.nn.one_hot(kept, groups, dtype=jnp.bool_).any(axis=1)
  return jnp.where(keep[:, :, None], grouped, config.masked_score).reshape(
    scores.shape
  )
