"""Hugging Face tensors to linen parameters; every tensor accounted for."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.io.files import show
from kdtree_jax.io.tensors import FLOAT_DTYPES, CheckpointError, TensorSource

Shapes = dict[str, tuple[int, ...]]

# Far above any real model: a config must not make us list names for hours.
_MAX_EXPERTS = 1_000_000

# Where exports put the language model, and the one spelling used here.
_TARGET_PREFIXES = (
  ('language_model.model.', 'model.'),
  ('model.language_model.', 'model.'),
  ('language_model.lm_head.', 'lm_head.'),
)
_DRAFTER_ALIASES = (
  ('encoder.fc.', 'fc.'),
  ('encoder.output_norm_enc.', 'hidden_norm.'),
  ('midlayer.', 'layers.0.'),
)
_ROTARY_BUFFER = 'rotary_emb.inv_freq'
_LAYER = re.compile(r'model\.layers\.([0-9]{1,9})\.')


def tensor_shapes(config: ModelConfig) -> Shapes:
  """Every tensor of a checkpoint, experts one by one: name to shape.

  Linear weights are `[out, in]`.

  Raises:
    CheckpointError: more experts than any machine could hold.
  """
  c = config
  experts = c.num_hidden_layers * c.n_routed_experts
  if experts > _MAX_EXPERTS:
    raise CheckpointError(
      f'{c.num_hidden_layers} layers of {c.n_routed_experts} experts are more '
      f'than {_MAX_EXPERTS}'
    )
  shapes = {'model.embed_tokens.weight': (c.vocab_size, c.hidden_size)}
  for layer in range(c.num_hidden_layers):
    prefix = f'model.layers.{layer}.'
    shapes[prefix + 'input_layernorm.weight'] = (c.hidden_size,)
    shapes |= _attention_shapes(c, prefix + 'self_attn.')
    shapes[prefix + 'post_attention_layernorm.weight'] = (c.hidden_size,)
    mlp = prefix + 'mlp.'
    if c.is_moe_layer(layer):
      shapes |= _moe_shapes(c, mlp)
    else:
      shapes |= _swiglu_shapes(mlp, c.hidden_size, c.intermediate_size)
  shapes['model.norm.weight'] = (c.hidden_size,)
  if not c.tie_word_embeddings:
    shapes['lm_head.weight'] = (c.vocab_size, c.hidden_size)
  return shapes


def _attention_shapes(c: ModelConfig, prefix: str) -> Shapes:
  heads, r, h = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
  shapes = {}
  if c.q_lora_rank is None:
    shapes['q_proj.weight'] = (heads * c.qk_head_dim, h)
  else:
    shapes['q_a_proj.weight'] = (c.q_lora_rank, h)
    shapes['q_a_layernorm.weight'] = (c.q_lora_rank,)
    shapes['q_b_proj.weight'] = (heads * c.qk_head_dim, c.q_lora_rank)
  shapes['kv_a_proj_with_mqa.weight'] = (r + c.qk_rope_head_dim, h)
  shapes['kv_a_layernorm.weight'] = (r,)
  shapes['kv_b_proj.weight'] = (heads * (c.qk_nope_head_dim + c.v_head_dim), r)
  shapes['o_proj.weight'] = (h, heads * c.v_head_dim)
  if c.attention_bias:
    for name in ('q_a_proj', 'kv_a_proj_with_mqa', 'o_proj'):
      if f'{name}.weight' in shapes:
        shapes[f'{name}.bias'] = shapes[f'{name}.weight'][:1]
  return {prefix + name: shape for name, shape in shapes.items()}


def _moe_shapes(c: ModelConfig, prefix: str) -> Shapes:
  h, width = c.hidden_size, c.moe_intermediate_size
  shapes = {prefix + 'gate.weight': (c.n_routed_experts, h)}
  if c.topk_method == 'noaux_tc':
    shapes[prefix + 'gate.e_score_correction_bias'] = (c.n_routed_experts,)
  for expert in range(c.n_routed_experts):
    shapes |= _swiglu_shapes(f'{prefix}experts.{expert}.', h, width)
  if c.n_shared_experts:
    shared = width * c.n_shared_experts
    shapes |= _swiglu_shapes(prefix + 'shared_experts.', h, shared)
  return shapes


def _swiglu_shapes(prefix: str, hidden: int, width: int) -> Shapes:
  return {
    f'{prefix}gate_proj.weight': (width, hidden),
    f'{prefix}up_proj.weight': (width, hidden),
    f'{prefix}down_proj.weight': (hidden, width),
  }


def drafter_shapes(config: DrafterConfig) -> Shapes:
  """Every tensor of a DFlash drafter in z-lab's layout: name to shape."""
  c, h = config, config.hidden_size
  queries = c.num_attention_heads * c.head_dim
  keys = c.num_key_value_heads * c.head_dim
  shapes = {'fc.weight': (h, len(c.target_layer_ids) * h)}
  shapes['hidden_norm.weight'] = shapes['norm.weight'] = (h,)
  projections = {
    'q_proj': (queries, h),
    'k_proj': (keys, h),
    'v_proj': (keys, h),
    'o_proj': (h, queries),
  }
  for layer in range(c.num_hidden_layers):
    prefix = f'layers.{layer}.'
    shapes[prefix + 'input_layernorm.weight'] = (h,)
    shapes[prefix + 'post_attention_layernorm.weight'] = (h,)
    for name, shape in projections.items():
      shapes[f'{prefix}self_attn.{name}.weight'] = shape
      if c.attention_bias:
        shapes[f'{prefix}self_attn.{name}.bias'] = shape[:1]
    for name in ('q_norm', 'k_norm'):
      shapes[f'{prefix}self_attn.{name}.weight'] = (c.head_dim,)
    shapes |= _swiglu_shapes(prefix + 'mlp.', h, c.intermediate_size)
  return shapes


