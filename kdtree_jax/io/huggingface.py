"""Checkpoints of Hugging Face: config.json and safetensors, read strictly."""

from kdtree_jax.io.checkpoint_config import (
  drafter_config,
  is_drafter,
  model_config,
  stop_ids,
)
from kdtree_jax.io.checkpoint_weights import (
  Match,
  drafter_params,
  drafter_shapes,
  match_drafter,
  match_target,
  target_params,
  tensor_shapes,
)
from kdtree_jax.io.tensors import read_json

__all__ = (
  'Match',
  'drafter_config',
  'drafter_params',
  'drafter_shapes',
  'is_drafter',
  'match_drafter',
  'match_target',
  'model_config',
  'read_json',
  'stop_ids',
  'target_params',
  'tensor_shapes',
)
