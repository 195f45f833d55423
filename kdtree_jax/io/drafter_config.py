"""config.json of DFlash drafters, in z-lab's layout and in speculators'."""

import dataclasses
from typing import Any

from kdtree_jax.config import SLIDING, DrafterConfig
from kdtree_jax.drafters.dflash import default_target_layer_ids
from kdtree_jax.errors import UserError
from kdtree_jax.io.checkpoint_config import HOUSEKEEPING, read_rope
from kdtree_jax.io.fields import REQUIRED, Fields, is_inert
from kdtree_jax.io.files import JsonObject, show
from kdtree_jax.io.tensors import CheckpointError

ZLAB, SPECULATORS = 'DFlashDraftModel', 'DFlashSpeculator'

_IGNORED = HOUSEKEEPING | {
  # Embedding and head are the target's, or untied in speculators' layout.
  'tie_word_embeddings',
  'eos_token_id',
}
_IGNORED_IN_SPECULATORS = HOUSEKEEPING | {
  # The target, and the number of tokens it was trained with.
  'speculators_config',
  'speculators_version',
  'speculators_model_type',
}
_SIZES = (
  'hidden_size num_hidden_layers num_attention_heads num_key_value_heads '
  'head_dim intermediate_size vocab_size max_position_embeddings'
).split()


def is_drafter(raw: JsonObject) -> bool:
  """Whether a config.json describes a DFlash drafter."""
  names = raw.get('architectures')
  named = isinstance(names, list) and any('DFlash' in str(n) for n in names)
  kind = raw.get('speculators_model_type')
  return named or 'dflash_config' in raw or kind == 'dflash'


def drafter_config(
  raw: object,
  source_name: str = 'config.json',
  target_layers: int | None = None,
) -> DrafterConfig:
  """Translates the config.json of a DFlash drafter.

  Args:
    raw: the parsed object. In z-lab's layout the drafter's own keys may be at
      the top or in `dflash_config`; in speculators' layout those of the
      transformer are in `transformer_layer_config`.
    source_name: the file's name for messages.
    target_layers: number of layers of the target, which speculators' configs
      do not state; None: the fewest that the taps allow.

  Raises:
    CheckpointError: another architecture, an unsupported variant of DFlash, or
      a key that is ill-typed, missing or unknown.
  """
  kind = Fields(raw, source_name).get('speculators_model_type')
  if kind is None:
    arguments = _zlab(raw, source_name)
  else:
    arguments = _speculators(raw, source_name, target_layers)
  try:
    config = DrafterConfig(**arguments)
  except UserError as e:
    raise CheckpointError(f'{source_name}: {e}') from e
  return config


def with_attention_factor(
  config: DrafterConfig, factor: float | None
) -> DrafterConfig:
  """A config with another amplitude of YaRN, about which engines disagree.

  Args:
    config: the drafter's architecture.
    factor: the amplitude; None leaves the config as it is.

  Raises:
    UserError: `factor` is not positive, or the drafter has no YaRN.
  """
  if factor is None:
    return config
  if config.rope_scaling is None:
    raise UserError(
      f'drafter_attention_factor={factor}: the drafter has no YaRN'
    )
  if not 0 < factor < 1e6:
    raise UserError(f'drafter_attention_factor={factor} is not positive')
  scaling = dataclasses.replace(config.rope_scaling, attention_factor=factor)
  return dataclasses.replace(config, rope_scaling=scaling)


def _zlab(raw: object, where: str) -> JsonObject:
  fields = Fields(_merge_dflash(raw, where), where)
  _check_architecture(fields, ZLAB)
  # Factors that only variants use; 1 has no effect.
  fields.fixed('output_multiplier', 1)
  fields.fixed('attention_value_scale', 1)
  arguments = _transformer(fields, where)
  layers = arguments['num_hidden_layers']
  target_layers = fields.integer('num_target_layers', least=1)
  taps = fields.tuple_of(int, 'target_layer_ids', None)
  if taps is None:
    taps = default_target_layer_ids(target_layers, layers)
  arguments |= {
    'num_target_layers': target_layers,
    'target_layer_ids': taps,
    'block_size': fields.integer('block_size', least=1),
    'mask_token_id': fields.integer('mask_token_id'),
    'causal': _causal(fields),
  }
  arguments |= _swa(fields, arguments)
  fields.fixed('target_hidden_size', arguments['hidden_size'])
  fields.finish(_IGNORED)
  return arguments


def _merge_dflash(raw: Any, where: str) -> JsonObject:
  """The keys of both levels; a key in both must have the same value."""
  fields = Fields(raw, where)
  nested = fields.get('dflash_config', {})
  Fields(nested, f'{where}: dflash_config')
  merged = {k: v for k, v in raw.items() if k != 'dflash_config'}
  for key, value in nested.items():
    outer = merged.get(key)
    same = type(outer) is type(value) and outer == value
    if outer is not None and value is not None and not same:
      raise fields.error(
        key,
        f'is {show(outer, 40)}, but {show(value, 40)} in dflash_config',
      )
    if value is not None or key not in merged:
      merged[key] = value
  return merged