@dataclasses.dataclass(frozen=True)
class Match:
  """A source's tensors, each assigned to a parameter or skipped.

  Attributes:
    names: canonical name to the source's own.
    skipped: the source's own name to the reason.
  """

  names: dict[str, str]
  skipped: dict[str, str]


def match_target(
  config: ModelConfig, source: TensorSource, *, source_name: str
) -> Match:
  """Assigns every tensor of a target's checkpoint; reads headers only.

  Skipped are rotary buffers (computed from the config), layers from
  `num_hidden_layers` on (multi-token prediction), the vision parts of a
  multimodal model, and the head of a model that ties it to the embedding.

  Raises:
    CheckpointError: a tensor is missing, unknown, there twice, of another
      shape or of an unsupported dtype.
  """
  canonical = _canonical(source, _canonical_target, source_name)
  expected = _fuse_experts(config, tensor_shapes(config), canonical)

  def reason(name: str) -> str | None:
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= config.num_hidden_layers:
      return 'layer behind the last (multi-token prediction)'
    if name.startswith(('vision_tower.', 'mm_projector.')):
      return 'vision'
    if layer and name.endswith('.' + _ROTARY_BUFFER):
      return 'rotary buffer'
    if name == 'lm_head.weight' and config.tie_word_embeddings:
      return 'tied to the embedding'
    return None

  return _match(source, canonical, expected, reason, source_name)


def match_drafter(
  config: DrafterConfig, source: TensorSource, *, source_name: str
) -> Match:
  """Assigns every tensor of a drafter; see `match_target`.

  Skipped are rotary buffers only.
  """
  canonical = _canonical(source, _canonical_drafter, source_name)

  def reason(name: str) -> str | None:
    rotary = name.split('.', 2)[-1] == 'self_attn.' + _ROTARY_BUFFER
    return 'rotary buffer' if rotary or name == _ROTARY_BUFFER else None

  expected = drafter_shapes(config)
  return _match(source, canonical, expected, reason, source_name)


def _canonical_target(name: str) -> str:
  for prefix, ours in _TARGET_PREFIXES:
    if name.startswith(prefix):
      return ours + name.removeprefix(prefix)
  return name


