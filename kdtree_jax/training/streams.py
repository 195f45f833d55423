"""Token streams in memory and in files: ids as narrow as a vocabulary allows.

The only place where ids take a narrower type, and never without a look at
their range: a cast wraps silently.
"""

import os
import pathlib
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import one_line, replacing

# A place in a stream is int32 on the device.
MAX_TOKENS = 2**31 - 1
_BROKEN = (
  *(OSError, ValueError, KeyError, EOFError, NotImplementedError),
  *(RuntimeError, zipfile.BadZipFile, zlib.error),
)


def id_dtype(vocab_size: int) -> np.dtype:
  """The type of a stream's ids: uint16 where it holds all, else uint32."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def as_ids(values: np.ndarray, vocab_size: int, where: str) -> np.ndarray:
  """Token ids in the type of their vocabulary, same shape.

  Args:
    values: integers.
    vocab_size: ids are below it.
    where: they come from, for the message.

  Raises:
    UserError: no integers, or one outside the vocabulary.
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
  """Refuses a stream that would be read wrongly.

  Args:
    tokens: `[T]` ids.
    where: they come from, for the message.

  Raises:
    UserError: not a row of uint16 or uint32, or too long for int32 places.
  """
  if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
    raise UserError(
      f'{where}: {tokens.dtype} {list(tokens.shape)} is no row of uint16 or '
      'uint32 tokens'
    )
  check_length(len(tokens), where)


def check_length(num_tokens: int, where: str) -> None:
  """Refuses a stream whose places would wrap.

  Raises:
    UserError: it is too long.
  """
  if num_tokens > MAX_TOKENS:
    raise UserError(
      f'{where}: {num_tokens} tokens; at most {MAX_TOKENS} are possible, see '
      '--max_tokens of --mode=make_corpus'
    )


def read_arrays(path: os.PathLike | str) -> dict[str, np.ndarray]:
  """All arrays of a `.npz` file.

  Raises:
    UserError: it is missing or damaged.
  """
  try:
    # Opened here, because np.load leaves a broken archive open.
    with open(path, 'rb') as file, np.load(file) as arrays:
      return {name: arrays[name] for name in arrays.files}
  except (*_BROKEN, TypeError) as e:  # A lone .npy is no archive.
    raise UserError(f'{path}: cannot be read: {one_line(e)}') from e


def write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes a `.npz` file, the whole of it or nothing.

  Raises:
    UserError: the file cannot be written.
  """
  with replacing(path) as temporary, open(temporary, 'wb') as file:
    np.savez_compressed(file, **arrays)
