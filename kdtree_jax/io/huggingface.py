"""Hugging Face checkpoints: config.json and safetensors, read strictly."""

# ruff: noqa: F401 (what other packages import from here)
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