def _canonical_drafter(name: str) -> str:
  name = name.removeprefix('model.')
  for prefix, ours in _DRAFTER_ALIASES:
    if name.startswith(prefix):
      return ours + name.removeprefix(prefix)
  return name


def _canonical(
  source: TensorSource, rename: Callable[[str], str], source_name: str
) -> dict[str, str]:
  names: dict[str, str] = {}
  for name in source.names():
    other = names.setdefault(rename(name), name)
    if other != name:
      raise CheckpointError(
        f'{source_name}: tensors {show(other)} and {show(name)} are two names '
        'of one parameter'
      )
  return names


def _fuse_experts(
  config: ModelConfig, shapes: Shapes, present: dict[str, str]
) -> Shapes:
  """`shapes` with two stacked tensors a layer where the source has those."""
  fused_shapes = dict(shapes)
  e, h = config.n_routed_experts, config.hidden_size
  for layer in range(config.num_hidden_layers):
    prefix = f'model.layers.{layer}.mlp.experts.'
    fused = {
      prefix + 'gate_up_proj': (e, 2 * config.moe_intermediate_size, h),
      prefix + 'down_proj': (e, h, config.moe_intermediate_size),
    }
    if config.is_moe_layer(layer) and set(fused) & set(present):
      for expert in range(e):
        for name in _swiglu_shapes(f'{prefix}{expert}.', 0, 0):
          del fused_shapes[name]
      fused_shapes |= fused
  return fused_shapes


def _match(
  source: TensorSource,
  canonical: dict[str, str],
  expected: Shapes,
  skip_reason: Callable[[str], str | None],
  source_name: str,
) -> Match:
  names, skipped, unknown = {}, {}, []
  for name, own in canonical.items():
    if name in expected:
      names[name] = own
    elif reason := skip_reason(name):
      skipped[own] = reason
    else:
      unknown.append(own)
  missing = [name for name in expected if name not in names]
  _raise_first(source_name, missing, 'is missing, expected {}', expected)
  _raise_first(source_name, unknown, 'is not part of this architecture', {})
  for name, own in names.items():
    shape, dtype = source.shape(own), source.dtype(own)
    if shape != expected[name]:
      raise CheckpointError(
        f'{source_name}: tensor {show(own)} has shape {list(shape)}, the '
        f'config asks for {list(expected[name])}'
      )
    if dtype not in FLOAT_DTYPES:
      raise CheckpointError(
        f'{source_name}: tensor {show(own)} has dtype {dtype}; supported: '
        f'{", ".join(FLOAT_DTYPES)}'
      )
  return Match(names, skipped)


def _raise_first(
  source_name: str, names: list[str], problem: str, expected: Shapes
) -> None:
  if not names:
    return
  shape = list(expected.get(names[0], ()))
  more = f' (and {len(names) - 1} more like it)' if len(names) > 1 else ''
  raise CheckpointError(
    f'{source_name}: tensor {show(names[0])} {problem.format(shape)}{more}'
  )


def target_params(
  config: ModelConfig, source: TensorSource, dtype: Any, *, source_name: str
) -> dict[str, Any]:
  """Loads a target: the tree of `model.abstract_params(config, dtype)`.

  All names, shapes and dtypes are checked before anything is read, and one
  layer's experts are the most that is held twice.

  Args:
    config: the architecture.
    source: tensors under Hugging Face names, experts fused or one by one.
    dtype: of all parameters but the router's, which are float32.
    source_name: the checkpoint's name for messages.

  Returns:
    Nested dict of arrays. `kv_b_proj` is split into `k_b_proj [n, dn, r]` and
    `v_b_proj [n, dv, r]`; experts are stacked, gate rows before up rows.

  Raises:
    CheckpointError: see `match_target`.
  """
  names = match_target(config, source, source_name=source_name).names
  reader = _Reader(source, names, np.dtype(dtype))
  params: dict[str, Any] = {}
  for name in names:
    if '.mlp.experts.' in name:
      continue
    elif name.endswith('.kv_b_proj.weight'):
      prefix = name.removesuffix('kv_b_proj.weight')
      k_b, v_b = _split_kv_b(config, reader.read(name))
      _insert(params, prefix + 'k_b_proj', k_b)
      _insert(params, prefix + 'v_b_proj', v_b)
    elif '.mlp.gate.' in name:
      _insert(params, name, reader.read(name, np.dtype(np.float32)))
    else:
      _insert(params, name, reader.read(name))
  for layer in range(config.num_hidden_layers):
    if config.is_moe_layer(layer):
      prefix = f'model.layers.{layer}.mlp.experts.'
      _insert(params, prefix + 'gate_up_proj', reader.gate_up(config, prefix))
      _insert(params, prefix + 'down_proj', reader.down(config, prefix))
  return params


