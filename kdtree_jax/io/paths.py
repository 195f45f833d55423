"""Paths that flags name, looked at before the work."""

import os
import pathlib
import stat

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import file_kind, reason, show_path, temporary_beside


def check_path(path: str, flag: str) -> None:
  """Refuses what is no path, or leads where one may not go.

  What is missing is left to those who know what they look for.

  Raises:
    UserError: names the flag.
  """
  _kind(path, flag)


def check_output(
  path: str | None, flag: str = 'output', *, folder: bool = False
) -> None:
  """Refuses what could not be written after all the work.

  A file is made beside it and removed: permissions do not tell of disks that
  are full or read-only.

  Args:
    path: that will be written; None is nothing.
    flag: that gave it.
    folder: it will be one, made if it is missing; else a file, a device or a
      pipe.

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
    # Not opened: a pipe would wait for its reader.
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
