"""Token streams in memory and in files, in the narrowest dtype of their ids.

Ids take a narrower dtype only here, after a check of their range, because a
cast would wrap silently.
"""

import pathlib
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import StrPath, one_line, replacing

# An index into a stream is int32 on the device.
MAX_TOKENS = 2**31 - 1
_BROKEN = (
  *(OSError, ValueError, KeyError, EOFError, NotImplementedError),
  *(RuntimeError, zipfile.BadZipFile, zlib.error),
)


def id_dtype(vocab_size: int) -> np.dtype:
  """The dtype of ids: uint16 if it holds the vocabulary, else uint32."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def as_ids(values: np.ndarray, vocab_size: int, where: str) -> np.ndarray:
  """Token ids in the dtype of their vocabulary.

  Args:
    values: integers of any shape.
    vocab_size: size of the vocabulary.
    where: source of the ids, for messages.

  Raises:
    UserError: the values are no integers, or one is outside the vocabulary.
  """
  values = np.asarray(values)
  if values.dtype.kind not in 'iu':
    raise UserError(f'{where}: token ids are {values.dtype}, not integers')
  for worst in (values.min(), values.max()) if values.size else ():
    if not 0 <= worst < vocab_size:
      raise UserError(
        f'{where}: token {worst} is outside the vocabulary of {vocab_size}'
      )
  return values.astype(id_dtype(vocab_size), copy=False)


def check_stream(tokens: np.ndarray, where: str) -> None:
  """Refuses a stream of another shape or dtype, or one that is too long.

  Args:
    tokens: ids.
    where: source of the ids, for messages.

  Raises:
    UserError: not a row of uint16 or uint32, or too long for int32 indices.
  """
  if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
    raise UserError(
      f'{where}: {tokens.dtype} {list(tokens.shape)} is no row of uint16 or '
      'uint32 tokens'
    )
  check_length(len(tokens), where)


def check_length(num_tokens: int, where: str) -> None:
  """Refuses a stream that is too long for int32 indices.

  Raises:
    UserError: names the stream.
  """
  if num_tokens > MAX_TOKENS:
    raise UserError(
      f'{where}: {num_tokens} tokens; at most {MAX_TOKENS} are possible, see '
      '--max_tokens of --mode=make_corpus'
    )


def read_arrays(path: StrPath) -> dict[str, np.ndarray]:
  """All arrays of a `.npz` file.

  Raises:
    UserError: the file is missing or damaged.
  """
  try:
    # Opened here, because np.load leaves a broken archive open.
    with open(path, 'rb') as file, np.load(file) as arrays:
      return {name: arrays[name] for name in arrays.files}
  except (*_BROKEN, TypeError) as e:  # TypeError: a single .npy.
    raise UserError(f'{path}: cannot be read: {one_line(e)}') from e


def write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes a `.npz` file atomically.

  Raises:
    UserError: the file cannot be written.
  """
  with replacing(path) as temporary, open(temporary, 'wb') as file:
    np.savez_compressed(file, allow_pickle=False, **arrays)
