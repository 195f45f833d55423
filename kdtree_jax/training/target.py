"""Training of a target: next-token prediction and balanced experts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32
from numpy.typing import DTypeLike

from kdtree_jax.config import ModelConfig
from kdtree_jax.io.checkpoint_weights import Params
from kdtree_jax.model import ForwardOutput, Transformer, init_cache, init_params
from kdtree_jax.model.moe import Routing
from kdtree_jax.training.packing import PackedBatch

BIAS = 'e_score_correction_bias'


def compute_params(params: Params, dtype: DTypeLike) -> Params:
  """Parameters cast for a forward: to `dtype`, but the router stays float32."""

  def cast(path, value):
    names = [getattr(key, 'key', None) for key in path]
    return value if 'gate' in names else value.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def packed_forward(
  config: ModelConfig,
  params: Params,
  batch: PackedBatch,
  *,
  tap_layers: tuple[int, ...] = (),
  implementation: str | None = 'training',
) -> ForwardOutput:
  """One forward over packed documents, without a cache.

  Args:
    config: the target's config.
    params: parameters of any dtype, which may be quantised.
    batch: the windows.
    tap_layers: see `Transformer`.
    implementation: `training` for gradients and for plain weights; None for a
      frozen target that may be quantised.
  """
  # The model computes in the dtype of the embedding, which is never quantised.
  dtype = params['embed_tokens']['weight'].dtype
  model = Transformer(
    config, tap_layers=tap_layers, implementation=implementation
  )
  out: Any = model.apply(
    {'params': params},
    batch.tokens,
    batch.positions,
    init_cache(config, batch.tokens.shape[0], 0, dtype),
    jnp.ones(batch.tokens.shape, jnp.bool_),
    batch.ancestors,
  )
  return out


def packed_logits(
  config: ModelConfig, params: Params, hidden: Float[Array, 'B T M']
) -> Float32[Array, 'B T V']:
  """Logits of the hidden states of `packed_forward`."""
  logits: Any = Transformer(config).apply(
    {'params': params}, hidden, method='logits'
  )
  return logits


def negative_log_likelihood(
  logits: Float32[Array, '*batch V'], labels: Int32[Array, '*batch']
) -> Float32[Array, '*batch']:
  """The negative log-likelihood of labels, in nats."""
  ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  # A masked sum instead of a gather, whose gradient would be a scatter.
  chosen = jnp.where(ids == labels[..., None], logits, 0.0).sum(axis=-1)
  return jax.nn.logsumexp(logits, axis=-1) - chosen


@dataclasses.dataclass(frozen=True)
class TargetTask:
  """The task (see `loop.Task`) of next-token prediction.

  Its constants are `[V]` int32, the bytes of each token.

  Attributes:
    config: the target's config.
    compute_dtype: dtype of the forward, `bfloat16` or `float32`.
    router_bias_step: how far a step moves the bias of a router.
  """

  config: ModelConfig
  compute_dtype: str
  router_bias_step: float

  def init(self, key: jax.Array) -> Params:
    return init_params(self.config, key, jnp.float32)

  def loss(
    self, params: Params, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> tuple[Float32[Array, ''], Float32[Array, 'moe_layers E']]:
    del constants, key
    losses, routing = self._losses(params, batch)
    counted = batch.counted.astype(jnp.float32)
    loss = jnp.sum(losses * counted) / jnp.maximum(counted.sum(), 1.0)
    return loss, expert_loads(self.config, routing)

  def after_step(
    self, params: Params, aux: Float32[Array, 'moe_layers E']
  ) -> tuple[Params, dict[str, jax.Array]]:
    params = balance_experts(self.config, params, aux, self.router_bias_step)
    if not aux.shape[0]:
      return params, {}
    # The load of the busiest expert over the mean, in the worst layer.
    worst = aux.max(axis=1) / aux.mean(axis=1)
    return params, {'expert_load': worst.max()}

  def evaluate(
    self,
    params: Params,
    constants: Int32[Array, ' V'],
    batch: PackedBatch,
    key: jax.Array,
  ) -> dict[str, jax.Array]:
    del key
    losses, _ = self._losses(params, batch)
    counted = batch.counted
    return {
      'nats': jnp.sum(jnp.where(counted, losses, 0.0)),
      'tokens': jnp.sum(counted.astype(jnp.int32)),
      'bytes': jnp.sum(jnp.where(counted, constants[batch.labels], 0)),
    }

  def report(self, sums: Mapping[str, np.ndarray]) -> dict[str, Any]:
    nats = float(sums['nats'])
    return {
      'loss': nats / max(int(sums['tokens']), 1),
      'bits_per_byte': nats / math.log(2) / max(int(sums['bytes']), 1),
    }

  def _losses(
    self, params: Params, batch: PackedBatch
  ) -> tuple[Float32[Array, 'B T'], tuple[Routing, ...]]:
    """The loss of each token and the routing of every MoE layer."""
    cast = compute_params(params, jnp.dtype(self.compute_dtype))
    out = packed_forward(self.config, cast, batch)
    logits = packed_logits(self.config, cast, out.hidden)
    return negative_log_likelihood(logits, batch.labels), out.routing


def expert_loads(
  config: ModelConfig, routing: Sequence[Routing]
) -> Float32[Array, 'moe_layers E']:
  """How many tokens chose each expert, for every MoE layer."""
  experts = jnp.arange(config.n_routed_experts, dtype=jnp.int32)
  loads = [
    jnp.sum(
      (layer.ids.reshape(-1, 1) == experts[None]).astype(jnp.float32), axis=0
    )
    for layer in routing
  ]
  return jnp.stack(loads) if loads else jnp.zeros((0, 1), jnp.float32)


def balance_experts(
  config: ModelConfig,
  params: Params,
  loads: Float32[Array, 'moe_layers E'],
  step: float,
) -> Params:
  """Moves the biases of routers towards experts below the mean load.

  DeepSeek-V3 (arXiv 2412.19437, sec. 2.1.2): up by `step` if an expert has less
  than its share of the batch, down if it has more. The bias affects the choice
  only, so no gradient reaches it.
  """
  if config.topk_method != 'noaux_tc':
    return params
  layers = [
    i for i in range(config.num_hidden_layers) if config.is_moe_layer(i)
  ]
  # New dicts of the same arrays, so that the caller's stay as they are.
  params = jax.tree.map(lambda x: x, params)
  for load, layer in zip(loads, layers, strict=True):
    gate = params[f'layers_{layer}']['mlp']['gate']
    gate[BIAS] = gate[BIAS] + step * jnp.sign(load.mean() - load)
  return params
