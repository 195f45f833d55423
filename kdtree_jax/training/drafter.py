"""A DFlash drafter as something to learn, for any target of the engine."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.drafters.dflash import DFlashDrafter, default_target_layer_ids
from kdtree_jax.model import Transformer
from kdtree_jax.training.acceptance import measure
from kdtree_jax.training.drafting import (
  draft_loss,
  frozen_forward,
  sample_anchors,
)
from kdtree_jax.training.packing import PackedBatch
from kdtree_jax.training.recipe import DrafterRecipe

# Budgets of the trees that a validation grows.
BUDGETS = (16, 64)


def drafter_config(
  recipe: DrafterRecipe, target: ModelConfig, mask: int
) -> DrafterConfig:
  """The drafter of a target.

  Args:
    recipe: the drafter's shape.
    target: whose widths and positions it shares.
    mask: id of the token that stands for "unknown" in a block.

  Raises:
    UserError: it does not fit this target.
  """
  taps, layers = recipe.target_layer_ids, target.num_hidden_layers
  if taps is None:
    taps = default_target_layer_ids(layers, recipe.num_hidden_layers)
    taps = tuple(min(max(tap, 0), layers - 1) for tap in taps)
  return DrafterConfig(
    hidden_size=target.hidden_size,
    num_hidden_layers=recipe.num_hidden_layers,
    num_attention_heads=recipe.num_attention_heads,
    num_key_value_heads=recipe.num_key_value_heads,
    head_dim=recipe.head_dim,
    intermediate_size=recipe.intermediate_size,
    vocab_size=target.vocab_size,
    block_size=recipe.block_size,
    mask_token_id=mask,
    target_layer_ids=taps,
    num_target_layers=layers,
    rms_norm_eps=target.rms_norm_eps,
    rope_theta=target.rope_theta,
    max_position_embeddings=target.max_position_embeddings,
  )


class DraftTask:
  """See `loop.Task`; its constants are the target's parameters, as stored."""

  def __init__(
    self, recipe: DrafterRecipe, target: ModelConfig, config: DrafterConfig
  ):
    self._recipe = recipe
    self._drafter = DFlashDrafter(config, config.block_size)
    self._target = Transformer(target, tap_layers=config.target_layer_ids)
    self._loss = functools.partial(
      draft_loss, gamma=recipe.gamma, hard_weight=recipe.hard_weight
    )

  def init(self, key: jax.Array) -> Any:
    return self._drafter.init_params(key, jnp.float32)

  def loss(
    self, params: Any, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> tuple[jax.Array, Any]:
    out = frozen_forward(self._target, constants, batch)
    anchors = sample_anchors(key, batch, self._recipe.anchors)
    params = self._cast(params)
    result = self._loss(
      self._drafter, params, self._target, constants, out, batch, anchors
    )
    return result.loss, result

  def after_step(
    self, params: Any, aux: Any
  ) -> tuple[Any, dict[str, jax.Array]]:
    count = jnp.maximum(aux.count, 1.0)
    means = {
      'divergence': aux.divergence.sum() / count.sum(),
      'accuracy': aux.matches / count,
      'anchors': aux.count[0].astype(jnp.int32),
    }
    return params, means

  def evaluate(
    self, params: Any, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> dict[str, jax.Array]:
    out = frozen_forward(self._target, constants, batch)
    anchors = sample_anchors(key, batch, self._recipe.anchors)
    live = batch.counted.any(axis=1, keepdims=True)
    anchors = anchors._replace(valid=anchors.valid & live)
    params = self._cast(params)
    result = self._loss(
      self._drafter, params, self._target, constants, out, batch, anchors
    )
    sums = measure(
      self._drafter,
      params,
      self._target,
      constants,
      out,
      batch,
      budgets=BUDGETS,
      first=self._recipe.prompt_tokens,
    )
    return sums | {
      'divergence': result.divergence,
      'matches': result.matches,
      'count': result.count,
    }

  def report(self, sums: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Means: divergence from the target in nats, by depth as well.

    `accuracy` holds how often the best token of a slot is the target's after
    the same text, `text_accuracy` how often it is the text's;
    `expected_acceptance_length` is 1 + sum_k prod_{i <= k} text_accuracy_i;
    `acceptance_length_*` are measured, see `acceptance.measure`.
    """
    count = np.maximum(sums['count'], 1)
    accuracy = sums['right'] / np.maximum(sums['slots'], 1)
    found = {
      'divergence': float(sums['divergence'].sum() / count.sum()),
      'divergence_by_depth': sums['divergence'] / count,
      'accuracy': sums['matches'] / count,
      'text_accuracy': accuracy,
      'expected_acceptance_length': float(1 + np.cumprod(accuracy).sum()),
    }
    lengths = sums['accepted'] / np.maximum(sums['rounds'], 1)
    names = ('chain', *(f'tree_{budget}' for budget in BUDGETS))
    for name, length in zip(names, lengths, strict=True):
      found[f'acceptance_length_{name}'] = float(length)
    return found

  def _cast(self, params: Any) -> Any:
    dtype = jnp.dtype(self._recipe.compute_dtype)
    return jax.tree.map(lambda p: p.astype(dtype), params)
