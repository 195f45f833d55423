"""A DFlash drafter as something to learn, for any target of the engine."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.drafters.dflash import DFlashDrafter, default_target_layer_ids
from kdtree_jax.errors import UserError
from kdtree_jax.model import Transformer
from kdtree_jax.training.acceptance import measure
from kdtree_jax.training.drafting import (
  DraftLoss,
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
  longest = recipe.sequence_length + recipe.block_size
  if longest > target.max_position_embeddings:
    raise UserError(
      f'recipe: sequence_length and block_size reach to {longest}, the target '
      f'to max_position_embeddings={target.max_position_embeddings}'
    )
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


@dataclasses.dataclass(frozen=True)
class DraftTask:
  """See `loop.Task`; its constants are the target's parameters, as stored.

  Attributes:
    recipe: what the loss and the validation need of it.
    target: the frozen model.
    config: of the drafter.
  """

  recipe: DrafterRecipe
  target: ModelConfig
  config: DrafterConfig

  @property
  def _models(self) -> tuple[DFlashDrafter, Transformer]:
    drafter = DFlashDrafter(self.config, self.config.block_size)
    return drafter, Transformer(self.target, drafter.tap_layers)

  def init(self, key: jax.Array) -> Any:
    return self._models[0].init_params(key, jnp.float32)

  def loss(
    self, params: Any, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> tuple[jax.Array, Any]:
    out = frozen_forward(self._models[1], constants, batch)
    result = self._loss(params, constants, out, batch, key)
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
    drafter, target = self._models
    out = frozen_forward(target, constants, batch)
    result = self._loss(params, constants, out, batch, key)
    sums = measure(
      drafter,
      self._cast(params),
      target,
      constants,
      out,
      batch,
      budgets=BUDGETS,
      first=self.recipe.prompt_tokens[0],
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

  def _loss(self, params, constants, out, batch, key) -> DraftLoss:
    drafter, target = self._models
    anchors = sample_anchors(key, batch, self.recipe.anchors)
    # A window that fills up a batch teaches nothing.
    live = batch.counted.any(axis=1, keepdims=True)
    return draft_loss(
      drafter,
      self._cast(params),
      target,
      constants,
      out,
      batch,
      anchors._replace(valid=anchors.valid & live),
      gamma=self.recipe.gamma,
      prefix_power=self.recipe.prefix_power,
      hard_weight=self.recipe.hard_weight,
    )

  def _cast(self, params: Any) -> Any:
    dtype = jnp.dtype(self.recipe.compute_dtype)
    return jax.tree.map(lambda p: p.astype(dtype), params)
