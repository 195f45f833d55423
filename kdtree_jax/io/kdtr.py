"""KDTR bundles: a target, its drafter and golden answers in one file.

A bundle is a safetensors file. Tensors are `target/<name>` and
`drafter/<name>`, named as in Hugging Face checkpoints with experts one by one,
`golden/<name>`, and the bytes of the tokenizer's files as `tokenizer/<file>`.
One metadata key, `kdtr`, holds the manifest: configs, recipe, and a digest of
every tensor and of itself. A bundle without a target holds a drafter alone.

A reader compares every tensor with its entry in the manifest and the manifest
with its own digest, so that a damaged or edited file is refused. Neither writer
nor reader copies the data.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.bundle import (
  Bundle,
  BundleError,
  check_contents,
  check_files,
)
from kdtree_jax.io.digests import sha256
from kdtree_jax.io.files import (
  JsonObject,
  StrPath,
  canonical_json,
  file_kind,
  one_line,
  parse_json,
  replacing,
  show,
  show_path,
)
from kdtree_jax.io.tensors import (
  SafetensorsSource,
  dtype_name,
  write_safetensors,
)
from kdtree_jax.schema import check_types, from_json

VERSION = 1
METADATA_KEY = 'kdtr'
SECTIONS = ('target', 'drafter', 'golden', 'tokenizer')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The keys of a manifest.

  Attributes:
    version: version of the format.
    name: the bundle's name.
    config: the target's config.
    drafter_config: the drafter's config.
    recipe: how the bundle was made.
    tensors: dtype, shape and SHA-256 of the bytes of every tensor, by name.
    sha256: SHA-256 of the JSON of all other keys.
  """

  version: int
  name: str
  config: dict[str, Any] | None
  drafter_config: dict[str, Any] | None
  recipe: dict[str, Any]
  tensors: dict[str, Any]
  sha256: str

  def __post_init__(self):
    check_types(self)


def write_bundle(path: StrPath, bundle: Bundle) -> None:
  """Writes a bundle atomically; equal bundles give equal bytes.

  Raises:
    BundleError: the contents do not fit the configs, or the file cannot be
      written; an old file is then kept.
  """
  with _naming_file(path):
    tensors = _flatten(bundle)
    check_contents(bundle)
    metadata = {METADATA_KEY: _manifest(bundle, tensors)}
    with replacing(path, BundleError) as temporary:
      write_safetensors(temporary, tensors, metadata)


def read_bundle(path: StrPath) -> Bundle:
  """Reads a bundle and checks all of it.

  Raises:
    BundleError: the file is no bundle, is damaged, of another version, or its
      contents do not fit its configs.
  """
  with _naming_file(path):
    source, manifest = _open(path)
    config = drafter_config = None
    if manifest.config is not None:
      config = ModelConfig.from_dict(manifest.config)
    if manifest.drafter_config is not None:
      drafter_config = DrafterConfig.from_dict(manifest.drafter_config)
    tensors = _verified(source, manifest, source.names())
    lacking = {'target': config is None, 'drafter': drafter_config is None}
    sections = {s: {} for s in SECTIONS if not lacking.get(s)}
    for name, value in tensors.items():
      section, slash, rest = name.partition('/')
      if section not in sections or not slash:
        raise BundleError(f'tensor {show(name)} belongs to no section')
      sections[section][rest] = value
    bundle = Bundle(
      name=manifest.name,
      config=config,
      target=sections.get('target'),
      golden=sections['golden'],
      drafter_config=drafter_config,
      drafter=sections.get('drafter'),
      recipe=manifest.recipe,
      tokenizer=_files(sections['tokenizer']),
    )
    check_contents(bundle)
    return bundle


def read_tokenizer(path: StrPath) -> dict[str, bytes]:
  """The tokenizer's files of a bundle; nothing else of it is read.

  Raises:
    BundleError: the file is no bundle, or its tokenizer is damaged.
  """
  prefix = 'tokenizer/'
  with _naming_file(path):
    source, manifest = _open(path)
    names = [name for name in source.names() if name.startswith(prefix)]
    tensors = _verified(source, manifest, names)
    return _files({n.removeprefix(prefix): v for n, v in tensors.items()})


