"""The contents of a KDTR bundle and their checks."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.checkpoint_tensors import (
  Shapes,
  drafter_shapes,
  tensor_shapes,
)
from kdtree_jax.io.files import JsonObject, show, show_more
from kdtree_jax.io.finite import check_finite
from kdtree_jax.io.tensors import FLOAT_DTYPES, dtype_name
from kdtree_jax.io.tokenizer_files import TOKENIZER_FILES

# Golden token ids; other golden tensors may have any name and shape.
GOLDEN_IDS = ('prompt', 'ar_tokens')


class BundleError(UserError):
  """A bundle that is damaged, inconsistent or of another version."""


@dataclasses.dataclass(frozen=True)
class Bundle:
  """The contents of a `.kdtr` file.

  Attributes:
    name: the variant's name.
    config: the target's architecture; None: the bundle is a drafter alone.
    target: the target's weights by Hugging Face name, float32, bfloat16 or
      float16, or None.
    golden: `prompt [P]` and `ar_tokens [T]` int32, and any other tensors to
      compare with; may be empty.
    drafter_config: the DFlash drafter's architecture, or None.
    drafter: the drafter's weights by z-lab's names, or None.
    recipe: how the bundle was made, as JSON.
    tokenizer: bytes of files by their names in `TOKENIZER_FILES`.
  """

  name: str
  config: ModelConfig | None
  target: Mapping[str, np.ndarray] | None
  golden: Mapping[str, np.ndarray]
  drafter_config: DrafterConfig | None
  drafter: Mapping[str, np.ndarray] | None
  recipe: JsonObject
  tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


def check_contents(bundle: Bundle) -> None:
  """Checks names, shapes, dtypes and values against the configs."""
  config, drafter = bundle.config, bundle.drafter_config
  if drafter is not None:
    _check_weights('drafter', bundle.drafter or {}, drafter_shapes(drafter))
  _check_names(bundle.tokenizer)
  if config is None:
    if drafter is None:
      raise BundleError('holds neither a target nor a drafter')
    for section in ('golden', 'tokenizer'):
      if getattr(bundle, section):
        raise BundleError(f'has {section}, but no target')
    return
  _check_weights('target', bundle.target or {}, tensor_shapes(config))
  if drafter is not None:
    _check_pair(config, drafter)
  _check_golden(bundle.golden, config.vocab_size)


def _check_pair(config: ModelConfig, drafter: DrafterConfig) -> None:
  for name, targets in (
    ('hidden_size', config.hidden_size),
    ('vocab_size', config.vocab_size),
    ('num_target_layers', config.num_hidden_layers),
  ):
    ours = getattr(drafter, name)
    if ours != targets:
      raise BundleError(
        f"drafter_config.{name} is {ours}, but the target's is {targets}"
      )


def _check_names(files: Iterable[str]) -> None:
  for name in files:
    if name not in TOKENIZER_FILES:
      raise BundleError(
        f'tensor {show(f"tokenizer/{name}")} is none of '
        f'{", ".join(TOKENIZER_FILES)}'
      )


def check_files(tensors: Mapping[str, np.ndarray]) -> None:
  """Checks that tokenizer files are rows of bytes with known names."""
  _check_names(tensors)
  for name, value in tensors.items():
    if dtype_name(value.dtype) != 'U8' or value.ndim != 1:
      raise BundleError(
        f'tensor {show(f"tokenizer/{name}")} is {dtype_name(value.dtype)} '
        f'{list(value.shape)}, not a row of U8'
      )


def _check_weights(
  section: str, tensors: Mapping[str, np.ndarray], expected: Shapes
) -> None:
  faults = []
  for state, odd in (
    ('missing', set(expected) - set(tensors)),
    ('unexpected', set(tensors) - set(expected)),
  ):
    names = [f'{section}/{name}' for name in sorted(odd)]
    if names:
      more = show_more(names[1:])
      faults.append(f'tensor {show(names[0])} is {state}{more}')
  if faults:
    raise BundleError('; '.join(faults))
  for name, value in tensors.items():
    full = show(f'{section}/{name}')
    if value.shape != expected[name]:
      raise BundleError(
        f'tensor {full} has shape {list(value.shape)}, the config asks for '
        f'{list(expected[name])}'
      )
    if dtype_name(value.dtype) not in FLOAT_DTYPES:
      raise BundleError(
        f'tensor {full} has dtype {value.dtype}; supported: '
        f'{", ".join(FLOAT_DTYPES)}'
      )
    check_finite(f'{section}/{name}', value)


def _check_golden(tensors: Mapping[str, np.ndarray], vocab_size: int) -> None:
  present = [name for name in GOLDEN_IDS if name in tensors]
  if len(present) == 1:
    lacking = next(name for name in GOLDEN_IDS if name not in tensors)
    raise BundleError(f'golden has {present[0]} without {lacking}')
  for name, value in tensors.items():
    full = show(f'golden/{name}')
    dtype = dtype_name(value.dtype)
    if name not in GOLDEN_IDS:
      if dtype not in FLOAT_DTYPES and dtype not in ('I32', 'I64'):
        raise BundleError(f'tensor {full} has the unsupported dtype {dtype}')
      if dtype in FLOAT_DTYPES:
        check_finite(f'golden/{name}', value)
      continue
    if dtype != 'I32' or value.ndim != 1:
      raise BundleError(
        f'tensor {full} is {dtype} {list(value.shape)}, not a row of I32'
      )
    if value.size and not 0 <= value.min() <= value.max() < vocab_size:
      raise BundleError(
        f'tensor {full} holds ids outside the vocabulary of {vocab_size}'
      )
