"""Bundles as checkpoint folders in the Hugging Face layout."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Generator, Mapping

import numpy as np

from kdtree_jax.config import SLIDING, DrafterConfig, ModelConfig, RopeScaling
from kdtree_jax.errors import UserError
from kdtree_jax.io.checkpoint_config import model_config
from kdtree_jax.io.drafter_config import ZLAB, drafter_config
from kdtree_jax.io.files import (
  JsonObject,
  StrPath,
  canonical_json,
  file_kind,
  one_line,
  parse_json,
  show,
  sync_folder,
  temporary_beside,
)
from kdtree_jax.io.kdtr import Bundle
from kdtree_jax.io.tensors import (
  INDEX_FILE,
  SINGLE_FILE,
  SafetensorsSource,
  dtype_name,
  write_safetensors,
)

# A file that only this project reads: golden answers, name and recipe.
EXTRA_FILE, EXTRA_KEY = 'golden.safetensors', 'kdtr_bundle'
DRAFTER_FOLDER = 'dflash'
SHARD_BYTES = 5 * 10**9

_ARCHITECTURES = {
  'deepseek_v2': 'DeepseekV2ForCausalLM',
  'deepseek_v3': 'DeepseekV3ForCausalLM',
  'glm4_moe_lite': 'Glm4MoeLiteForCausalLM',
}
_TORCH_DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}
# Fields that a config.json states in another form, or not at all.
_OTHER_IN_TARGET = frozenset(
  'rope_theta rope_scaling mlp_layer_types latent_norm_eps eos_token_id'.split()
)
_OTHER_IN_DRAFTER = frozenset(
  'rope_theta rope_scaling mask_token_id target_layer_ids layer_types '
  'sliding_window window_from_root causal draft_vocab_size '
  'own_embedding'.split()
)


def target_json(config: ModelConfig, dtype: str = 'F32') -> JsonObject:
  """The config.json of a target.

  Args:
    config: the target's architecture.
    dtype: dtype of most weights, as safetensors spells it.

  Raises:
    UserError: no model type of Hugging Face has this architecture.
  """
  kind = 'deepseek_v2' if config.scoring_func == 'softmax' else 'deepseek_v3'
  if config.mlp_layer_types is not None:
    kind = 'glm4_moe_lite'
  raw = _same_fields(config, _OTHER_IN_TARGET)
  raw |= _rope_json(config.rope_theta, config.rope_scaling)
  eos = list(config.eos_token_id)
  raw |= {
    'model_type': kind,
    'architectures': [_ARCHITECTURES[kind]],
    'torch_dtype': _TORCH_DTYPES[dtype],
    'hidden_act': 'silu',
    'num_key_value_heads': config.num_attention_heads,
    'eos_token_id': eos[0] if len(eos) == 1 else eos or None,
  }
  if config.mlp_layer_types is not None:
    raw['mlp_layer_types'] = list(config.mlp_layer_types)
  if config.latent_norm_eps != 1e-6:
    # transformers always uses 1e-6 and would compute something else.
    raw['latent_norm_eps'] = config.latent_norm_eps
  _check_same('target', config, model_config(raw, 'config.json'))
  return raw


def drafter_json(config: DrafterConfig, dtype: str = 'F32') -> JsonObject:
  """The config.json of a drafter, in z-lab's layout.

  Raises:
    UserError: the drafter has its own embedding or head.
  """
  raw = _same_fields(config, _OTHER_IN_DRAFTER)
  raw |= _rope_json(config.rope_theta, config.rope_scaling)
  raw |= {
    'architectures': [ZLAB],
    'model_type': 'qwen3',
    'torch_dtype': _TORCH_DTYPES[dtype],
    'hidden_act': 'silu',
    'dflash_config': {
      'mask_token_id': config.mask_token_id,
      'target_layer_ids': list(config.target_layer_ids),
    },
  }
  if config.causal is not None:
    raw['is_causal'] = config.causal
  if config.layer_types is not None:
    raw['layer_types'] = list(config.layer_types)
    raw['use_sliding_window'] = SLIDING in config.layer_types
    raw['sliding_window'] = config.sliding_window
  _check_same('drafter', config, drafter_config(raw, 'config.json'))
  return raw


def _same_fields(
  config: ModelConfig | DrafterConfig, others: frozenset[str]
) -> JsonObject:
  """The fields of a config, without those that need another form."""
  names = (field.name for field in dataclasses.fields(config))
  return {name: getattr(config, name) for name in names if name not in others}


def _rope_json(theta: float, scaling: RopeScaling | None) -> JsonObject:
  if scaling is None:
    return {'rope_theta': theta, 'rope_scaling': None}
  fields = {k: getattr(scaling, k) for k in scaling.__dataclass_fields__}
  stated = {k: v for k, v in fields.items() if v is not None}
  yarn = {'type': 'yarn', 'rope_type': 'yarn'} | stated
  return {'rope_theta': theta, 'rope_scaling': yarn}


def _check_same(
  what: str,
  wanted: ModelConfig | DrafterConfig,
  got: ModelConfig | DrafterConfig,
) -> None:
  """Refuses a config that would come back different from its config.json."""
  for name in wanted.__dataclass_fields__:
    ours, theirs = getattr(wanted, name), getattr(got, name)
    if ours != theirs:
      raise UserError(
        f'{what}: {name}={ours!r} cannot be stated in a config.json, where it '
        f'would be {theirs!r}'
      )


def write_checkpoint(
  folder: StrPath, bundle: Bundle, shard_bytes: int = SHARD_BYTES
) -> None:
  """Writes a bundle as a folder in the Hugging Face layout.

  The drafter goes to `dflash/`, or into the folder itself if there is no
  target. An extra file keeps golden answers, name and recipe.

  Args:
    folder: must not exist, or be empty; it appears whole or not at all.
    bundle: the contents.
    shard_bytes: the most bytes of a shard, unless one tensor is larger.

  Raises:
    UserError: the folder exists or cannot be written, or no model type of
      Hugging Face has the architecture.
  """
  folder = pathlib.Path(folder)
  check_new_folder(folder)
  with _whole_folder(folder) as temporary:
    inner = temporary
    if bundle.config is not None and bundle.target is not None:
      raw = target_json(bundle.config, _main_dtype(bundle.target))
      _write_model(temporary, raw, bundle.target, shard_bytes)
      inner = temporary / DRAFTER_FOLDER
    for name, data in bundle.tokenizer.items():
      (temporary / name).write_bytes(data)
    if bundle.drafter_config is not None and bundle.drafter is not None:
      inner.mkdir(exist_ok=True)
      raw = drafter_json(bundle.drafter_config, _main_dtype(bundle.drafter))
      _write_model(inner, raw, bundle.drafter, shard_bytes)
    extra = canonical_json({'name': bundle.name, 'recipe': dict(bundle.recipe)})
    write_safetensors(temporary / EXTRA_FILE, bundle.golden, {EXTRA_KEY: extra})


def check_new_folder(folder: StrPath) -> None:
  """Refuses a path that exists, unless it is an empty folder.

  Raises:
    UserError: it exists, or cannot be accessed.
  """
  kind = file_kind(folder)
  try:
    free = kind is None or (kind == 'folder' and not os.listdir(folder))
  except OSError as e:
    raise UserError(f'{folder}: cannot be read: {e.strerror or e}') from e
  if not free:
    raise UserError(f'{folder}: exists; convert writes to a new folder')


@contextlib.contextmanager
def _whole_folder(folder: pathlib.Path) -> Generator[pathlib.Path]:
  """A temporary folder that is renamed to `folder` when it is complete."""
  # Only absolute paths give `.`, `..` and links a name.
  whole = pathlib.Path(os.path.realpath(folder))
  if not whole.name:
    raise UserError(f'{folder}: exists; convert writes to a new folder')
  temporary = temporary_beside(whole)
  try:
    temporary.mkdir()
    try:
      yield temporary
      for path in [*temporary.rglob('*'), temporary]:
        if path.is_dir():
          sync_folder(path)
        else:
          with open(path, 'rb') as file:
            os.fsync(file.fileno())
      os.rename(temporary, whole)
    except BaseException:
      shutil.rmtree(temporary, ignore_errors=True)
      raise
    sync_folder(whole.parent)
  except OSError as e:
    raise UserError(f'{folder}: cannot be written: {e.strerror or e}') from e


def _main_dtype(tensors: Mapping[str, np.ndarray]) -> str:
  """The dtype of most bytes."""
  sizes: dict[str, int] = {}
  for value in tensors.values():
    name = dtype_name(value.dtype)
    sizes[name] = sizes.get(name, 0) + value.nbytes
  return max(sizes, key=lambda name: sizes[name])


def _write_model(
  folder: pathlib.Path,
  raw: JsonObject,
  tensors: Mapping[str, np.ndarray],
  shard_bytes: int,
) -> None:
  """config.json and one safetensors file, or shards with their index."""
  text = json.dumps(raw, indent=2, sort_keys=True) + '\n'
  (folder / 'config.json').write_text(text)
  shards: list[dict[str, np.ndarray]] = [{}]
  size = 0
  for name in sorted(tensors):
    value = tensors[name]
    if shards[-1] and size + value.nbytes > shard_bytes:
      shards.append({})
      size = 0
    shards[-1][name] = value
    size += value.nbytes
  # transformers requires this key.
  metadata = {'format': 'pt'}
  if len(shards) == 1:
    write_safetensors(folder / SINGLE_FILE, shards[0], metadata)
    return
  weight_map = {}
  for i, shard in enumerate(shards, 1):
    file = f'model-{i:05}-of-{len(shards):05}.safetensors'
    write_safetensors(folder / file, shard, metadata)
    weight_map |= dict.fromkeys(shard, file)
  total = sum(value.nbytes for value in tensors.values())
  index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
  (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + '\n')


def read_extra(
  folder: pathlib.Path, default_name: str
) -> tuple[str, JsonObject, dict[str, np.ndarray]]:
  """Name, recipe and golden answers of a folder, from its extra file.

  Without that file: the default name, and no answers.

  Raises:
    UserError: the file is broken.
  """
  path = folder / EXTRA_FILE
  if file_kind(path) is None:
    return default_name, {'converted_from': default_name}, {}
  source = SafetensorsSource(path)
  try:
    extra = parse_json(source.metadata().get(EXTRA_KEY, ''))
  except ValueError as e:
    raise UserError(f'{path}: {EXTRA_KEY} is not JSON: {one_line(e)}') from e
  kinds = {'name': str, 'recipe': dict}
  if not isinstance(extra, dict) or set(extra) != set(kinds):
    raise UserError(f'{path}: {EXTRA_KEY} does not hold name and recipe')
  for key, kind in kinds.items():
    if not isinstance(extra[key], kind):
      raise UserError(f'{path}: {EXTRA_KEY}: {key} is {show(extra[key])}')
  golden = {name: source.read(name) for name in source.names()}
  return extra['name'], extra['recipe'], golden
