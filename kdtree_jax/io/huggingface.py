"""Hugging Face checkpoints: config.json and safetensors, read strictly."""

from kdtree_jax.io.checkpoint_config import model_config, quantization
from kdtree_jax.io.checkpoint_extras import Extras, read_extras
from kdtree_jax.io.checkpoint_tensors import (
  Match,
  drafter_shapes,
  match_drafter,
  match_target,
  num_parameters,
  tensor_shapes,
)
from kdtree_jax.io.checkpoint_weights import drafter_params, target_params
from kdtree_jax.io.drafter_config import (
  drafter_config,
  is_drafter,
  with_attention_factor,
)
from kdtree_jax.io.parameter_reader import Progress
from kdtree_jax.io.stop_ids import bundle_stop_ids, stop_ids
from kdtree_jax.io.tensors import read_json

__all__ = (
  'Extras',
  'Match',
  'Progress',
  'bundle_stop_ids',
  'drafter_config',
  'drafter_params',
  'drafter_shapes',
  'is_drafter',
  'match_drafter',
  'match_target',
  'model_config',
  'num_parameters',
  'quantization',
  'read_extras',
  'read_json',
  'stop_ids',
  'target_params',
  'tensor_shapes',
  'with_attention_factor',
)
