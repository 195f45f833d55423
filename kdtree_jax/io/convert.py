"""Checkpoint folders as bundles."""

import dataclasses
import pathlib

import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.checkpoint_config import model_config, quantization
from kdtree_jax.io.checkpoint_extras import read_extras
from kdtree_jax.io.checkpoint_tensors import (
  drafter_shapes,
  match_drafter,
  match_target,
  tensor_shapes,
)
from kdtree_jax.io.checkpoint_weights import expert_projection
from kdtree_jax.io.drafter_config import drafter_config
from kdtree_jax.io.export import DRAFTER_FOLDER, read_extra
from kdtree_jax.io.files import StrPath, file_kind
from kdtree_jax.io.kdtr import Bundle
from kdtree_jax.io.parameter_reader import ParameterReader
from kdtree_jax.io.stop_ids import stop_ids
from kdtree_jax.io.tensors import SafetensorsSource, read_json
from kdtree_jax.io.tokenizer_files import read_files


def read_checkpoint(
  folder: StrPath,
  *,
  weights_dtype: DTypeLike | None = None,
  drafter: StrPath | None = None,
) -> Bundle:
  """Reads a folder in the Hugging Face layout as a bundle.

  Args:
    folder: a target; the folder `dflash/` in it is its drafter.
    weights_dtype: None keeps all tensors as they are stored, bit for bit; a
      dtype dequantises weights and rounds all but the router's to it.
    drafter: the folder of another drafter.

  Raises:
    UserError: the folder does not load, or is quantised and `weights_dtype` is
      None.
  """
  folder = pathlib.Path(folder)
  raw = read_json(folder / 'config.json')
  where = str(folder / 'config.json')
  # A bundle states in one place what a folder states in several.
  config = dataclasses.replace(
    model_config(raw, where), eos_token_id=stop_ids(folder, raw)
  )
  found = quantization(raw, where)
  if found is not None and weights_dtype is None:
    raise UserError(
      f'{folder}: is stored as {found.format}, which a bundle cannot hold; '
      'give --weights=bfloat16 or --weights=float32'
    )
  source = SafetensorsSource(folder)
  match = match_target(
    config,
    source,
    source_name=str(folder),
    quantization=found,
    extras=read_extras(raw, where),
  )
  reader = ParameterReader(
    source,
    match,
    np.float32 if weights_dtype is None else weights_dtype,
    source_name=str(folder),
    quantization=found,
    weights_dtype=weights_dtype,
  )
  reader.check_tied_head()
  name, recipe, golden = read_extra(folder, folder.name)
  if drafter is None and file_kind(folder / DRAFTER_FOLDER) == 'folder':
    drafter = folder / DRAFTER_FOLDER
  draft_config = draft_tensors = None
  if drafter is not None:
    draft_config, draft_tensors = _drafter(pathlib.Path(drafter), config)
  return Bundle(
    name=name,
    config=config,
    target=_tensors(config, reader, source, weights_dtype),
    golden=golden,
    drafter_config=draft_config,
    drafter=draft_tensors,
    recipe=recipe,
    tokenizer=read_files(folder),
  )


def read_drafter(folder: StrPath, *, dtype: DTypeLike | None = None) -> Bundle:
  """Reads the folder of a DFlash drafter as a bundle without a target.

  Args:
    folder: the drafter.
    dtype: rounds all tensors; None keeps them as they are stored.

  Raises:
    UserError: the folder does not load.
  """
  folder = pathlib.Path(folder)
  config, tensors = _drafter(folder, None)
  if dtype is not None:
    tensors = {n: value.astype(dtype) for n, value in tensors.items()}
  name, recipe, _ = read_extra(folder, folder.absolute().name)
  return Bundle(
    name=name,
    config=None,
    target=None,
    golden={},
    drafter_config=config,
    drafter=tensors,
    recipe=recipe,
  )


def _tensors(
  config: ModelConfig,
  reader: ParameterReader,
  source: SafetensorsSource,
  dtype: DTypeLike | None,
) -> dict[str, np.ndarray]:
  """All tensors under their own names, experts one by one."""
  names = reader.match.names

  def tensor(name: str) -> np.ndarray:
    if name not in names and reader.match.format(name) is None:
      value = expert_projection(config, lambda n: source.view(names[n]), name)
      return np.array(value, dtype=value.dtype if dtype is None else dtype)
    if dtype is None:
      return source.read(names[name])
    if '.mlp.gate.' in name:
      return np.asarray(reader.plain(name, np.float32))
    return np.asarray(reader.dequantized(name))

  return {name: tensor(name) for name in tensor_shapes(config)}


def _drafter(
  folder: pathlib.Path, target: ModelConfig | None
) -> tuple[DrafterConfig, dict[str, np.ndarray]]:
  where = folder / 'config.json'
  layers = None if target is None else target.num_hidden_layers
  config = drafter_config(read_json(where), str(where), layers)
  if config.draft_vocab_size is not None:
    raise UserError(
      f'{folder}: a drafter with a head of its own has no place in a bundle'
    )
  source = SafetensorsSource(folder)
  match = match_drafter(config, source, source_name=str(folder))
  names = match.names
  return config, {n: source.read(names[n]) for n in drafter_shapes(config)}
