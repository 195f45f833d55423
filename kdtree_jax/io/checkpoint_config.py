"""config.json of Hugging Face checkpoints, read strictly.

A key is used, known to change nothing, or an error: an unknown switch may
change what the model computes.
"""

from collections.abc import Mapping
from typing import Any

from kdtree_jax.config import ModelConfig, RopeScaling
from kdtree_jax.errors import UserError
from kdtree_jax.io.fields import REQUIRED, Fields
from kdtree_jax.io.files import show
from kdtree_jax.io.quantization import Quantization, read_quantization
from kdtree_jax.io.tensors import CheckpointError

MODEL_TYPES = ('deepseek_v2', 'deepseek_v3', 'kimi_k2', 'glm4_moe_lite')
# Multimodal wrappers: the language model's config lies in `text_config`.
WRAPPER_TYPES = ('kimi_k25',)
# Model types whose config a class of transformers reads.
_CLASSES = {
  'DeepseekV2ForCausalLM': ('deepseek_v2',),
  'DeepseekV3ForCausalLM': ('deepseek_v3', 'kimi_k2'),
  'Glm4MoeLiteForCausalLM': ('glm4_moe_lite',),
}

# Keys without influence on the logits: names, dtypes, special tokens, settings
# of training and sampling.
HOUSEKEEPING = frozenset(
  '_attn_implementation _name_or_path architectures attention_dropout '
  'attn_implementation auto_map bos_token_id chunk_size_feed_forward '
  'diversity_penalty dtype id2label initializer_range label2id '
  'length_penalty max_length model_type num_beam_groups num_beams '
  'num_return_sequences pad_token_id repetition_penalty return_dict '
  'temperature top_k top_p torch_dtype transformers_version typical_p '
  'use_cache'.split()
)
_SIZES = (
  'vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank '
  'qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size '
  'max_position_embeddings'
).split()
_IGNORED_IN_TARGET = HOUSEKEEPING | {
  # Training only.
  'aux_loss_alpha',
  'ep_size',
  'output_router_logits',
  'pretraining_tp',
  'router_aux_loss_coef',
  'seq_aux',
  # qk_rope_head_dim under another name, in exports of transformers.
  'head_dim',
  # Layers that are skipped: `read_extras` reads it.
  'num_nextn_predict_layers',
  'quantization_config',  # `quantization` reads it
}
_IGNORED_IN_WRAPPER = HOUSEKEEPING | {
  'eos_token_id',  # `stop_ids` reads it
  'ignore_index',
  'media_placeholder_token_id',
  'quantization_config',  # `quantization` reads it
  'text_config',
  'use_unified_vision_chunk',
  'video_placeholder',
  'vision_config',
}


def _rope_settings(
  raw: object, where: str
) -> tuple[float | None, RopeScaling | None]:
  """Theta, if stated, and YaRN from one dictionary of either spelling."""
  fields = Fields(raw, where)
  old, new = fields.string('type', None), fields.string('rope_type', None)
  if old is not None and new is not None and old != new:
    raise fields.error('rope_type', f'is {show(new)}, but type is {show(old)}')
  kind = new or old or 'default'
  theta = fields.number('rope_theta', None, above=1)
  fields.fixed('partial_rotary_factor', 1)
  scaling = None
  if kind in ('yarn', 'deepseek_yarn'):
    # deepseek_yarn is yarn whose cosines and sines have amplitude 1.
    amplitude = 1.0 if kind == 'deepseek_yarn' else None
    fields.fixed('truncate', True)
    scaling = RopeScaling(
      factor=fields.number('factor', least=1),
      original_max_position_embeddings=fields.integer(
        'original_max_position_embeddings', least=1
      ),
      beta_fast=fields.number('beta_fast', 32.0, above=0),
      beta_slow=fields.number('beta_slow', 1.0, above=0),
      mscale=fields.number('mscale', None, least=0),
      mscale_all_dim=fields.number('mscale_all_dim', None, least=0),
      attention_factor=fields.number('attention_factor', amplitude, above=0),
    )
  elif kind != 'default':
    raise fields.error(
      'rope_type', f'is {show(kind)}; supported: default, yarn, deepseek_yarn'
    )
  fields.finish()
  return theta, scaling


