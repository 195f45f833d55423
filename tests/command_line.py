"""run.py in this process: its flags from keywords, and its exit status."""

import contextlib
import importlib
import io
import pathlib
import subprocess

import run as program
from kdtree_jax.modes import flags
from kdtree_jax.modes.options import MODES, ModeFlags, flags_of

ROOT = pathlib.Path(__file__).parents[1]


def arguments(mode: str, **values: object) -> list[str]:
  """A command line; None stands for a flag that is not given."""
  known, found = flags_of(MODES[mode]), ['run.py', f'--mode={mode}']
  for name, value in values.items():
    if isinstance(value, bool):
      found.append(f'--{name}' if value else f'--no{name}')
    elif isinstance(value, tuple) and known[name].repeated:
      found += [f'--{name}={item}' for item in value]
    elif isinstance(value, tuple):
      found.append(f'--{name}={",".join(map(str, value))}')
    elif value is not None:
      found.append(f'--{name}={value}')
  return found


def mode_flags(mode: str, **values: object) -> ModeFlags:
  """The flags of a mode, as a command line gives them."""
  return flags.parse(arguments(mode, **values))


def run(given: ModeFlags) -> int:
  """The mode itself, whose errors are exceptions."""
  return importlib.import_module(f'kdtree_jax.modes.{given.mode}').run(given)


def main(*given: str) -> int:
  """The exit status of a command line."""
  return program.main(['run.py', *given])


def called(*given: str) -> subprocess.CompletedProcess[str]:
  """`main` at the top of the repository, with what it printed.

  As a process of its own would end, without its imports and its programs.
  """
  out, err = io.StringIO(), io.StringIO()
  with (
    contextlib.chdir(ROOT),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    status = main(*given)
  return subprocess.CompletedProcess(
    given, status, out.getvalue(), err.getvalue()
  )
