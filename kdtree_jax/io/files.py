"""Paths, strict JSON and atomic writes, as every format here needs them."""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
from collections.abc import Buffer, Generator, Iterable, Sequence
from typing import Any, Literal

from kdtree_jax.errors import UserError, show

type StrPath = str | os.PathLike[str]
type JsonObject = dict[str, Any]


def show_more(names: Sequence[str]) -> str:
  """The rest of a list of foreign names, in brackets; '' if it is empty.

  Args:
    names: those after the first. Three are shown, the others are counted.
  """
  if not names:
    return ''
  some = ', '.join(show(name) for name in names[:3])
  dots = ', ...' if len(names) > 3 else ''
  return f' (and {len(names)} more: {some}{dots})'


def one_line(error: BaseException | str) -> str:
  """A message on one line of printable ASCII."""
  text = ' '.join(str(error).split())
  return text.encode('ascii', 'backslashreplace').decode()


def file_kind(
  path: StrPath,
) -> Literal['file', 'folder', 'special'] | None:
  """The kind of what a path leads to, links followed; None: nothing is there.

  A device, a pipe or a socket is `special`. Unlike `Path.exists`, this tells
  what is missing from what cannot be accessed.

  Raises:
    UserError: a folder of the path may not be entered, or the path is invalid:
      too long, a circle of links, a null byte.
  """
  try:
    mode = os.stat(path).st_mode
  except (FileNotFoundError, NotADirectoryError):
    return None
  except (OSError, ValueError) as e:
    raise UserError(f'{show_path(path)}: {reason(e)}') from e
  if stat.S_ISREG(mode):
    return 'file'
  return 'folder' if stat.S_ISDIR(mode) else 'special'


def show_path(path: StrPath) -> str:
  """A path for a message, escaped if it is not printable."""
  text = os.fspath(path)
  return text if text.isprintable() else ascii(text)


def reason(error: Exception) -> str:
  """The system's message of an error, or else the error's own."""
  return one_line(getattr(error, 'strerror', None) or error)


def parse_json(text: str | bytes) -> Any:
  """A parsed JSON text, without the extensions of Python's parser.

  Raises:
    ValueError: not JSON, a key twice in one object, NaN or Infinity, or
      nested too deeply.
  """

  def pairs(items: list[tuple[str, Any]]) -> JsonObject:
    fields = dict(items)
    if len(fields) < len(items):
      seen = set()
      twice = next(k for k, _ in items if k in seen or seen.add(k))
      raise ValueError(f'key {show(twice)} occurs twice')
    return fields

  def constant(name: str) -> None:
    raise ValueError(f'{name} is not JSON')

  try:
    return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
  except RecursionError:
    raise ValueError('nested too deeply') from None


def canonical_json(value: object) -> str:
  """A JSON value as text with sorted keys, without spaces, in ASCII.

  Raises:
    ValueError, TypeError: the value is not JSON.
  """
  return json.dumps(
    value, sort_keys=True, separators=(',', ':'), allow_nan=False
  )


@contextlib.contextmanager
def replacing(
  path: StrPath, error: type[UserError] = UserError
) -> Generator[pathlib.Path]:
  """A context that gives an empty file, which then replaces `path` atomically.

  The file lies in the same folder (a rename across file systems is not atomic)
  and is on the disk before it is renamed; after an exception it is removed. A
  reader that has mapped the old file keeps the old bytes. A link stays: what it
  leads to is replaced. To a device or a pipe the bytes are copied.

  Args:
    path: the file to create or replace.
    error: the type to raise if the file system refuses.
  """
  path = pathlib.Path(path)
  if not path.name:
    raise error(f'{path}: is a folder; a file name is missing')
  try:
    kind = file_kind(path)
  except UserError as e:
    raise error(str(e)) from e
  write = _written_into if kind == 'special' else _replaced
  try:
    with write(path) as temporary:
      yield temporary
  except OSError as e:
    raise error(f'{path}: cannot be written: {e.strerror or e}') from e


@contextlib.contextmanager
def _written_into(path: pathlib.Path) -> Generator[pathlib.Path]:
  with tempfile.TemporaryDirectory() as folder:
    temporary = pathlib.Path(folder, 'file')
    temporary.touch()
    yield temporary
    with open(temporary, 'rb') as source, open(path, 'wb') as file:
      shutil.copyfileobj(source, file)


@contextlib.contextmanager
def _replaced(path: pathlib.Path) -> Generator[pathlib.Path]:
  path = pathlib.Path(os.path.realpath(path))
  temporary = temporary_beside(path)
  try:
    temporary.touch(exist_ok=False)
    yield temporary
    with open(temporary, 'rb') as file:
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise
  sync_folder(path.parent)


def write_atomically(path: StrPath, chunks: Iterable[Buffer]) -> None:
  """Writes a whole file, or leaves the old one untouched; see `replacing`."""
  with replacing(path) as temporary, open(temporary, 'wb') as file:
    file.writelines(chunks)


def temporary_beside(path: pathlib.Path) -> pathlib.Path:
  """An unused path in the folder of `path`, with a name of bounded length."""
  return path.with_name(f'.{path.name[:32]}.{secrets.token_hex(8)}.tmp')


def sync_folder(folder: pathlib.Path) -> None:
  """Makes renames in a folder durable, where a folder can be opened."""
  with contextlib.suppress(OSError):
    handle = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
