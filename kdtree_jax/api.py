"""Loading targets and drafters from files, and stubs by name."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax import registry
from kdtree_jax.checks import integer, number
from kdtree_jax.config import DecodeConfig, ModelConfig
from kdtree_jax.drafters import Drafter
from kdtree_jax.drafters.dflash import DFlashDrafter
from kdtree_jax.errors import UserError, show
from kdtree_jax.io import huggingface, kdtr
from kdtree_jax.io.digests import short, weights_digest
from kdtree_jax.io.export import read_extra
from kdtree_jax.io.files import file_kind
from kdtree_jax.io.tensors import MappingSource, SafetensorsSource
from kdtree_jax.io.tokenizer_files import read_files
from kdtree_jax.keys import Purpose, key_for
from kdtree_jax.model import abstract_params
from kdtree_jax.model.random_params import random_params
from kdtree_jax.named_configs import load_config

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}
WEIGHTS = ('as_stored', *DTYPES)
DEFAULT_BLOCK_SIZE = 8


def bundled(name: str) -> pathlib.Path:
  """The path of a bundle in the package.

  `tiny` has random weights and golden answers; `python_small`, with a
  tokenizer, and `python_small_drafter` are a trained pair.
  """
  return pathlib.Path(__file__).parent / 'data' / f'{name}.kdtr'


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
  """A target in memory.

  Attributes:
    name: name in messages and tables.
    config: the architecture.
    params: the nested dict of linen.
    dtype: dtype of the computation.
    stop_ids: the checkpoint's own.
    golden: `prompt`, `ar_tokens` and values per layer of a bundle; else empty.
    tokenizer: contents of the tokenizer's files by name; empty without one.
  """

  name: str
  config: ModelConfig
  params: Any
  dtype: Any
  stop_ids: tuple[int, ...]
  golden: Mapping[str, np.ndarray]
  tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def digest(self) -> str:
    """The digest of all weights, the same for every dtype."""
    return weights_digest(self.params, rounded=True)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
  """A drafter and its parameters."""

  name: str
  drafter: Drafter
  params: Any

  @property
  def block_size(self) -> int:
    return self.drafter.block_size


def load_target(
  path: str | os.PathLike[str],
  dtype: str = 'float32',
  weights: str = 'as_stored',
  progress: huggingface.Progress | None = None,
) -> Target:
  """Loads a KDTR bundle or a checkpoint folder in the Hugging Face layout.

  Args:
    path: a `.kdtr` file, or a folder with `config.json` and safetensors.
    dtype: `float32` or `bfloat16`, for weights, caches and arithmetic.
    weights: `as_stored` keeps quantised weights and dequantises them where
      they are used; `bfloat16` and `float32` dequantise now and round all
      weights but the router's to that dtype, which is not finer than `dtype`.
    progress: called with the number of bytes of each tensor that was read.

  Raises:
    UserError: a fault of the path or the checkpoint.
  """
  path = pathlib.Path(path)
  jax_dtype = _dtype(dtype)
  load_params = functools.partial(
    huggingface.target_params,
    dtype=jax_dtype,
    source_name=str(path),
    weights_dtype=_weights_dtype(weights, dtype),
    progress=progress,
  )
  if _is_bundle(path):
    bundle = kdtr.read_bundle(path)
    config, golden = bundle.config, bundle.golden
    if config is None or bundle.target is None:
      raise UserError(f'{path}: the bundle holds a drafter and no target')
    params = load_params(config, MappingSource(bundle.target))
    stop_ids = huggingface.bundle_stop_ids(bundle, str(path)).ids
    tokenizer = bundle.tokenizer
    return Target(
      bundle.name, config, params, jax_dtype, stop_ids, golden, tokenizer
    )
  raw = huggingface.read_json(_folder(path, 'target') / 'config.json')
  where = str(path / 'config.json')
  config = huggingface.model_config(raw, where)
  params = load_params(
    config,
    SafetensorsSource(path),
    quantization=huggingface.quantization(raw, where),
    extras=huggingface.read_extras(raw, where),
  )
  stop_ids = huggingface.stop_ids(path, raw)
  files: dict[str, bytes] = {}
  # Token ids work without a tokenizer that can be read.
  with contextlib.suppress(UserError):
    files = read_files(path)
  return Target(path.name, config, params, jax_dtype, stop_ids, {}, files)


def random_target(
  name: str, dtype: str = 'float32', layers: int | None = None
) -> Target:
  """A target with random weights, made on the device.

  Args:
    name: name of a file in `configs/`.
    dtype: `float32` or `bfloat16`.
    layers: number of leading layers to keep; None for all.

  Raises:
    UserError: no such config, or one with fewer layers.
  """
  config, jax_dtype = load_config(name), _dtype(dtype)
  if layers is not None:
    layers = integer(layers, 'layers')
    if not 1 <= layers <= config.num_hidden_layers:
      raise UserError(
        f'layers={layers} is not in 1..{config.num_hidden_layers}, the layers '
        f'of {name}'
      )
    types = config.mlp_layer_types
    config = dataclasses.replace(
      config,
      num_hidden_layers=layers,
      mlp_layer_types=types and types[:layers],
    )
  params = random_params(abstract_params(config, jax_dtype))
  return Target(name, config, params, jax_dtype, (), {})


def load_drafter(
  path_or_name: str | os.PathLike[str],
  target: Target,
  block_size: int | None = None,
  attention_factor: float | None = None,
  acceptance_rate: float | None = None,
) -> LoadedDrafter:
  """Loads a DFlash drafter, or makes a stub by its name.

  Args:
    path_or_name: a DFlash folder, a `.kdtr` file with a drafter, or a name
      from `registry.names('drafter')`.
    target: the target it drafts for.
    block_size: 1 + positions drafted per round. Default: the trained block, or
      8 for a stub. A smaller one uses the first positions of the trained block.
    attention_factor: replaces the amplitude of the drafter's YaRN, about
      which engines disagree; changes the acceptance, never the output.
    acceptance_rate: share of right drafts, 0..1, for the stub of that name.

  Raises:
    UserError: no such drafter, or one that does not fit the target.
  """
  name = str(path_or_name)
  check_pair(target, None)
  if block_size is not None:
    block_size = integer(block_size, 'block_size')
  if attention_factor is not None:
    attention_factor = number(attention_factor, 'drafter_attention_factor')
  if acceptance_rate is not None:
    if name != 'acceptance_rate':
      raise UserError(f'acceptance_rate is not used by {name}')
    acceptance_rate = number(acceptance_rate, 'acceptance_rate')
    if not 0 <= acceptance_rate <= 1:
      raise UserError(f'acceptance_rate={acceptance_rate} is not in 0..1')
  if name in registry.names('drafter'):
    size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
    _check_block_size(size, None)
    if attention_factor is not None:
      raise UserError(f'drafter_attention_factor is not used by {name}')
    drafter = registry.get('drafter', name).create(target.config, size)
    if acceptance_rate is not None:
      drafter = dataclasses.replace(drafter, acceptance_rate=acceptance_rate)
    params = drafter.init_params(key_for(Purpose.DRAFTER_WEIGHTS), target.dtype)
    return LoadedDrafter(name, drafter, params)
  path = pathlib.Path(path_or_name)
  if _is_bundle(path):
    bundle = kdtr.read_bundle(path)
    if bundle.drafter is None or bundle.drafter_config is None:
      raise UserError(f'{path}: the bundle holds no drafter')
    config, source = bundle.drafter_config, MappingSource(bundle.drafter)
    # In a file with both, the recipe is the target's.
    recipe = bundle.recipe if bundle.target is None else {}
  else:
    if file_kind(path) is None:
      known = ', '.join(registry.names('drafter'))
      raise UserError(f'drafter {name!r} is neither a path nor one of {known}')
    folder = _folder(path, 'drafter')
    where = folder / 'config.json'
    config = huggingface.drafter_config(
      huggingface.read_json(where), str(where), target.config.num_hidden_layers
    )
    source = SafetensorsSource(folder)
    _, recipe, _ = read_extra(folder, name)
  config = huggingface.with_attention_factor(config, attention_factor)
  size = config.block_size if block_size is None else block_size
  _check_block_size(size, config.block_size)
  drafter = DFlashDrafter(config, size)
  _check_fit(drafter, target.config, name)
  _check_trained_for(recipe, target, name)
  params = huggingface.drafter_params(
    config, source, target.dtype, source_name=name
  )
  return LoadedDrafter(name, drafter, params)


def _dtype(name: str) -> Any:
  if name not in DTYPES:
    raise UserError(f'dtype={name!r} is none of {", ".join(DTYPES)}')
  return DTYPES[name]


def _weights_dtype(weights: str, dtype: str) -> Any:
  """The dtype of dequantised weights, None for `as_stored`."""
  if weights not in WEIGHTS:
    raise UserError(f'weights={weights!r} is none of {", ".join(WEIGHTS)}')
  if (weights, dtype) == ('float32', 'bfloat16'):
    raise UserError(f'weights={weights} is finer than dtype={dtype}')
  return DTYPES.get(weights)


def _is_bundle(path: pathlib.Path) -> bool:
  return path.suffix == '.kdtr' or file_kind(path) == 'file'


def _folder(path: pathlib.Path, kind: str) -> pathlib.Path:
  if file_kind(path) is None:
    raise UserError(f'{kind} {path}: no such file or folder')
  return path


def _check_block_size(size: int, trained: int | None) -> None:
  DecodeConfig(tree_budget=0, draft_depth=size - 1)
  if trained is not None and size > trained:
    raise UserError(
      f'block_size={size} exceeds the {trained} that the drafter was trained '
      'for'
    )


def trained_for(target: Target) -> dict[str, str]:
  """The entry `target` in the recipe of a drafter for this target."""
  return {'name': target.name, 'weights': target.digest}


def _check_trained_for(
  recipe: Mapping[str, Any], target: Target, name: str
) -> None:
  """Refuses a drafter whose recipe names another target."""
  stated = recipe.get('target')
  if not isinstance(stated, Mapping):
    return
  weights = stated.get('weights')
  if isinstance(weights, str) and weights != target.digest:
    raise UserError(
      f'drafter {name}: was trained for the target {stated.get("name")} with '
      f'the weights {short(weights)}, not for {target.name} with '
      f'{short(target.digest)}; give that target, or train a drafter with '
      '--mode=train_drafter'
    )


def check_pair(target: Target, drafter: LoadedDrafter | None) -> None:
  """Checks that a target and a drafter are loaded and fit each other.

  Raises:
    UserError: one is not loaded, or the drafter is made for another target.
  """
  if not isinstance(target, Target):
    raise UserError(f'target={show(target)} is not loaded; use load_target')
  if drafter is None:
    return
  if not isinstance(drafter, LoadedDrafter):
    raise UserError(f'drafter={show(drafter)} is not loaded; use load_drafter')
  _check_fit(drafter.drafter, target.config, drafter.name)
  for leaf in jax.tree.leaves(drafter.params):
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    if floating and leaf.dtype != target.dtype:
      raise UserError(
        f'drafter {drafter.name}: dtype={leaf.dtype} does not fit the target, '
        f'which has {jnp.dtype(target.dtype)}'
      )


def _check_fit(drafter: Drafter, target: ModelConfig, name: str) -> None:
  """Refuses a drafter for a target of other sizes."""
  for field, own in drafter.target_sizes.items():
    wanted = getattr(target, field)
    if own != wanted:
      raise UserError(
        f'drafter {name} does not fit the target: it is made for '
        f'{field}={own}, not {wanted}'
      )
