"""Training of a DFlash drafter for any target of the engine."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.drafters.dflash import DFlashDrafter, default_target_layer_ids
from kdtree_jax.errors import UserError
from kdtree_jax.io.checkpoint_weights import Params
from kdtree_jax.model import ForwardOutput, Transformer
from kdtree_jax.training.drafting import (
  DraftLoss,
  draft_loss,
  frozen_forward,
  sample_anchors,
)
from kdtree_jax.training.packing import PackedBatch
from kdtree_jax.training.recipe import DrafterRecipe
from kdtree_jax.training.validation import measure_acceptance

# Tree budgets of the validation.
BUDGETS = (16, 64)


def config_from_recipe(
  recipe: DrafterRecipe, target: ModelConfig, mask: int
) -> DrafterConfig:
  """The config of a drafter that a recipe describes.

  Args:
    recipe: the drafter's shape.
    target: the target's config, whose widths and positions it shares.
    mask: id of the mask token in a block.

  Raises:
    UserError: the recipe does not fit this target.
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
  """The task (see `loop.Task`) of a drafter that learns from a frozen target.

  Its constants are the target's parameters, as stored.

  Attributes:
    recipe: the settings of loss and validation.
    target: the target's config.
    config: the drafter's config.
  """

  recipe: DrafterRecipe
  target: ModelConfig
  config: DrafterConfig

  @property
  def _models(self) -> tuple[DFlashDrafter, Transformer]:
    drafter = DFlashDrafter(self.config, self.config.block_size)
    return drafter, Transformer(self.target, drafter.tap_layers)

  def init(self, key: jax.Array) -> Params:
    return self._models[0].init_params(key, jnp.float32)

  def loss(
    self, params: Params, constants: Params, batch: PackedBatch, key: jax.Array
  ) -> tuple[Float32[Array, ''], DraftLoss]:
    out = frozen_forward(self._models[1], constants, batch)
    result = self._loss(params, constants, out, batch, key)
    return result.loss, result

  def after_step(
    self, params: Params, aux: DraftLoss
  ) -> tuple[Params, dict[str, jax.Array]]:
    count = jnp.maximum(aux.count, 1.0)
    means = {
      'divergence': aux.divergence.sum() / count.sum(),
      'accuracy': aux.matches / count,
      'anchors': aux.count[0].astype(jnp.int32),
    }
    return params, means

  def evaluate(
    self, params: Params, constants: Params, batch: PackedBatch, key: jax.Array
  ) -> dict[str, jax.Array]:
    drafter, target = self._models
    out = frozen_forward(target, constants, batch)
    result = self._loss(params, constants, out, batch, key)
    sums = measure_acceptance(
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
    """Means of the sums: divergences from the target in nats, and accuracies.

    `accuracy` is how often a slot's most probable token is the target's after
    the same text, `text_accuracy` how often it is the text's;
    `expected_acceptance_length` is 1 + sum_k prod_{i <= k} text_accuracy_i;
    `acceptance_length_*` are measured, see `measure_acceptance`.
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

  def _loss(
    self,
    params: Params,
    constants: Params,
    out: ForwardOutput,
    batch: PackedBatch,
    key: jax.Array,
  ) -> DraftLoss:
    drafter, target = self._models
    anchors = sample_anchors(key, batch, self.recipe.anchors)
    # Nothing is learnt from windows that fill up a batch.
    live = batch.counted.any(axis=1, keepdims=True)
    return draft_loss(
      drafter,
      self._cast(params),
      target,
      constants,
      out,
      batch,
      anchors.replace(valid=anchors.valid & live),
      gamma=self.recipe.gamma,
      prefix_power=self.recipe.prefix_power,
      hard_weight=self.recipe.hard_weight,
    )

  def _cast(self, params: Params) -> Params:
    dtype = jnp.dtype(self.recipe.compute_dtype)
    return jax.tree.map(lambda p: p.astype(dtype), params)