def drafter_params(
  config: DrafterConfig, source: TensorSource, dtype: Any, *, source_name: str
) -> dict[str, Any]:
  """Loads a DFlash drafter; see `target_params`.

  Returns:
    Nested dict of arrays: `fc`, `hidden_norm`, `norm`, `layers_i`.

  Raises:
    CheckpointError: see `match_drafter`.
  """
  names = match_drafter(config, source, source_name=source_name).names
  reader = _Reader(source, names, np.dtype(dtype))
  params: dict[str, Any] = {}
  for name in names:
    _insert(params, name, reader.read(name))
  return params


class _Reader:
  """Reads parameters by canonical name, cast to the dtype of the model."""

  def __init__(
    self, source: TensorSource, names: dict[str, str], dtype: np.dtype
  ):
    self._source, self._names, self._dtype = source, names, dtype

  def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
    value = self._source.read(self._names[name])
    return _cast(value, self._dtype if dtype is None else dtype)

  def gate_up(self, config: ModelConfig, prefix: str) -> np.ndarray:
    """`[E, 2 * moe_intermediate_size, H]`, gate rows first."""
    if prefix + 'gate_up_proj' in self._names:
      return self.read(prefix + 'gate_up_proj')
    e, i = config.n_routed_experts, config.moe_intermediate_size
    out = np.empty((e, 2 * i, config.hidden_size), self._dtype)
    for expert in range(e):
      out[expert, :i] = self.read(f'{prefix}{expert}.gate_proj.weight')
      out[expert, i:] = self.read(f'{prefix}{expert}.up_proj.weight')
    return out

  def down(self, config: ModelConfig, prefix: str) -> np.ndarray:
    """`[E, H, moe_intermediate_size]`."""
    if prefix + 'down_proj' in self._names:
      return self.read(prefix + 'down_proj')
    e, i = config.n_routed_experts, config.moe_intermediate_size
    out = np.empty((e, config.hidden_size, i), self._dtype)
    for expert in range(e):
      out[expert] = self.read(f'{prefix}{expert}.down_proj.weight')
    return out


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
  # Rounds to nearest even; what overflows becomes infinite, as in torch.
  with np.errstate(over='ignore'):
    return value.astype(dtype, copy=False)


def _split_kv_b(
  config: ModelConfig, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """`[n * (dn + dv), r]`, a head's keys before its values, in two."""
  heads, nope = config.num_attention_heads, config.qk_nope_head_dim
  weight = weight.reshape(heads, nope + config.v_head_dim, -1)
  return weight[:, :nope], weight[:, nope:]


def _insert(params: dict[str, Any], name: str, value: np.ndarray) -> None:
  """Files `model.layers.0.mlp.x` under `layers_0`, `mlp`, `x`, on the device.

  Always a copy: on a CPU JAX would otherwise share the source's memory.
  """
  path = re.sub(r'(^|\.)layers\.(\d+)\.', r'\1layers_\2.', name)
  *parents, leaf = path.removeprefix('model.').split('.')
  for parent in parents:
    params = params.setdefault(parent, {})
  params[leaf] = jnp.array(value, copy=True)
