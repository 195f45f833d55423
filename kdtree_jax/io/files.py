"""What every format here needs: strict JSON in, atomic files out."""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
from collections.abc import Buffer, Iterable, Iterator, Sequence
from typing import Any, Literal

from kdtree_jax.errors import UserError, show


def show_more(names: Sequence[str]) -> str:
  """The rest of a list of foreign names, in brackets; empty if there is none.

  Args:
    names: those after the first, which the message has already. Three are
      spelled out, the others are counted.
  """
  if not names:
    return ''
  some = ', '.join(show(name) for name in names[:3])
  dots = ', ...' if len(names) > 3 else ''
  return f' (and {len(names)} more: {some}{dots})'


def one_line(error: Exception | str) -> str:
  """A message without line breaks or what cannot be printed."""
  text = ' '.join(str(error).split())
  return text.encode('ascii', 'backslashreplace').decode()


def file_kind(
  path: os.PathLike | str,
) -> Literal['file', 'folder', 'special'] | None:
  """What a path leads to, links followed; None: nothing is there.

  A device, a pipe or a socket is `special`. `Path.exists` and its like raise
  on what cannot be looked at, or call it missing.

  Raises:
    UserError: a folder on the way may not be entered, or the path is none:
      too long, links in a circle, a null byte.
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


def show_path(path: os.PathLike | str) -> str:
  """A path for a message: as it is, or escaped if it cannot be printed."""
  text = os.fspath(path)
  return text if text.isprintable() else ascii(text)


def reason(error: Exception) -> str:
  """What went wrong, in the words of the system if it has some."""
  return one_line(getattr(error, 'strerror', None) or error)


def parse_json(text: str | bytes) -> Any:
  """JSON without the liberties that Python's parser takes.

  Raises:
    ValueError: not JSON, a key twice in one object, NaN or Infinity, or
      nested too deeply to be a configuration.
  """

  def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
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


def canonical_json(value: Any) -> str:
  """The one spelling of a JSON value: sorted keys, no spaces, ASCII.

  Raises:
    ValueError, TypeError: the value has no place in JSON.
  """
  return json.dumps(
    value, sort_keys=True, separators=(',', ':'), allow_nan=False
  )


@contextlib.contextmanager
def replacing(
  path: os.PathLike | str, error: type[UserError] = UserError
) -> Iterator[pathlib.Path]:
  """An empty file to be written, whose bytes then become those of `path`.

  It lies in the same folder (a rename across file systems is not atomic),
  reaches the disk, and only then takes the name; after an exception no trace is
  left. A reader that has the old file mapped keeps the old bytes. A link stays:
  what it leads to is replaced. A device or a pipe has no old bytes and is
  written into, and the file lies elsewhere.

  Args:
    path: the file to create or replace.
    error: what to raise if the file system refuses.
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
def _written_into(path: pathlib.Path) -> Iterator[pathlib.Path]:
  with tempfile.TemporaryDirectory() as folder:
    temporary = pathlib.Path(folder, 'file')
    temporary.touch()
    yield temporary
    with open(temporary, 'rb') as source, open(path, 'wb') as file:
      shutil.copyfileobj(source, file)


@contextlib.contextmanager
def _replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
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


def write_atomically(path: os.PathLike | str, chunks: Iterable[Buffer]) -> None:
  """Writes a whole file or leaves what was there untouched; see `replacing`."""
  with replacing(path) as temporary, open(temporary, 'wb') as file:
    file.writelines(chunks)


def temporary_beside(path: pathlib.Path) -> pathlib.Path:
  """A free name in the same folder, however long that of `path` is."""
  return path.with_name(f'.{path.name[:32]}.{secrets.token_hex(8)}.tmp')


def sync_folder(folder: pathlib.Path) -> None:
  """Makes names in a folder durable, where the system can open a folder."""
  with contextlib.suppress(OSError):
    handle = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
