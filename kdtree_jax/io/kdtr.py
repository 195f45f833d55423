"""KDTR bundles: a target, perhaps its drafter, and answers, in one file.

A bundle is a safetensors file, so that every tool for those opens it. Tensors
are `target/<name>` and `drafter/<name>`, named as in Hugging Face checkpoints
with experts one by one, `golden/<name>`, and the bytes of the tokenizer's
files as `tokenizer/<file>`. One metadata key, `kdtr`, holds the manifest:
configs, recipe, and a digest of every tensor and of itself. A bundle without a
target holds a drafter alone.

There is one valid file for given contents. A reader therefore compares the
header with the one that a writer would have made, the size with what it
announces and all data with digests, and no flipped bit survives, not even one
in padding that no parser looks at. Neither side holds the data twice.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
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
from kdtree_jax.io.files import (
  canonical_json,
  file_kind,
  one_line,
  parse_json,
  show,
  show_path,
  write_atomically,
)
from kdtree_jax.io.tensors import (
  MappingSource,
  PrefixedSource,
  SafetensorsSource,
  TensorSource,
  dtype_name,
)
from kdtree_jax.schema import check_types, from_json

VERSION = 1
METADATA_KEY = 'kdtr'
SECTIONS = ('target', 'drafter', 'golden', 'tokenizer')
# The order of tensors in a file: that of safetensors, widest values first.
_FILE_ORDER = ('I64', 'F32', 'I32', 'BF16', 'F16', 'F8_E4M3', 'U8')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The keys of a manifest."""

  version: int
  name: str
  config: dict | None
  drafter_config: dict | None
  recipe: dict
  tensors: dict
  sha256: str

  def __post_init__(self):
    check_types(self)


def write_bundle(path: os.PathLike | str, bundle: Bundle) -> None:
  """Writes a bundle, atomically; equal bundles give equal bytes.

  Raises:
    BundleError: the contents do not fit the configs, or the file cannot be
      written; what was there before stays.
  """
  try:
    tensors = _flatten(bundle)
    check_contents(bundle)
    header, names = _header(tensors, _manifest(bundle, tensors))
  except BundleError as e:
    raise BundleError(f'{path}: {e}') from e
  except UserError as e:
    raise BundleError(f'{path}: {one_line(e)}') from e
  data = (_bytes(tensors[name]) for name in names)
  write_atomically(path, itertools.chain([header], data), BundleError)


def read_bundle(path: os.PathLike | str) -> Bundle:
  """Reads a bundle and checks all of it.

  Raises:
    BundleError: not a bundle, damaged, of another version, or at odds with
      its own configs.
  """
  path = pathlib.Path(path)
  with _naming(path):
    return _read(path)


def read_tokenizer(path: os.PathLike | str) -> dict[str, bytes]:
  """The tokenizer's files of a bundle, if any, and nothing else of it.

  Raises:
    BundleError: not a bundle, or what was read is damaged.
  """
  path = pathlib.Path(path)
  with _naming(path):
    source, _, manifest = _open(path)
    names = [n for n in source.names() if n.startswith('tokenizer/')]
    tensors = _verified(source, manifest, names)
    check_files(files := _section(MappingSource(tensors), 'tokenizer'))
  return {name: value.tobytes() for name, value in files.items()}


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  """Errors in one line that names the file."""
  try:
    yield
  except UserError as e:
    text, where = one_line(e), show_path(path)
    named = text if text.startswith(f'{where}: ') else f'{where}: {text}'
    raise BundleError(named) from e


def _open(
  path: pathlib.Path,
) -> tuple[SafetensorsSource, str, dict[str, Any]]:
  """The file, and its manifest as text and parsed."""
  if file_kind(path) == 'folder':
    raise BundleError('is a folder, not a bundle')
  source = SafetensorsSource(path)
  text = source.metadata().get(METADATA_KEY)
  if text is None:
    raise BundleError(f'no metadata {METADATA_KEY!r}: not a KDTR bundle')
  manifest = _parse_manifest(text)
  _check_table(manifest['tensors'], source)
  return source, text, manifest


def _verified(
  source: SafetensorsSource, manifest: dict[str, Any], names: Iterable[str]
) -> dict[str, np.ndarray]:
  """Tensors that match their digests."""
  tensors = {name: source.read(name) for name in names}
  for name, value in tensors.items():
    if _digest(value) != manifest['tensors'][name]['sha256']:
      raise BundleError(f'tensor {show(name)} does not match its digest')
  return tensors


def _read(path: pathlib.Path) -> Bundle:
  source, text, manifest = _open(path)
  config = drafter_config = None
  if manifest['config'] is not None:
    config = ModelConfig.from_dict(manifest['config'])
  if manifest['drafter_config'] is not None:
    drafter_config = DrafterConfig.from_dict(manifest['drafter_config'])
  tensors = _verified(source, manifest, source.names())
  # Left: padding, the order of the header, other metadata, other spellings.
  header, _ = _header(tensors, text)
  size = len(header) + sum(value.nbytes for value in tensors.values())
  if _read_start(path, len(header)) != (header, size):
    raise BundleError('header is not as a writer of bundles makes it')
  sections = {
    section: _section(MappingSource(tensors), section)
    for section, present in (
      ('target', config is not None),
      ('drafter', drafter_config is not None),
      ('golden', True),
      ('tokenizer', True),
    )
    if present
  }
  check_files(sections['tokenizer'])
  files = {n: value.tobytes() for n, value in sections['tokenizer'].items()}
  bundle = Bundle(
    name=manifest['name'],
    config=config,
    target=sections.get('target'),
    golden=sections['golden'],
    drafter_config=drafter_config,
    drafter=sections.get('drafter'),
    recipe=manifest['recipe'],
    tokenizer=files,
  )
  if len(tensors) != sum(len(section) for section in sections.values()):
    stray = next(
      n for n in tensors if n.split('/', 1)[0] not in sections or '/' not in n
    )
    raise BundleError(f'tensor {show(stray)} belongs to no section')
  check_contents(bundle)
  return bundle


