"""The tensors of checkpoints: names, shapes, and which parameter each is."""

import dataclasses
import math
from collections.abc import Callable

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.io.checkpoint_extras import (
  NO_EXTRAS,
  TIED_HEAD,
  Extras,
  SkipRules,
  rotary_reason,
)
from kdtree_jax.io.files import show, show_more
from kdtree_jax.io.quantization import (
  FP8_DTYPE,
  PACKED,
  SCALE,
  SCALE_INV,
  SHAPE,
  Quantization,
  Shapes,
)
from kdtree_jax.io.tensors import FLOAT_DTYPES, CheckpointError, TensorSource

# Far above any real model; more would take hours to enumerate.
_MAX_EXPERTS = 1_000_000

type Aliases = tuple[tuple[str, str], ...]

# Prefixes of other exports and their canonical spelling, applied in order.
_TARGET_ALIASES: Aliases = (
  ('language_model.model.', 'model.'),
  ('model.language_model.', 'model.'),
  ('language_model.lm_head.', 'lm_head.'),
)
_DRAFTER_ALIASES: Aliases = (
  ('model.', ''),
  ('encoder.fc.', 'fc.'),
  ('encoder.output_norm_enc.', 'hidden_norm.'),
  ('midlayer.', 'layers.0.'),
)


def tensor_shapes(config: ModelConfig) -> Shapes:
  """Shapes of all tensors of a checkpoint by name, experts one by one.

  Linear weights are `[out, in]`.

  Raises:
    CheckpointError: there are more than a million experts.
  """
  c = config
  experts = c.num_hidden_layers * c.n_routed_experts
  if experts > _MAX_EXPERTS:
    raise CheckpointError(
      f'{c.num_hidden_layers} layers of {c.n_routed_experts} experts are more '
      f'than {_MAX_EXPERTS}'
    )
  shapes: Shapes = {'model.embed_tokens.weight': (c.vocab_size, c.hidden_size)}
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


def num_parameters(config: ModelConfig) -> int:
  """Number of parameters of a target, without multi-token layers."""
  return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _attention_shapes(c: ModelConfig, prefix: str) -> Shapes:
  heads, r, h = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
  shapes: Shapes = {}
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
  shapes: Shapes = {prefix + 'gate.weight': (c.n_routed_experts, h)}
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
  """Shapes of all tensors of a DFlash drafter by name.

  Embedding, head and `d2t`, which maps draft ids to the target's, are included
  if the drafter has its own (speculators' layout).
  """
  c, h = config, config.hidden_size
  queries = c.num_attention_heads * c.head_dim
  keys = c.num_key_value_heads * c.head_dim
  shapes: Shapes = {'fc.weight': (h, len(c.target_layer_ids) * h)}
  shapes |= {'hidden_norm.weight': (h,), 'norm.weight': (h,)}
  if c.own_embedding:
    shapes['embed_tokens.weight'] = (c.vocab_size, h)
  if c.draft_vocab_size is not None:
    shapes['lm_head.weight'] = (c.draft_vocab_size, h)
    if c.draft_vocab_size < c.vocab_size:
      shapes['d2t'] = (c.draft_vocab_size,)
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
  """The tensors of a source, each assigned to a parameter or skipped.

  Attributes:
    names: the source's name by canonical name.
    skipped: the reason by the source's name.
  """

  names: dict[str, str]
  skipped: dict[str, str]

  def format(self, name: str) -> str | None:
    """The storage format of a `*.weight`: `int4`, `fp8`, or None for plain."""
    stem = name.removesuffix('weight')
    if stem + PACKED in self.names:
      return 'int4'
    return 'fp8' if stem + SCALE_INV in self.names else None

  @property
  def tied_head(self) -> str | None:
    """The source's name of a stored head that must equal the embedding."""
    heads = (own for own, why in self.skipped.items() if why == TIED_HEAD)
    return next(heads, None)


def match_target(
  config: ModelConfig,
  source: TensorSource,
  *,
  source_name: str,
  quantization: Quantization | None = None,
  extras: Extras = NO_EXTRAS,
) -> Match:
  """Assigns every tensor of a target's checkpoint; reads headers only.

  A linear weight may be stored quantised: then its parts, `weight_packed` and
  so on, are the names.

  Skipped are rotary buffers (computed from the config), multi-token prediction
  layers and vision parts that `extras` announces, and the head of a model that
  ties it to the embedding.

  Raises:
    CheckpointError: a tensor is missing, unknown, there twice, of another
      shape or of an unsupported dtype, or is not quantised as `quantization`
      states.
  """
  canonical = _canonical(source, _TARGET_ALIASES, source_name)
  expected = _fuse_experts(config, tensor_shapes(config), canonical)
  expected = _quantize(quantization, expected, source, canonical, source_name)
  rules = SkipRules(config, extras, canonical)
  match = _match(
    source, canonical, expected, source_name, rules.reason, rules.hint
  )
  if match.tied_head is not None:
    wanted = expected['model.embed_tokens.weight']
    _check_shape(source, match.tied_head, wanted, source_name)
  return match