def read_rope(fields: Fields, where: str) -> tuple[float, RopeScaling | None]:
  """Theta and YaRN in the spelling of transformers 4, 5 or both."""
  thetas = [fields.number('rope_theta', None, above=1)]
  scalings = []
  for key in ('rope_scaling', 'rope_parameters'):
    raw = fields.get(key)
    if raw is not None:
      theta, scaling = _rope_settings(raw, f'{where}: {key}')
      thetas.append(theta)
      scalings.append(scaling)
  if len(scalings) == 2 and scalings[0] != scalings[1]:
    raise fields.error('rope_scaling', 'and rope_parameters disagree')
  stated = {theta for theta in thetas if theta is not None}
  if len(stated) > 1:
    raise fields.error('rope_theta', f'has several values: {sorted(stated)}')
  if not stated:
    raise fields.error('rope_theta', 'is missing')
  return stated.pop(), scalings[0] if scalings else None


def text_config(raw: object, where: str) -> tuple[object, str]:
  """The language model's own config, and its name for messages."""
  fields = Fields(raw, where)
  kind = fields.get('model_type')
  if kind not in WRAPPER_TYPES:
    return raw, where
  text = fields.get('text_config', REQUIRED)
  if isinstance(text, Mapping):
    # transformers reads the wrapper's value, other engines text_config's.
    tied = bool(text.get('tie_word_embeddings'))
    fields.fixed('tie_word_embeddings', tied)
  fields.finish(_IGNORED_IN_WRAPPER)
  return text, f'{where}: text_config'


def quantization(
  raw: object, source_name: str = 'config.json'
) -> Quantization | None:
  """How a target's weights are quantised; None if they are not.

  A multimodal model states it in `text_config` or in the wrapper.

  Raises:
    CheckpointError: an unsupported method, or two that disagree.
  """
  found = read_quantization(Fields(raw, source_name), source_name)
  text, where = text_config(raw, source_name)
  if text is raw:
    return found
  inner = read_quantization(Fields(text, where), where)
  if found is not None and inner is not None and found != inner:
    raise CheckpointError(
      f'{source_name}: quantization_config and that of text_config disagree'
    )
  return inner or found


def eos_ids(fields: Fields) -> tuple[int, ...]:
  """`eos_token_id`, an integer or a list, without repetitions."""
  if isinstance(fields.get('eos_token_id'), list):
    ids = fields.tuple_of(int, 'eos_token_id')
  else:
    token = fields.integer('eos_token_id', None)
    ids = () if token is None else (token,)
  if any(token < 0 for token in ids):
    raise fields.error('eos_token_id', f'holds a negative id: {show(ids)}')
  return tuple(dict.fromkeys(ids))


def model_config(raw: object, source_name: str = 'config.json') -> ModelConfig:
  """Translates a target's config.json, in the spelling of transformers 4 or 5.

  Keys that the shapes of the weights do not determine are required, because
  classes disagree about defaults, for instance of `routed_scaling_factor`.

  Args:
    raw: the parsed object.
    source_name: the file's name for messages.

  Raises:
    CheckpointError: a key or value that is unsupported, ill-typed, missing or
      unknown.
  """
  text, where = text_config(raw, source_name)
  fields = Fields(text, where)
  kind = fields.get('model_type')
  if kind not in MODEL_TYPES:
    raise fields.error(
      'model_type',
      f'is {show(kind)}; supported: {", ".join(MODEL_TYPES + WRAPPER_TYPES)}',
    )
  _check_classes(fields, kind)
  quantization(raw, source_name)  # Refuses unsupported methods.
  fields.fixed('hidden_act', 'silu')
  fields.fixed('partial_rotary_factor', 1)
  arguments = fields.sizes(_SIZES)
  arguments |= _attention_arguments(fields, where, arguments)
  arguments |= _mlp_arguments(fields, kind)
  arguments |= {
    'tie_word_embeddings': fields.boolean('tie_word_embeddings', False),
    'eos_token_id': eos_ids(fields),
  }
  fields.finish(_IGNORED_IN_TARGET)
  try:
    return ModelConfig(**arguments)
  except UserError as e:
    raise CheckpointError(f'{where}: {e}') from e


