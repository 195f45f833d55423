"""Parameters of targets and drafters from checkpoints, and back to tensors."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.io.checkpoint_extras import NO_EXTRAS, Extras
from kdtree_jax.io.checkpoint_tensors import (
  Match,
  match_drafter,
  match_target,
  tensor_shapes,
)
from kdtree_jax.io.parameter_reader import ParameterReader, Progress
from kdtree_jax.io.quantization import (
  PACKED,
  SCALE,
  SCALE_INV,
  SHAPE,
  Quantization,
)
from kdtree_jax.io.tensors import CheckpointError, TensorSource
from pallas_kernels.quantized import QuantizedArray

# Nested dicts of parameters, as in linen.
type Params = dict[str, Any]


def target_params(
  config: ModelConfig,
  source: TensorSource,
  dtype: DTypeLike,
  *,
  source_name: str,
  quantization: Quantization | None = None,
  extras: Extras = NO_EXTRAS,
  weights_dtype: DTypeLike | None = None,
  progress: Progress | None = None,
) -> Params:
  """Loads a target: the tree of `model.abstract_params(config, dtype)`.

  All names, shapes and dtypes are checked before anything is read. A tensor
  goes to the device as it is read, an expert into its place in the stack, so
  that the host never holds more than one.

  Args:
    config: the architecture.
    source: tensors under Hugging Face names, experts fused or one by one.
    dtype: dtype of all parameters but the router's, which are float32.
    source_name: the checkpoint's name for messages.
    quantization: how quantised tensors are stored, if there are any.
    extras: skipped parts that the checkpoint may hold.
    weights_dtype: None keeps quantised weights quantised; a dtype dequantises
      them and rounds every weight but the router's to it, before `dtype`.
    progress: called with the size in bytes of each tensor that was read.

  Returns:
    Nested dict of arrays. `kv_b_proj` is split into `k_b_proj [H, R, nope]` and
    `v_b_proj [H, v, R]`; experts are stacked, gate rows before up rows. Weights
    that stay quantised are QuantizedArrays, except `kv_b_proj`, which is always
    dequantised: its blocks of scales do not end where its heads do.

  Raises:
    CheckpointError: see `match_target`; a weight or scale that is not finite;
      or a head that is tied to the embedding and is not equal to it.
  """
  match = match_target(
    config,
    source,
    source_name=source_name,
    quantization=quantization,
    extras=extras,
  )
  reader = ParameterReader(
    source,
    match,
    dtype,
    source_name=source_name,
    quantization=quantization,
    weights_dtype=weights_dtype,
    progress=progress,
  )
  reader.check_tied_head()
  params: Params = {}
  for name in _weights(match):
    if '.mlp.experts.' in name:
      continue
    elif name.endswith('.kv_b_proj.weight'):
      prefix = name.removesuffix('kv_b_proj.weight')
      k_b, v_b = _split_kv_b(config, reader.dequantized(name))
      _insert(params, prefix + 'k_b_proj', k_b)
      _insert(params, prefix + 'v_b_proj', v_b)
    elif '.mlp.gate.' in name:
      _insert(params, name, reader.plain(name, np.float32))
    else:
      _insert(params, name, reader.parameter(name))
  for layer in range(config.num_hidden_layers):
    if config.is_moe_layer(layer):
      for name, value in _experts(config, reader, layer):
        _insert(params, name, value)
  return params


def drafter_params(
  config: DrafterConfig,
  source: TensorSource,
  dtype: DTypeLike,
  *,
  source_name: str,
  progress: Progress | None = None,
) -> Params:
  """Loads a DFlash drafter; see `target_params`.

  Returns:
    Nested dict of arrays: `fc`, `hidden_norm`, `norm`, `layers_i`; if the
    drafter has its own, also `embed_tokens`, `lm_head` and `d2t`.

  Raises:
    CheckpointError: see `match_drafter`; a weight that is not finite; or a
      `d2t` that leads outside the vocabulary or disagrees with `t2d`.
  """
  match = match_drafter(config, source, source_name=source_name)
  reader = ParameterReader(
    source, match, dtype, source_name=source_name, progress=progress
  )
  params: Params = {}
  for name in match.names:
    if name not in ('d2t', 't2d'):
      _insert(params, name, reader.plain(name))
  if config.draft_vocab_size is not None:
    offsets = np.zeros(config.draft_vocab_size, np.int32)
    if 'd2t' in match.names:
      offsets = source.read(match.names['d2t'])
    _check_offsets(config, offsets, source, match, source_name)
    params['d2t'] = jnp.asarray(offsets.astype(np.int32))
  return params


def _check_offsets(
  config: DrafterConfig,
  offsets: np.ndarray,
  source: TensorSource,
  match: Match,
  source_name: str,
) -> None:
  """Checks `d2t [draft_vocab_size]`: a draft id plus its offset is a target id.

  Every draft id must map to another id of the target, of those in the mask
  `t2d` if there is one.
  """
  ids = np.arange(len(offsets)) + offsets
  inside = 0 <= ids.min() and ids.max() < config.vocab_size
  if not inside or len(np.unique(ids)) != len(ids):
    raise CheckpointError(
      f"{source_name}: tensor 'd2t' does not lead to different ids of the "
      f'{config.vocab_size}'
    )
  if 't2d' in match.names:
    mask = source.read(match.names['t2d'])
    if not np.array_equal(mask, np.isin(np.arange(len(mask)), ids)):
      raise CheckpointError(
        f"{source_name}: tensor 't2d' does not mark the ids that 'd2t' leads to"
      )


def _weights(match: Match) -> Iterator[str]:
  """Names of parameters; a quantised weight's is given instead of its parts."""
  for name in match.names:
    stem, _, part = name.rpartition('.')
    if part == PACKED:
      yield f'{stem}.weight'
    elif part not in (SCALE, SCALE_INV, SHAPE):
      yield name


