"""What a target learns: the next token, and to use all of its experts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import ModelConfig
from kdtree_jax.model import ForwardOutput, Transformer, init_cache, init_params
from kdtree_jax.training.packing import PackedBatch

BIAS = 'e_score_correction_bias'


def compute_params(params: Any, dtype: Any) -> Any:
  """Parameters as a forward wants them: `dtype`, but the router's float32."""

  def cast(path, value):
    names = [getattr(key, 'key', None) for key in path]
    return value if 'gate' in names else value.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def packed_forward(
  config: ModelConfig,
  params: Any,
  batch: PackedBatch,
  *,
  tap_layers: tuple[int, ...] = (),
  implementation: str | None = 'training',
) -> ForwardOutput:
  """One forward over packed documents, without a cache.

  Args:
    config: of the target.
    params: of any dtype, quantised ones included.
    batch: B windows of L tokens.
    tap_layers: see `Transformer`.
    implementation: `training` for gradients and for plain weights; None for a
      frozen target that may be quantised.
  """
  # The embedding is never quantised; what is computed has its dtype.
  dtype = params['embed_tokens']['weight'].dtype
  model = Transformer(
    config, tap_layers=tap_layers, implementation=implementation
  )
  return model.apply(
    {'params': params},
    batch.tokens,
    batch.positions,
    init_cache(config, batch.tokens.shape[0], 0, dtype),
    jnp.ones(batch.tokens.shape, jnp.bool_),
    batch.ancestors,
  )


def packed_logits(
  config: ModelConfig, params: Any, hidden: jax.Array
) -> jax.Array:
  """`ForwardOutput.hidden` to `[B, L, V]` float32 logits."""
  model = Transformer(config)
  return model.apply({'params': params}, hidden, method='logits')


def negative_log_likelihood(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """`[..., V]` float32 and `[...]` int32 to `[...]` nats."""
  ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  # A sum, not a gather: its gradient is no scatter, and both fuse.
  chosen = jnp.where(ids == labels[..., None], logits, 0.0).sum(axis=-1)
  return jax.nn.logsumexp(logits, axis=-1) - chosen


@dataclasses.dataclass(frozen=True)
class TargetTask:
  """Next-token prediction; see `loop.Task`.

  Attributes:
    config: of the target.
    compute_dtype: of the forward, `bfloat16` or `float32`.
    router_bias_step: how far a step moves the bias of a router.

  `constants` is `[V]` int32, the bytes of each token.
  """

  config: ModelConfig
  compute_dtype: str
  router_bias_step: float

  def init(self, key: jax.Array) -> Any:
    return init_params(self.config, key, jnp.float32)

  def loss(self, params, constants, batch, key):
    del constants, key
    losses, routing = self._losses(params, batch)
    counted = batch.counted.astype(jnp.float32)
    loss = jnp.sum(losses * counted) / jnp.maximum(counted.sum(), 1.0)
    return loss, expert_loads(self.config, routing)

  def after_step(self, params, loads):
    params = balanced(self.config, params, loads, self.router_bias_step)
    if not loads.shape[0]:
      return params, {}
    # Of the busiest expert, in the worst layer.
    worst = loads.max(axis=1) / loads.mean(axis=1)
    return params, {'expert_load': worst.max()}

  def evaluate(self, params, constants, batch, key):
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

  def _losses(self, params, batch):
    """`[B, L]` nats and the routing of every MoE layer."""
    cast = compute_params(params, jnp.dtype(self.compute_dtype))
    out = packed_forward(self.config, cast, batch)
    logits = packed_logits(self.config, cast, out.hidden)
    return negative_log_likelihood(logits, batch.labels), out.routing


def expert_loads(config: ModelConfig, routing: Any) -> jax.Array:
  """`[MoE layers, E]` float32: how many rows chose each expert."""
  experts = jnp.arange(config.n_routed_experts, dtype=jnp.int32)
  loads = [
    jnp.sum(
      (layer.ids.reshape(-1, 1) == experts[None]).astype(jnp.float32), axis=0
    )
    for layer in routing
  ]
  return jnp.stack(loads) if loads else jnp.zeros((0, 1), jnp.float32)


def balanced(
  config: ModelConfig, params: Any, loads: jax.Array, step: float
) -> Any:
  """Moves every router's bias towards the experts with less than the mean.

  DeepSeek-V3 (arXiv 2412.19437, sec. 2.1.2): up by `step` if an expert has less
  than its share of the batch, down if it has more. The bias changes the choice
  only, so no gradient reaches it.
  """
  if config.topk_method != 'noaux_tc':
    return params
  layers = [
    i for i in range(config.num_hidden_layers) if config.is_moe_layer(i)
  ]
  params = dict(params)
  for load, layer in zip(loads, layers, strict=True):
    name = f'layers_{layer}'
    block = dict(params[name])
    mlp = dict(block['mlp'])
    gate = dict(mlp['gate'])
    gate[BIAS] = gate[BIAS] + step * jnp.sign(load.mean() - load)
    mlp['gate'], block['mlp'], params[name] = gate, mlp, block
  return params
