"""Checks of paths given by flags, before other work."""

import os
import pathlib
import stat

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import file_kind, reason, show_path, temporary_beside


def check_path(path: str, flag: str) -> None:
  """Refuses an empty, invalid or inaccessible path; it may be missing.

  Raises:
    UserError: names the flag.
  """
  _kind(path, flag)


def check_output(
  path: str | None, flag: str = 'output', *, folder: bool = False
) -> None:
  """Refuses a path that cannot be written.

  Creates and removes a file beside it, because permissions do not tell whether
  a disk is full or read-only.

  Args:
    path: the output; None: there is none.
    flag: the flag that gave it.
    folder: whether it is a folder, made if it is missing; else it is a file, a
      device or a pipe.

  Raises:
    UserError: names the flag.
  """
  if path is None:
    return
  kind = _kind(path, flag)
  where = f'--{flag}={show_path(path)}'
  if folder and kind not in (None, 'folder'):
    raise UserError(f'{where}: cannot be written: is no folder')
  if not folder and (kind == 'folder' or path.endswith(os.sep)):
    raise UserError(f'{where}: cannot be written: is a folder')
  if kind == 'special':
    # Not opened, because a pipe would wait for its reader.
    if stat.S_ISSOCK(os.stat(path).st_mode):
      raise UserError(f'{where}: cannot be written: is a socket')
    if not os.access(path, os.W_OK):
      raise UserError(f'{where}: cannot be written: Permission denied')
    return
  real = pathlib.Path(os.path.realpath(path))
  place = real if kind == 'folder' else real.parent
  if _kind(str(place), flag) != 'folder':
    raise UserError(
      f'{where}: cannot be written: {show_path(place)} is no folder'
    )
  trial = temporary_beside(place / 'trial')
  try:
    if kind == 'file':
      os.close(os.open(path, os.O_WRONLY))
    trial.touch(exist_ok=False)
    trial.unlink()
  except OSError as e:
    raise UserError(f'{where}: cannot be written: {reason(e)}') from e


def _kind(path: str, flag: str) -> str | None:
  if not path:
    raise UserError(f'--{flag} is empty; give a path')
  try:
    return file_kind(path)
  except UserError as e:
    raise UserError(f'--{flag}={e}') from e