def _files(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
  check_files(tensors)
  return {name: value.tobytes() for name, value in tensors.items()}


@contextlib.contextmanager
def _naming_file(path: StrPath) -> Generator[None]:
  """Turns errors into one line that names the file."""
  try:
    yield
  except UserError as e:
    text, where = one_line(e), show_path(path)
    named = text if text.startswith(f'{where}: ') else f'{where}: {text}'
    raise BundleError(named) from e


def _open(path: StrPath) -> tuple[SafetensorsSource, Manifest]:
  """Opens a file and its manifest, which must list the same tensors."""
  if file_kind(path) == 'folder':
    raise BundleError('is a folder, not a bundle')
  source = SafetensorsSource(path)
  metadata = source.metadata()
  if set(metadata) != {METADATA_KEY}:
    raise BundleError(
      f'metadata is not {METADATA_KEY!r} alone: not a KDTR bundle'
    )
  manifest = _parse_manifest(metadata[METADATA_KEY])
  odd = sorted(set(manifest.tensors) ^ set(source.names()))
  if odd:
    where = 'manifest' if odd[0] in manifest.tensors else 'header'
    raise BundleError(f'tensor {show(odd[0])} is only in the {where}')
  return source, manifest


def _verified(
  source: SafetensorsSource, manifest: Manifest, names: Iterable[str]
) -> dict[str, np.ndarray]:
  """Reads tensors and compares them with the manifest."""
  tensors = {name: source.read(name) for name in names}
  for name, value in tensors.items():
    found = _entry(value) | {'dtype': source.dtype(name)}
    if found != manifest.tensors[name]:
      raise BundleError(
        f'tensor {show(name)} does not match its digest, dtype and shape in '
        'the manifest'
      )
  return tensors


def _flatten(bundle: Bundle) -> dict[str, np.ndarray]:
  """All tensors by their names in the file, contiguous."""
  for weights, config in (('drafter', 'drafter_config'), ('target', 'config')):
    if (getattr(bundle, weights) is None) != (getattr(bundle, config) is None):
      raise BundleError(f'{weights} and {config} go together')
  tensors = {}
  for section in SECTIONS:
    for name, value in (getattr(bundle, section) or {}).items():
      if section == 'tokenizer':
        value = np.frombuffer(value, np.uint8)
      tensors[f'{section}/{name}'] = np.asarray(value, order='C')
  return tensors


def _entry(value: np.ndarray) -> JsonObject:
  """The manifest's entry for a contiguous tensor."""
  return {
    'dtype': dtype_name(value.dtype),
    'shape': list(value.shape),
    'sha256': hashlib.sha256(value.reshape(-1).view(np.uint8)).hexdigest(),
  }


def _manifest(bundle: Bundle, tensors: Mapping[str, np.ndarray]) -> str:
  """The manifest's text."""
  drafter = bundle.drafter_config
  manifest = {
    'version': VERSION,
    'name': bundle.name,
    'config': None if bundle.config is None else bundle.config.to_dict(),
    'drafter_config': None if drafter is None else drafter.to_dict(),
    'recipe': dict(bundle.recipe),
    'tensors': {name: _entry(value) for name, value in tensors.items()},
  }
  try:
    text = canonical_json(manifest | {'sha256': _digest_of(manifest)})
  except (TypeError, ValueError, RecursionError) as e:
    raise BundleError(f'recipe or config is not JSON: {e}') from e
  _parse_manifest(text)
  return text


def _digest_of(manifest: JsonObject) -> str:
  """The digest of a manifest without its own digest."""
  return sha256({k: v for k, v in manifest.items() if k != 'sha256'})


def _parse_manifest(text: str) -> Manifest:
  """Parses and checks a manifest."""
  try:
    fields = parse_json(text)
    digest = _digest_of(fields) if isinstance(fields, dict) else None
  except (ValueError, RecursionError) as e:
    raise BundleError(f'manifest is not JSON: {one_line(e)}') from e
  if digest is None:
    raise BundleError('manifest is not a JSON object')
  # Checked first, because another version may have other keys.
  version = fields.get('version')
  if type(version) is not int or version != VERSION:
    raise BundleError(f'version {show(version)}; supported: {VERSION}')
  manifest = from_json(Manifest, fields)
  if not manifest.name:
    raise BundleError('manifest: name is empty')
  if manifest.sha256 != digest:
    raise BundleError('manifest does not match its digest')
  return manifest