def _check_classes(fields: Fields, kind: str) -> None:
  """Refuses a config whose class belongs to another model type."""
  names = fields.get('architectures')
  for name in names if isinstance(names, list) else ():
    kinds = _CLASSES.get(name, (kind,)) if isinstance(name, str) else (kind,)
    if kind not in kinds:
      raise fields.error(
        'architectures', f'holds {name}, but model_type is {kind}'
      )


def _attention_arguments(
  fields: Fields, where: str, sizes: dict[str, Any]
) -> dict[str, Any]:
  # Redundant in this family, so they must agree.
  width = sizes['qk_nope_head_dim'] + sizes['qk_rope_head_dim']
  fields.fixed('qk_head_dim', width)
  fields.fixed('num_key_value_heads', sizes['num_attention_heads'])
  theta, scaling = read_rope(fields, where)
  return {
    'q_lora_rank': fields.integer('q_lora_rank', None, least=1),
    'rms_norm_eps': fields.number('rms_norm_eps', above=0),
    # transformers uses its default for these norms, not rms_norm_eps.
    'latent_norm_eps': fields.number('latent_norm_eps', 1e-6, above=0),
    'rope_theta': theta,
    'rope_scaling': scaling,
    'rope_interleave': fields.boolean('rope_interleave', True),
    'attention_bias': fields.boolean('attention_bias', False),
  }


def _mlp_arguments(fields: Fields, kind: str) -> dict[str, Any]:
  v2, glm = kind == 'deepseek_v2', kind == 'glm4_moe_lite'
  arguments = {
    'moe_layer_freq': fields.integer('moe_layer_freq', 1, least=1),
    'first_k_dense_replace': fields.integer(
      'first_k_dense_replace', 1 if glm else 0
    ),
    'mlp_layer_types': fields.tuple_of(str, 'mlp_layer_types', None),
    'n_routed_experts': fields.integer('n_routed_experts', 0),
    'n_shared_experts': fields.integer('n_shared_experts', 0),
    'scoring_func': fields.string(
      'scoring_func', 'softmax' if v2 else 'sigmoid'
    ),
    'topk_method': fields.string('topk_method', 'greedy' if v2 else 'noaux_tc'),
  }
  is_moe = arguments['n_routed_experts'] > 0
  normalise = fields.boolean(
    'norm_topk_prob', REQUIRED if is_moe and not v2 else False
  )
  if v2 and normalise and is_moe:
    raise fields.error(
      'norm_topk_prob',
      'is True, which transformers ignores for deepseek_v2 and others do not; '
      'only False is supported',
    )
  grouped = is_moe and arguments['topk_method'] != 'greedy'
  groups = REQUIRED if grouped and not glm else 1
  stated = REQUIRED if is_moe else 0
  return arguments | {
    'moe_intermediate_size': fields.integer('moe_intermediate_size', stated),
    'num_experts_per_tok': fields.integer('num_experts_per_tok', stated),
    'n_group': fields.integer('n_group', groups, least=1),
    'topk_group': fields.integer('topk_group', groups, least=1),
    'norm_topk_prob': normalise and not v2,
    'routed_scaling_factor': fields.number(
      'routed_scaling_factor', REQUIRED if is_moe else 1.0
    ),
  }
