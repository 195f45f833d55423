"""Sources of tensors: safetensors files, folders of shards, mappings."""

import json
import mmap
import pathlib
import stat
from collections.abc import Iterable, Mapping
from typing import Protocol

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import (
  JsonObject,
  StrPath,
  file_kind,
  one_line,
  parse_json,
  reason,
  show,
  show_path,
)

SINGLE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'

# The dtypes of plain weights, as safetensors spells them.
FLOAT_DTYPES = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
}
# All that can be read; unsupported ones only to name them in errors.
_DTYPES = FLOAT_DTYPES | {
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'I32': np.dtype(np.int32),
  'I64': np.dtype(np.int64),
  'U8': np.dtype(np.uint8),
  'BOOL': np.dtype(np.bool_),
  'I8': np.dtype(np.int8),
  'U16': np.dtype(np.uint16),
  'I16': np.dtype(np.int16),
  'U32': np.dtype(np.uint32),
  'U64': np.dtype(np.uint64),
  'F64': np.dtype(np.float64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Bytes per value of every dtype that a header can name.
ITEM_BYTES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}
ITEM_BYTES |= {'F8_E5M2': 1, 'F8_E8M0': 1, 'C64': 8}


class CheckpointError(UserError):
  """A file, key or tensor that is missing, broken or unsupported."""


class TensorSource(Protocol):
  """Named tensors, read one at a time."""

  def names(self) -> tuple[str, ...]:
    """All names, sorted."""

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor, without reading it."""

  def dtype(self, name: str) -> str:
    """The dtype as safetensors spells it: `F32`, `BF16`, ..."""

  def view(self, name: str) -> np.ndarray:
    """The tensor in the source's memory; not to be written or kept."""

  def read(self, name: str) -> np.ndarray:
    """A copy of the tensor; bfloat16 and float8 as the dtypes of ml_dtypes."""
    return self.view(name).copy()

  def prefetch(self, names: Iterable[str]) -> None:
    """Announces tensors that will be viewed soon."""

  def release(self, name: str) -> None:
    """Announces that a view is no longer used: its memory may be freed."""


def dtype_name(dtype: np.dtype) -> str:
  """A NumPy dtype as safetensors spells it, or else as NumPy does."""
  return _DTYPE_NAMES.get(dtype, str(dtype))


def read_json(path: StrPath) -> JsonObject:
  """The JSON object in a file.

  Raises:
    CheckpointError: the file is missing or unreadable, or holds no JSON
      object, or one with a key twice.
  """
  path = pathlib.Path(path)
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    raise CheckpointError(f'{path}: no such file') from None
  except (OSError, ValueError) as e:  # ValueError: a null byte.
    where = show_path(path)
    raise CheckpointError(f'{where}: cannot be read: {reason(e)}') from e
  return json_object(data, str(path))


def json_object(
  data: bytes, where: str, error: type[UserError] = CheckpointError
) -> JsonObject:
  """The JSON object in the bytes of a file; raises as `read_json`."""
  try:
    fields = parse_json(data)
  except ValueError as e:
    raise error(f'{where}: not JSON: {e}') from e
  if not isinstance(fields, dict):
    raise error(f'{where}: holds {show(fields)}, not a JSON object')
  return fields


def write_safetensors(
  path: pathlib.Path,
  tensors: Mapping[str, np.ndarray],
  metadata: dict[str, str],
) -> None:
  """Writes a new file with safetensors' own writer, which copies no data.

  That writer renames a file with private permissions to `path`, whatever is
  there. So a link, a pipe or a device is refused (use `files.replacing`), and
  the permissions of an ordinary new file are set.

  Raises:
    OSError: the file system refuses, `path` is no plain file, or a name is no
      valid unicode.
  """
  path.touch()
  mode = path.lstat().st_mode
  if not stat.S_ISREG(mode):
    raise OSError(f'{path} is no plain file')
  arrays = {k: np.asarray(v, order='C') for k, v in tensors.items()}
  try:
    safetensors.numpy.save_file(arrays, path, metadata)
  except (safetensors.SafetensorError, UnicodeEncodeError) as e:
    raise OSError(one_line(e)) from e
  path.chmod(mode)


class _MappedFile:
  """A safetensors file: its header, and a memory map of its data.

  Raises:
    CheckpointError: the file is missing, truncated or not safetensors.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path
    try:
      # Mapping a folder or a device would fail with an obscure message.
      if (kind := file_kind(path)) != 'file':
        problem = 'is not a file' if kind else 'no such file'
        raise CheckpointError(f'{path}: {problem}')
      # The library's parser checks everything; the one below need not.
      with safetensors.safe_open(str(path), framework='numpy') as handle:
        self.metadata: dict[str, str] = handle.metadata() or {}
      with open(path, 'rb') as file:
        size = int.from_bytes(file.read(8), 'little')
        header = json.loads(file.read(size))
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
      raise CheckpointError(f'{path}: cannot be read: {e.strerror or e}') from e
    except UserError as e:
      raise CheckpointError(str(e)) from e
    # ValueError: a path that is not UTF-8.
    except (safetensors.SafetensorError, ValueError) as e:
      raise CheckpointError(
        f'{path}: not a complete safetensors file: {e}'
      ) from e
    self._data = 8 + size
    self.entries = {k: v for k, v in header.items() if k != '__metadata__'}

  def view(self, name: str) -> np.ndarray:
    entry = self.entries[name]
    dtype = _DTYPES.get(entry['dtype'])
    if dtype is None:
      raise CheckpointError(
        f'{self.path}: tensor {show(name)} of dtype {entry["dtype"]} cannot '
        'be read'
      )
    begin, end = entry['data_offsets']
    flat = np.frombuffer(
      self._map, dtype, (end - begin) // dtype.itemsize, self._data + begin
    )
    return flat.reshape(entry['shape'])

  def advise(self, name: str, advice: int) -> None:
    """Advises the operating system about the pages of a tensor."""
    begin, end = self.entries[name]['data_offsets']
    begin = (self._data + begin) // mmap.PAGESIZE * mmap.PAGESIZE
    end += self._data
    if end > begin:
      self._map.madvise(advice, begin, end - begin)


class SafetensorsSource(TensorSource):
  """A safetensors file, or a folder with one file or with indexed shards.

  Headers are read and compared with the index; data is mapped.
  """

  def __init__(self, path: StrPath):
    """Opens the headers.

    Args:
      path: a file; or a folder that holds `model.safetensors`, or shards and
        `model.safetensors.index.json`.

    Raises:
      CheckpointError: a missing, truncated or corrupt file; an index that
        disagrees with its shards or names files outside the folder.
    """
    self.path = pathlib.Path(path)
    weight_map = None
    if file_kind(self.path) == 'folder':
      files, weight_map = _folder_files(self.path)
    else:
      files = (self.path,)
    self._tensors: dict[str, _MappedFile] = {}
    self._metadata: dict[str, str] = {}
    for path in files:
      file = _MappedFile(path)
      self._metadata |= file.metadata
      for name in file.entries:
        if name in self._tensors:
          other = self._tensors[name].path.name
          raise CheckpointError(
            f'{path}: tensor {show(name)} is also in the shard {other}'
          )
        self._tensors[name] = file
    if weight_map is not None:
      self._check_index(weight_map)

  def _check_index(self, weight_map: dict[str, str]) -> None:
    index = self.path / INDEX_FILE
    for name, shard in weight_map.items():
      found = self._tensors.get(name)
      if found is None or found.path != self.path / shard:
        raise CheckpointError(
          f'{index}: tensor {show(name)} is not in {shard}, where the index '
          'puts it'
        )
    for name, file in self._tensors.items():
      if name not in weight_map:
        raise CheckpointError(
          f'{file.path}: tensor {show(name)} is not in the index {INDEX_FILE}'
        )

  def _find(self, name: str) -> _MappedFile:
    if name not in self._tensors:
      raise CheckpointError(f'{self.path}: no tensor {show(name)}')
    return self._tensors[name]

  def names(self) -> tuple[str, ...]:
    return tuple(sorted(self._tensors))

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(self._find(name).entries[name]['shape'])

  def dtype(self, name: str) -> str:
    return self._find(name).entries[name]['dtype']

  def metadata(self) -> dict[str, str]:
    """The metadata of the header, or of all shards together."""
    return dict(self._metadata)

  def view(self, name: str) -> np.ndarray:
    return self._find(name).view(name)

  def prefetch(self, names: Iterable[str]) -> None:
    for name in names:
      self._find(name).advise(name, mmap.MADV_WILLNEED)

  def release(self, name: str) -> None:
    # Pages shared with another tensor are simply read again.
    self._find(name).advise(name, mmap.MADV_DONTNEED)


class MappingSource(TensorSource):
  """Tensors that are in memory already, for instance those of a bundle."""

  def __init__(self, tensors: Mapping[str, np.ndarray]):
    self._tensors = tensors

  def names(self) -> tuple[str, ...]:
    return tuple(sorted(self._tensors))

  def _find(self, name: str) -> np.ndarray:
    if name not in self._tensors:
      raise CheckpointError(f'no tensor {show(name)}')
    return self._tensors[name]

  def shape(self, name: str) -> tuple[int, ...]:
    return self._find(name).shape

  def dtype(self, name: str) -> str:
    return dtype_name(self._find(name).dtype)

  def view(self, name: str) -> np.ndarray:
    return self._find(name)

  def prefetch(self, names: Iterable[str]) -> None:
    """Does nothing: the tensors are in memory."""

  def release(self, name: str) -> None:
    """Does nothing: the tensors stay in memory."""


def _folder_files(
  folder: pathlib.Path,
) -> tuple[tuple[pathlib.Path, ...], dict[str, str] | None]:
  """The files of a checkpoint's folder and the index, if there is one."""
  single, index = folder / SINGLE_FILE, folder / INDEX_FILE
  if file_kind(index) is None:
    if file_kind(single) is None:
      raise CheckpointError(
        f'{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}'
      )
    return (single,), None
  weight_map = read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise CheckpointError(f'{index}: weight_map is missing or no object')
  for name, shard in weight_map.items():
    _check_shard_name(index, name, shard)
  shards = sorted(set(weight_map.values()))
  if file_kind(single) is not None and SINGLE_FILE not in shards:
    raise CheckpointError(
      f'{folder}: holds {SINGLE_FILE} beside an index that does not name it; '
      'remove one of the two'
    )
  for shard in shards:
    if file_kind(folder / shard) != 'file':
      raise CheckpointError(f'{index}: names {show(shard)}, which is missing')
  return tuple(folder / shard for shard in shards), weight_map


def _check_shard_name(index: pathlib.Path, name: str, shard: object) -> None:
  """Refuses a shard that is no plain file name, and so in another folder.

  Links are allowed: in the cache of huggingface_hub, all files are links.
  """
  if not isinstance(shard, str):
    raise CheckpointError(
      f'{index}: weight_map[{show(name)}]={show(shard)} is not a file name'
    )
  plain = shard not in ('', '.', '..') and not set(shard) & set('/\\\0:')
  if not plain or not shard.isprintable():
    raise CheckpointError(
      f'{index}: puts tensor {show(name)} into {show(shard)}, which is outside '
      "the checkpoint's folder"
    )