def match_drafter(
  config: DrafterConfig, source: TensorSource, *, source_name: str
) -> Match:
  """Assigns every tensor of a drafter; see `match_target`.

  Skipped are rotary buffers. A drafter with its own head may have `t2d`, a mask
  over the target's ids that repeats what `d2t` states.
  """
  canonical = _canonical(source, _DRAFTER_ALIASES, source_name)
  expected = drafter_shapes(config)
  if config.draft_vocab_size is not None:
    optional = {'d2t': config.draft_vocab_size, 't2d': config.vocab_size}
    expected |= {k: (size,) for k, size in optional.items() if k in canonical}

  def reason(name: str) -> str | None:
    is_buffer = name == 'rotary_emb.inv_freq'
    layer = 'layers.0.self_attn.' if is_buffer else ''
    return rotary_reason(layer + name, config.num_hidden_layers)

  return _match(source, canonical, expected, source_name, reason)


def _canonical(
  source: TensorSource, aliases: Aliases, source_name: str
) -> dict[str, str]:
  """The source's names by canonical name."""
  names: dict[str, str] = {}
  for name in source.names():
    canonical = name
    for prefix, replacement in aliases:
      if canonical.startswith(prefix):
        canonical = replacement + canonical.removeprefix(prefix)
    other = names.setdefault(canonical, name)
    if other != name:
      raise CheckpointError(
        f'{source_name}: tensors {show(other)} and {show(name)} are two names '
        'of one parameter'
      )
  return names


def _fuse_experts(
  config: ModelConfig, shapes: Shapes, present: dict[str, str]
) -> Shapes:
  """`shapes` with stacked experts in the layers where the source has them."""
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


def _quantizable(name: str) -> bool:
  """Whether a tensor is the weight of a linear map that may be quantised."""
  return name.endswith(('_proj.weight', '.kv_a_proj_with_mqa.weight'))


def _quantize(
  quantization: Quantization | None,
  shapes: Shapes,
  source: TensorSource,
  canonical: dict[str, str],
  source_name: str,
) -> Shapes:
  """`shapes` with the parts of each weight that the source has quantised."""
  out: Shapes = {}
  found = False
  for name, shape in shapes.items():
    stem = name.removesuffix('weight')
    own = canonical.get(name)
    packed = _quantizable(name) and stem + PACKED in canonical
    float8 = _quantizable(name) and own and source.dtype(own) == FP8_DTYPE
    if not packed and not float8:
      out[name] = shape
      continue
    format = 'int4' if packed else 'fp8'
    if quantization is None or quantization.format != format:
      own = canonical[stem + PACKED] if packed else own
      stated = quantization.format if quantization else 'no quantisation'
      raise CheckpointError(
        f'{source_name}: tensor {show(own)} is stored as {format}, but the '
        f'config states {stated}'
      )
    if packed and shape[1] % quantization.block[1]:
      raise CheckpointError(
        f'{source_name}: tensor {show(canonical[stem + PACKED])} stands for '
        f'{shape[1]} columns, which groups of {quantization.block[1]} do not '
        'divide'
      )
    found = True
    parts = quantization.part_shapes(shape)
    if packed and stem + SHAPE in canonical:
      parts[SHAPE] = (2,)
    out |= {stem + part: part_shape for part, part_shape in parts.items()}
  if quantization is not None and not found:
    raise CheckpointError(
      f'{source_name}: the config states {quantization.format}, but no tensor '
      'is stored so'
    )
  return out


def _allowed_dtypes(name: str, expected: Shapes) -> tuple[str, ...]:
  part = name.rsplit('.', 1)[-1]
  if part == PACKED:
    return ('I32',)
  if part in (SHAPE, 'd2t'):
    return ('I32', 'I64')
  if part == 't2d':
    return ('BOOL', 'U8', 'I32', 'I64')
  if part == 'weight' and name.removesuffix('weight') + SCALE_INV in expected:
    return (FP8_DTYPE,)
  if part in (SCALE, SCALE_INV):
    return ('F32', 'BF16')
  return tuple(FLOAT_DTYPES)


def _match(
  source: TensorSource,
  canonical: dict[str, str],
  expected: Shapes,
  source_name: str,
  skip_reason: Callable[[str], str | None],
  hint: Callable[[str], str] = lambda name: '',
) -> Match:
  names: dict[str, str] = {}
  skipped: dict[str, str] = {}
  unknown: list[str] = []
  for name, own in canonical.items():
    if name in expected:
      names[name] = own
    elif reason := skip_reason(name):
      skipped[own] = reason
    else:
      unknown.append(name)
  missing = [name for name in expected if name not in names]
  faults = []
  if missing:
    shape = list(expected[missing[0]])
    faults.append(
      f'tensor {show(missing[0])} is missing, expected {shape}'
      + show_more(missing[1:])
    )
  if unknown:
    own = [canonical[name] for name in unknown]
    faults.append(
      f'tensor {show(own[0])} is not part of this architecture'
      + hint(unknown[0])
      + show_more(own[1:])
    )
  if faults:
    raise CheckpointError(f'{source_name}: {"; ".join(faults)}')
  for name, own in names.items():
    _check_shape(source, own, expected[name], source_name)
    dtype, allowed = source.dtype(own), _allowed_dtypes(name, expected)
    if dtype not in allowed:
      raise CheckpointError(
        f'{source_name}: tensor {show(own)} has dtype {dtype}; supported: '
        f'{", ".join(allowed)}'
      )
  return Match(names, skipped)


def _check_shape(
  source: TensorSource, own: str, wanted: tuple[int, ...], source_name: str
) -> None:
  shape = source.shape(own)
  if shape != wanted:
    raise CheckpointError(
      f'{source_name}: tensor {show(own)} has shape {list(shape)}, the config '
      f'asks for {list(wanted)}'
    )
