"""Files of JSON lines: written record by record or at once, and read."""

import contextlib
import io
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import (
  JsonObject,
  StrPath,
  file_kind,
  parse_json,
  reason,
  show_path,
  write_atomically,
)

# A path that stands for the standard input.
STANDARD_INPUT = '-'


def write_jsonl(path: StrPath, records: Iterable[JsonObject]) -> None:
  """Replaces a file atomically by records, one JSON object a line.

  Args:
    path: the file.
    records: mappings, whose keys keep their order; scalars and arrays of NumPy
      and JAX become numbers and lists.

  Raises:
    UserError: the file cannot be written, or a record is not JSON: it is no
      object, or holds NaN, infinity or an unknown type.
  """
  lines = (_line(path, i, record) for i, record in enumerate(records))
  write_atomically(path, lines)


class JsonLines:
  """A context that writes and flushes each record when it is given.

  The first record replaces the file: without any, the old file is kept. Links
  are followed; devices and pipes are written into.
  """

  def __init__(self, path: str | None, *, append: bool = False):
    """Opens nothing yet.

    Args:
      path: the file; None for standard output.
      append: continue the file instead of replacing it.
    """
    self._path, self._append, self._count = path, append, 0
    self._file: io.FileIO | None = None

  def __enter__(self) -> 'JsonLines':
    return self

  def __exit__(self, *_: object) -> None:
    if self._file is not None:
      self._file.close()

  def write(self, record: JsonObject) -> None:
    """Adds a line.

    Raises:
      UserError: as `write_jsonl`; no part of the line stays in a file.
      OSError: standard output cannot be written.
    """
    line = _line(self._path or 'standard output', self._count, record)
    if self._path is None:
      print(line.decode(), end='', flush=True)
    else:
      try:
        self._write(self._path, line)
      except OSError as e:
        where = show_path(self._path)
        raise UserError(f'{where}: cannot be written: {reason(e)}') from e
    self._count += 1

  def _write(self, path: str, line: bytes) -> None:
    if self._file is None:
      # Unbuffered, so that closing does not retry a failed write.
      self._file = open(path, 'ab' if self._append else 'wb', buffering=0)
      if self._append and _lacks_line_end(path):
        line = b'\n' + line
    regular = file_kind(path) == 'file'
    size = os.fstat(self._file.fileno()).st_size
    rest = memoryview(line)
    try:
      while rest:
        rest = rest[self._file.write(rest) :]
    except BaseException:
      if regular:
        with contextlib.suppress(OSError):
          self._file.truncate(size)
          self._file.seek(size)
      raise


def _lacks_line_end(path: StrPath) -> bool:
  """Whether a file does not end with a line feed."""
  if file_kind(path) != 'file' or not os.path.getsize(path):
    return False
  with open(path, 'rb') as file:
    file.seek(-1, os.SEEK_END)
    return file.read() != b'\n'


def source_name(path: StrPath) -> str:
  """The name of the source of `read_jsonl`, for messages."""
  if os.fspath(path) == STANDARD_INPUT:
    return 'standard input'
  return show_path(path)


def read_jsonl(path: StrPath) -> Iterator[tuple[int, Any]]:
  """The values of a file of JSON lines, all of which is read at once.

  Args:
    path: a file or a pipe, UTF-8 with or without a byte order mark; `-` is
      the standard input.

  Yields:
    The number of a line, from 1, and its value; empty lines are skipped.

  Raises:
    UserError: the file cannot be read, or a line is not JSON.
  """
  standard, where = os.fspath(path) == STANDARD_INPUT, source_name(path)
  if standard and sys.stdin is None:
    raise UserError('standard input is closed')
  try:
    if standard:
      data = sys.stdin.buffer.read()
    else:
      data = pathlib.Path(path).read_bytes()
    lines = data.decode('utf-8-sig').split('\n')
  except FileNotFoundError:
    raise UserError(f'{where}: no such file') from None
  except (OSError, ValueError) as e:  # ValueError: no UTF-8, a null byte.
    raise UserError(f'{where}: cannot be read: {reason(e)}') from e
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      value = parse_json(line)
    except ValueError as e:
      raise UserError(f'{where}: line {number}: not JSON: {e}') from e
    yield number, value


def _line(path: StrPath, index: int, record: object) -> bytes:
  try:
    if not isinstance(record, Mapping):
      raise TypeError(f'a {type(record).__name__} is not a JSON object')
    text = json.dumps(
      dict(record),
      separators=(',', ':'),
      allow_nan=False,
      default=_plain,
    )
  except (TypeError, ValueError, RecursionError) as e:
    raise UserError(f'{path}: record {index} is not JSON: {e}') from e
  return text.encode() + b'\n'


def _plain(value: object) -> object:
  """Scalars and arrays of NumPy and JAX as values that `json` knows."""
  if isinstance(value, Mapping):
    return dict(value)
  # `tolist` of an array of objects returns the objects, endlessly.
  if hasattr(value, '__array__') and np.asarray(value).dtype != object:
    return np.asarray(value).tolist()
  raise TypeError(f'{type(value).__name__} is not data')