def _experts(
  config: ModelConfig, reader: ParameterReader, layer: int
) -> Iterator[tuple[str, jax.Array | QuantizedArray]]:
  """The two stacks of a layer's routed experts."""
  prefix = f'model.layers.{layer}.mlp.experts.'
  for stack, projections in (
    ('gate_up_proj', ('gate_proj', 'up_proj')),
    ('down_proj', ('down_proj',)),
  ):
    if prefix + stack in reader.match.names:
      yield prefix + stack, reader.plain(prefix + stack)
      continue
    names = [
      [f'{prefix}{expert}.{projection}.weight' for projection in projections]
      for expert in range(config.n_routed_experts)
    ]
    yield prefix + stack, reader.stacked(names)


def _split_kv_b(
  config: ModelConfig, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """`kv_b_proj` as keys `[H, R, nope]` and values `[H, v, R]` of each head.

  The weight `[H * (nope + v), R]` has each head's keys before its values.
  """
  heads, nope = config.num_attention_heads, config.qk_nope_head_dim
  weight = weight.reshape(heads, nope + config.v_head_dim, -1)
  return weight[:, :nope].swapaxes(1, 2), weight[:, nope:]


def target_tensors(
  config: ModelConfig, params: Params, dtype: DTypeLike
) -> dict[str, np.ndarray]:
  """The tensors of a checkpoint by Hugging Face name, experts one by one.

  The inverse of `target_params`.

  Args:
    config: the target's architecture.
    params: plain parameters; quantised ones have no place in a bundle.
    dtype: dtype of all tensors but the router's, which are float32.
  """
  host = jax.device_get(params)

  def find(name: str) -> np.ndarray:
    value = host
    for part in _path(name):
      value = value[part]
    return value

  def tensor(name: str) -> np.ndarray:
    if name.endswith('.kv_b_proj.weight'):
      prefix = name.removesuffix('kv_b_proj.weight')
      keys = find(prefix + 'k_b_proj').swapaxes(1, 2)
      both = np.concatenate([keys, find(prefix + 'v_b_proj')], axis=1)
      return both.reshape(-1, config.kv_lora_rank)
    if '.mlp.experts.' in name:
      return expert_projection(config, find, name)
    return find(name)

  return {
    name: tensor(name).astype(np.float32 if '.mlp.gate.' in name else dtype)
    for name in tensor_shapes(config)
  }


def expert_projection(
  config: ModelConfig, find: Callable[[str], np.ndarray], name: str
) -> np.ndarray:
  """One expert's projection, by its name, from the stack of its layer.

  Args:
    config: the target's architecture.
    find: gives a stack by its name.
    name: `model.layers.0.mlp.experts.0.up_proj.weight` and the like.
  """
  prefix, mark, rest = name.partition('.mlp.experts.')
  expert, projection, _ = rest.split('.')
  width = config.moe_intermediate_size
  if projection == 'down_proj':
    return find(prefix + mark + projection)[int(expert)]
  both = find(prefix + mark + 'gate_up_proj')[int(expert)]
  return both[:width] if projection == 'gate_proj' else both[width:]


def _path(name: str) -> list[str]:
  """`layers_0`, `mlp`, `x` for `model.layers.0.mlp.x`."""
  path = re.sub(r'(^|\.)layers\.(\d+)\.', r'\1layers_\2.', name)
  return path.removeprefix('model.').split('.')


def _insert(params: Params, name: str, value: Any) -> None:
  *parents, leaf = _path(name)
  for parent in parents:
    params = params.setdefault(parent, {})
  params[leaf] = value
