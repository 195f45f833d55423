"""Routed and shared experts: dropless, with rows independent of each other."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.layers import SwiGLU, matrix_init, weight
from pallas_kernels.dense import Weights
from pallas_kernels.expert_mlp.api import expert_mlp
from pallas_kernels.expert_router.api import (
  RouterConfig,
  Routing,
  expert_router,
)


def router_config(config: ModelConfig) -> RouterConfig:
  """The configuration of a model's router."""
  # Biased scores can be negative: masked ones must be below those as well.
  biased = config.topk_method == 'noaux_tc'
  grouped = biased or config.topk_method == 'group_limited_greedy'
  return RouterConfig(
    num_experts_per_tok=config.num_experts_per_tok,
    scoring_func=config.scoring_func,
    norm_topk_prob=config.norm_topk_prob,
    routed_scaling_factor=config.routed_scaling_factor,
    n_group=config.n_group if grouped else 1,
    topk_group=config.topk_group if grouped else 1,
    group_score_experts=2 if biased else 1,
    masked_score=-math.inf if biased else 0.0,
  )


class Router(nn.Module):
  """The router (`gate`), in float32 whatever the model's dtype."""

  config: ModelConfig
  implementation: str | None

  @nn.compact
  def __call__(
    self, x: Float[Array, 'rows M'], valid: Bool[Array, ' rows']
  ) -> tuple[Routing, Int32[Array, 'rows K']]:
    """Routes every row; see `expert_router`."""
    c = self.config
    shape = (c.n_routed_experts, c.hidden_size)
    gate = weight(self, 'weight', matrix_init, shape, jnp.float32)
    bias = None
    if c.topk_method == 'noaux_tc':
      zeros = nn.initializers.zeros_init()
      bias = weight(
        self, 'e_score_correction_bias', zeros, shape[:1], jnp.float32
      )
    # The router has no implementation for training: it is fast enough as it is.
    training = self.implementation == 'training'
    return expert_router(
      x,
      gate,
      bias,
      valid,
      router_config(c),
      implementation='reference' if training else self.implementation,
    )


class Experts(nn.Module):
  """The stacked weights of the routed experts, and the op that uses them."""

  config: ModelConfig
  dtype: DTypeLike
  implementation: str | None

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'rows M'],
    ids: Int32[Array, 'rows K'],
    weights: Float32[Array, 'rows K'],
    shared: Weights | None,
  ) -> Float[Array, 'rows M']:
    """The weighted sum of each row's experts and the shared ones."""
    c = self.config
    e, m, i = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
    gate_up = weight(
      self, 'gate_up_proj', matrix_init, (e, 2 * i, m), self.dtype
    )
    down = weight(self, 'down_proj', matrix_init, (e, m, i), self.dtype)
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
  """Routed experts plus one SwiGLU as wide as `n_shared_experts` of them."""

  config: ModelConfig
  dtype: DTypeLike
  implementation: str | None

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B N M'], valid: Bool[Array, 'B N']
  ) -> tuple[Float[Array, 'B N M'], Routing]:
    """The experts' weighted sum; rows that are not `valid` get no expert."""
    c = self.config
    flat = x.reshape(-1, c.hidden_size)
    router = Router(c, self.implementation, name='gate')
    # The id E of padding is no expert's: no weights are read for it.
    routing, ids = router(flat, valid.reshape(-1))
    shared = None
    if c.n_shared_experts:
      width = c.moe_intermediate_size * c.n_shared_experts
      swiglu = SwiGLU(width, self.dtype, name='shared_experts')
      shared = swiglu.weights(c.hidden_size)
    experts = Experts(c, self.dtype, self.implementation, name='experts')
    y = experts(flat, ids, routing.weights, shared).reshape(x.shape)
    return y, jax.tree.map(lambda a: a.reshape(*x.shape[:2], -1), routing)
