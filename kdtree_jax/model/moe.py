"""Routed and shared experts; dropless, rows independent of each other."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.layers import SwiGLU, matrix_init, weight
from pallas_kernels.dense import Weights, matmul
from pallas_kernels.grouped_matmul.api import expert_mlp


def _keep_best_groups(
  scores: jax.Array, config: ModelConfig, *, best: int, fill: float
) -> jax.Array:
  """Replaces the scores of all but the `topk_group` best groups by `fill`.

  A group is scored by the sum of its `best` highest experts.
  """
  rows, groups = scores.shape[0], config.n_group
  if groups == 1:
    return scores
  grouped = scores.reshape(rows, groups, -1)
  group_scores = lax.top_k(grouped, best)[0].sum(axis=-1)
  _, kept = lax.top_k(group_scores, config.topk_group)
  keep = jax.nn.one_hot(kept, groups, dtype=jnp.bool_).any(axis=1)
  return jnp.where(keep[:, :, None], grouped, fill).reshape(scores.shape)


class Routing(NamedTuple):
  """Where T rows go.

  Attributes:
    ids: `[T, K]` int32, ties to the lowest expert.
    weights: `[T, K]` float32.
    choice: `[T, E]` float32, the scores by which experts and groups are
      chosen: biased, before groups are masked.
  """

  ids: jax.Array
  weights: jax.Array
  choice: jax.Array


def route(
  logits: jax.Array, bias: jax.Array | None, config: ModelConfig
) -> Routing:
  """Chooses experts and mixing weights (DeepSeek-V3, sec. 2.1.2).

  Args:
    logits: `[T, E]` float32.
    bias: `[E]` float32, used for the choice only, never for the weights; None
      unless `topk_method` is `noaux_tc`.
    config: scoring, grouping and scaling switches.
  """
  if config.scoring_func == 'sigmoid':
    scores = jax.nn.sigmoid(logits)
  else:
    scores = jax.nn.softmax(logits, axis=-1)
  choice = scores if bias is None else scores + bias[None, :]
  open_to = choice
  if config.topk_method == 'noaux_tc':
    # Biased scores can be negative: a masked group must lose to those too.
    open_to = _keep_best_groups(choice, config, best=2, fill=-jnp.inf)
  elif config.topk_method == 'group_limited_greedy':
    open_to = _keep_best_groups(choice, config, best=1, fill=0.0)
  _, ids = lax.top_k(open_to, config.num_experts_per_tok)
  weights = jnp.take_along_axis(scores, ids, axis=-1)
  if config.norm_topk_prob:
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
  return Routing(ids, weights * config.routed_scaling_factor, choice)


class Router(nn.Module):
  """`gate`: float32 throughout, whatever the model's dtype."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> Routing:
    """Routes `x [T, hidden_size]`."""
    c = self.config
    shape = (c.n_routed_experts, c.hidden_size)
    gate = weight(self, 'weight', matrix_init, shape, jnp.float32)
    bias = None
    if c.topk_method == 'noaux_tc':
      zeros = nn.initializers.zeros_init()
      bias = weight(
        self, 'e_score_correction_bias', zeros, shape[:1], jnp.float32
      )
    return route(matmul(x.astype(jnp.float32), gate), bias, c)


class Experts(nn.Module):
  """The stacked weights of the routed experts, and the op that mixes all."""

  config: ModelConfig
  dtype: Any
  implementation: str | None

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    shared: Weights | None,
  ) -> jax.Array:
    """`x [T, hidden_size]` through its experts and the shared ones."""
    c = self.config
    e, h, i = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
    gate_up = weight(
      self, 'gate_up_proj', matrix_init, (e, 2 * i, h), self.dtype
    )
    down = weight(self, 'down_proj', matrix_init, (e, h, i), self.dtype)
    return expert_mlp(
      x,
      gate_up,
      down,
      ids,
      weights,
      shared=shared,
      implementation=self.implementation,
    )


class MixtureOfExperts(nn.Module):
  """Routed experts plus one shared SwiGLU of `n_shared_experts` widths."""

  config: ModelConfig
  dtype: Any
  implementation: str | None

  @nn.compact
  def __call__(
    self, x: jax.Array, valid: jax.Array
  ) -> tuple[jax.Array, Routing]:
    """`x [B, N, hidden_size]`; rows that are not `valid [B, N]` get none."""
    c = self.config
    flat = x.reshape(-1, c.hidden_size)
    routing = Router(c, name='gate')(flat)
    # An id past the last expert is no expert: it costs no weights.
    ids = jnp.where(valid.reshape(-1, 1), routing.ids, c.n_routed_experts)
    shared = None
    if c.n_shared_experts:
      width = c.moe_intermediate_size * c.n_shared_experts
      swiglu = SwiGLU(width, self.dtype, name='shared_experts')
      shared = swiglu.weights(c.hidden_size)
    experts = Experts(c, self.dtype, self.implementation, name='experts')
    y = experts(flat, ids, routing.weights, shared).reshape(x.shape)
    return y, jax.tree.map(lambda a: a.reshape(*x.shape[:2], -1), routing)
