"""Parameters back to the tensors of a checkpoint, by Hugging Face names."""

import re
from typing import Any

import jax
import numpy as np

from kdtree_jax.config import ModelConfig
from kdtree_jax.io.checkpoint_tensors import tensor_shapes


def target_tensors(
  config: ModelConfig, params: Any, dtype: Any
) -> dict[str, np.ndarray]:
  """The inverse of `target_params`, experts one by one.

  Args:
    config: of the target.
    params: numbers only; quantised weights have no place in a bundle.
    dtype: of all tensors but the router's, which are float32.
  """
  host = jax.device_get(params)
  tensors = {}
  for name in tensor_shapes(config):
    kind = np.float32 if '.mlp.gate.' in name else dtype
    tensors[name] = _tensor(config, host, name).astype(kind)
  return tensors


def _tensor(config: ModelConfig, params: Any, name: str) -> np.ndarray:
  if name.endswith('.kv_b_proj.weight'):
    prefix = name.removesuffix('kv_b_proj.weight')
    keys = _find(params, prefix + 'k_b_proj').swapaxes(1, 2)
    both = np.concatenate([keys, _find(params, prefix + 'v_b_proj')], axis=1)
    return both.reshape(-1, config.kv_lora_rank)
  prefix, mark, rest = name.partition('.mlp.experts.')
  if not mark:
    return _find(params, name)
  expert, projection, _ = rest.split('.')
  width = config.moe_intermediate_size
  if projection == 'down_proj':
    return _find(params, prefix + mark + projection)[int(expert)]
  stack = _find(params, prefix + mark + 'gate_up_proj')[int(expert)]
  return stack[:width] if projection == 'gate_proj' else stack[width:]


def _find(params: Any, name: str) -> np.ndarray:
  """What `model.layers.0.mlp.x` is filed under, `layers_0`, `mlp`, `x`."""
  path = re.sub(r'(^|\.)layers\.(\d+)\.', r'\1layers_\2.', name)
  for part in path.removeprefix('model.').split('.'):
    params = params[part]
  return params