def _speculators(
  raw: object, where: str, target_layers: int | None
) -> JsonObject:
  fields = Fields(raw, where)
  if fields.get('speculators_model_type') != 'dflash':
    kind = show(fields.get('speculators_model_type'))
    raise fields.error('speculators_model_type', f'is {kind}, not dflash')
  _check_architecture(fields, SPECULATORS)
  inner_where = f'{where}: transformer_layer_config'
  inner = Fields(fields.get('transformer_layer_config', REQUIRED), inner_where)
  arguments = _transformer(inner, inner_where)
  inner.finish(_IGNORED)
  # An id is one more than the layer whose output it means. A last id that means
  # the target's final output was used for training only.
  ids = fields.tuple_of(int, 'aux_hidden_state_layer_ids')
  stated = fields.integer('num_target_layers', target_layers, least=1)
  stated = stated if stated is not None else max(ids, default=1)
  if target_layers is not None and ids[-1:] == (target_layers,):
    ids = ids[:-1]
  non_causal = fields.boolean('sliding_window_non_causal', False)
  fields.fixed('target_hidden_size', arguments['hidden_size'])
  arguments |= {
    'num_target_layers': stated,
    'target_layer_ids': tuple(layer - 1 for layer in ids),
    'block_size': fields.integer('block_size', least=1),
    'mask_token_id': fields.integer('mask_token_id'),
    'causal': False if non_causal else None,
    'window_from_root': True,
    'draft_vocab_size': fields.integer(
      'draft_vocab_size', arguments['vocab_size'], least=1
    ),
    'own_embedding': True,
  }
  fields.finish(_IGNORED_IN_SPECULATORS)
  return arguments


def _check_architecture(fields: Fields, supported: str) -> None:
  names = fields.get('architectures')
  if names != [supported]:
    raise fields.error(
      'architectures', f'is {show(names)}; supported: {ZLAB}, {SPECULATORS}'
    )


def _transformer(fields: Fields, where: str) -> JsonObject:
  """The keys of the transformer, which is Qwen3's."""
  settings = fields.get('quantization_config')
  if settings is not None and not is_inert(settings):
    raise fields.error(
      'quantization_config', 'is set: a drafter may not be quantised'
    )
  fields.fixed('hidden_act', 'silu')
  fields.fixed('partial_rotary_factor', 1)
  theta, scaling = read_rope(fields, where)
  arguments = fields.sizes(_SIZES) | {
    'rms_norm_eps': fields.number('rms_norm_eps', above=0),
    'rope_theta': theta,
    'rope_scaling': scaling,
    'attention_bias': fields.boolean('attention_bias', False),
  }
  return arguments | _sliding(fields, arguments['num_hidden_layers'])


def _sliding(fields: Fields, layers: int) -> JsonObject:
  """`layer_types`, stated or by Qwen3's rule, and the window.

  Without `use_sliding_window` the window has no effect.
  """
  used = fields.boolean('use_sliding_window', None)
  window = fields.integer('sliding_window', None, least=1)
  types = fields.tuple_of(str, 'layer_types', None)
  derived = used and types is None and window is not None
  first = fields.integer('max_window_layers', REQUIRED if derived else 0)
  if used and types is None and layers <= 4096:
    types = tuple(
      SLIDING if layer >= first else 'full_attention' for layer in range(layers)
    )
  if types is None or SLIDING not in types:
    return {'layer_types': types}
  if used is False:
    raise fields.error(
      'layer_types', f'holds {SLIDING}, but use_sliding_window is false'
    )
  return {'layer_types': types, 'sliding_window': window}


def _causal(fields: Fields) -> bool | None:
  """Whether attention inside the block is causal; None: not stated."""
  stated = {
    key: fields.boolean(key, None)
    for key in ('is_causal', 'causal', 'causal_head')
  }
  # A JetSpec head that is off states nothing.
  stated['causal_head'] = stated['causal_head'] or None
  values = {value for value in stated.values() if value is not None}
  if len(values) > 1:
    raise fields.error('causal', 'and is_causal or causal_head disagree')
  return values.pop() if values else None


def _swa(fields: Fields, arguments: JsonObject) -> JsonObject:
  """The drafter's own switch for a window in every layer, not in the block."""
  if not fields.boolean('use_swa', False):
    fields.get('swa_window_size')
    return {}
  window = fields.integer('swa_window_size', least=1)
  if arguments['layer_types'] is None:
    causal = arguments['causal']
    layers = min(arguments['num_hidden_layers'], 4096)
    return {
      'layer_types': (SLIDING,) * layers,
      'sliding_window': window,
      'causal': False if causal is None else causal,
    }
  if arguments.get('sliding_window') != window:
    raise fields.error(
      'swa_window_size',
      f'is {window}, but sliding_window is {arguments.get("sliding_window")}',
    )
  return {}
