"""Checkpoint folders as the contents of bundles."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.checkpoint_config import (
  model_config,
  quantization,
)
from kdtree_jax.io.checkpoint_extras import read_extras
from kdtree_jax.io.checkpoint_tensors import (
  drafter_shapes,
  match_drafter,
  match_target,
  tensor_shapes,
)
from kdtree_jax.io.checkpoint_weights import Reader
from kdtree_jax.io.drafter_config import drafter_config
from kdtree_jax.io.export import DRAFTER_FOLDER, read_extra
from kdtree_jax.io.files import file_kind
from kdtree_jax.io.kdtr import Bundle
from kdtree_jax.io.stop_ids import stop_ids
from kdtree_jax.io.tensors import SafetensorsSource, read_json
from kdtree_jax.io.tokenizer_files import read_files


def read_checkpoint(
  folder: os.PathLike | str,
  *,
  expanded: Any = None,
  drafter: os.PathLike | str | None = None,
) -> Bundle:
  """Reads a folder in the Hugging Face layout as a bundle.

  Args:
    folder: a target; `dflash/` in it is its drafter.
    expanded: None takes numbers as they are stored, bit for bit; a dtype
      expands quantised weights and rounds all but the router's to it.
    drafter: the folder of another drafter.

  Raises:
    UserError: what does not load, or is quantised and not to be expanded.
  """
  folder = pathlib.Path(folder)
  raw = read_json(folder / 'config.json')
  where = str(folder / 'config.json')
  # A bundle has one place for what a folder says in several.
  config = dataclasses.replace(
    model_config(raw, where), eos_token_id=stop_ids(folder, raw)
  )
  found = quantization(raw, where)
  if found is not None and expanded is None:
    raise UserError(
      f'{folder}: is stored as {found.format}, which a bundle is not; give '
      '--weights=bfloat16 or --weights=float32'
    )
  source = SafetensorsSource(folder)
  match = match_target(
    config,
    source,
    source_name=str(folder),
    quantization=found,
    extras=read_extras(raw, where),
  )
  dtype = np.dtype(np.float32 if expanded is None else expanded)
  reader = Reader(source, match, found, dtype, expanded, str(folder))
  reader.check_tied_head()
  name, recipe, golden = read_extra(folder, folder.name)
  if drafter is None and file_kind(folder / DRAFTER_FOLDER) == 'folder':
    drafter = folder / DRAFTER_FOLDER
  drafter_fields = (None, None)
  if drafter is not None:
    drafter_fields = _drafter(pathlib.Path(drafter), config)
  return Bundle(
    name=name,
    config=config,
    target=_tensors(config, reader, source, expanded),
    golden=golden,
    drafter_config=drafter_fields[0],
    drafter=drafter_fields[1],
    recipe=recipe,
    tokenizer=read_files(folder),
  )


def read_drafter(folder: os.PathLike | str, *, dtype: Any = None) -> Bundle:
  """Reads the folder of a DFlash drafter as a bundle without a target.

  Args:
    folder: the drafter.
    dtype: None takes numbers as they are stored; else all are rounded to it.

  Raises:
    UserError: what does not load.
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
  config: ModelConfig, reader: Reader, source: SafetensorsSource, expanded: Any
) -> dict[str, np.ndarray]:
  """Every tensor under its own name, experts one by one."""
  names = reader.match.names
  out = {}
  for name in tensor_shapes(config):
    if name not in names and reader.match.form(name) is None:
      out[name] = _from_fused(config, source, names, name, expanded)
    elif expanded is None:
      out[name] = source.read(names[name])
    elif '.mlp.gate.' in name:
      out[name] = np.asarray(reader.plain(name, np.dtype(np.float32)))
    else:
      out[name] = np.asarray(reader.expanded(name))
  return out


def _from_fused(
  config: ModelConfig,
  source: SafetensorsSource,
  names: dict[str, str],
  name: str,
  expanded: Any,
) -> np.ndarray:
  """One expert's projection, out of the stack of its layer."""
  prefix, _, rest = name.partition('.mlp.experts.')
  expert, projection, _ = rest.split('.')
  width = config.moe_intermediate_size
  stack = prefix + '.mlp.experts.'
  stack += 'down_proj' if projection == 'down_proj' else 'gate_up_proj'
  value = source.view(names[stack])[int(expert)]
  if projection != 'down_proj':
    value = value[:width] if projection == 'gate_proj' else value[width:]
  return np.array(value, dtype=value.dtype if expanded is None else expanded)


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