def _read_start(path: pathlib.Path, count: int) -> tuple[bytes, int]:
  """The first bytes of a file and the number of all."""
  try:
    with open(path, 'rb') as file:
      return file.read(count), os.fstat(file.fileno()).st_size
  except OSError as e:
    raise BundleError(f'cannot be read: {e.strerror or e}') from e


def _section(source: TensorSource, section: str) -> dict[str, np.ndarray]:
  view = PrefixedSource(source, section + '/')
  return {name: view.read(name) for name in view.names()}


def _flatten(bundle: Bundle) -> dict[str, np.ndarray]:
  """All tensors under their names in the file, contiguous."""
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


def _digest(value: np.ndarray) -> str:
  return hashlib.sha256(_bytes(value)).hexdigest()


def _bytes(value: np.ndarray) -> memoryview:
  """The bytes of a contiguous array, not copied."""
  return value.reshape(-1).view(np.uint8).data


def _manifest(bundle: Bundle, tensors: Mapping[str, np.ndarray]) -> str:
  """The manifest's text, sealed by a digest of all the rest of it."""
  drafter = bundle.drafter_config
  manifest = {
    'version': VERSION,
    'name': bundle.name,
    'config': None if bundle.config is None else bundle.config.to_dict(),
    'drafter_config': None if drafter is None else drafter.to_dict(),
    'recipe': dict(bundle.recipe),
    'tensors': {
      name: {
        'dtype': dtype_name(value.dtype),
        'shape': list(value.shape),
        'sha256': _digest(value),
      }
      for name, value in tensors.items()
    },
  }
  try:
    manifest['sha256'] = _seal(manifest)
    text = canonical_json(manifest)
  except (TypeError, ValueError, RecursionError) as e:
    raise BundleError(f'recipe or config is not JSON: {e}') from e
  _parse_manifest(text)
  return text


def _seal(manifest: Mapping[str, Any]) -> str:
  """The digest of a manifest without its own digest."""
  rest = {k: v for k, v in manifest.items() if k != 'sha256'}
  return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def _header(
  tensors: Mapping[str, np.ndarray], manifest: str
) -> tuple[bytes, list[str]]:
  """What a file begins with, and the names in the order of their data.

  Byte for byte as `safetensors.numpy.save` has it, which would need all data.
  """
  dtypes = {name: dtype_name(value.dtype) for name, value in tensors.items()}
  for name, dtype in dtypes.items():
    if dtype not in _FILE_ORDER:
      raise BundleError(
        f'tensor {show(name)} has the unsupported dtype {dtype}'
      )
  # Names by their UTF-8, which is the order of code points too.
  names = sorted(tensors, key=lambda n: (_FILE_ORDER.index(dtypes[n]), n))
  # One metadata key: safetensors writes several in random order.
  header: dict[str, Any] = {'__metadata__': {METADATA_KEY: manifest}}
  end = 0
  for name in names:
    begin, end = end, end + tensors[name].nbytes
    header[name] = {
      'dtype': dtypes[name],
      'shape': list(tensors[name].shape),
      'data_offsets': [begin, end],
    }
  text = json.dumps(header, ensure_ascii=False, separators=(',', ':'))
  try:
    data = text.encode()
  except UnicodeEncodeError as e:
    raise BundleError(f'a name is no text: {one_line(e)}') from e
  data += b' ' * (-len(data) % 8)
  return len(data).to_bytes(8, 'little') + data, names


def _parse_manifest(text: str) -> dict[str, Any]:
  """The manifest, well-formed, canonical and matching its own digest."""
  try:
    manifest = parse_json(text)
    canonical = canonical_json(manifest)
  except (ValueError, RecursionError) as e:
    raise BundleError(f'manifest is not JSON: {one_line(e)}') from e
  if not isinstance(manifest, dict):
    raise BundleError('manifest is not a JSON object')
  # Asked before the keys: another version may have others.
  version = manifest.get('version')
  if type(version) is not int or version != VERSION:
    raise BundleError(f'version {show(version)}; supported: {VERSION}')
  from_json(Manifest, manifest)
  if not manifest['name']:
    raise BundleError('manifest: name is empty')
  if canonical != text:
    raise BundleError('manifest is not in its canonical spelling')
  if _seal(manifest) != manifest['sha256']:
    raise BundleError('manifest does not match its digest')
  return manifest


def _check_table(table: dict[str, Any], source: SafetensorsSource) -> None:
  """The manifest's table of tensors against the header of the file."""
  odd = sorted(set(table) ^ set(source.names()))
  if odd:
    where = 'manifest' if odd[0] in table else 'header'
    raise BundleError(f'tensor {show(odd[0])} is only in the {where}')
  for name, entry in table.items():
    header = {'dtype': source.dtype(name), 'shape': list(source.shape(name))}
    if not isinstance(entry, dict) or set(entry) != {*header, 'sha256'}:
      raise BundleError(f'manifest: entry of tensor {show(name)} is malformed')
    # As text, because True == 1 in Python and 1.0 == 1.
    stated = {key: entry[key] for key in header}
    if canonical_json(stated) != canonical_json(header):
      raise BundleError(
        f'tensor {show(name)} is {header["dtype"]} {header["shape"]} in the '
        f'header, {show(stated)} in the manifest'
      )
