"""The pages of `--help`: an introduction, and one for every mode."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from kdtree_jax.modes.options import MODES, Flag, ModeFlags, flags_of
from kdtree_jax.modes.options.fields import REQUIRED

WIDTH = 80
_KINDS = {
  int: 'INTEGER',
  float: 'NUMBER',
  str: 'TEXT',
  tuple[int, ...]: 'INTEGER,...',
  tuple[int | str, ...]: 'INTEGER|auto,...',
  tuple[float, ...]: 'NUMBER,...',
  tuple[str, ...]: 'TEXT',
}


def page(mode: str, introduction: str) -> str:
  """The page of a mode, or the introduction.

  Args:
    mode: name of the mode; '' for the introduction.
    introduction: text with which the introduction begins.
  """
  return '\n'.join(_of_mode(MODES[mode]) if mode else _first(introduction))


def _first(introduction: str) -> Iterator[str]:
  yield inspect.cleandoc(introduction)
  yield '\nModes:'
  width = max(map(len, MODES)) + 2
  for name, options in MODES.items():
    purpose = _purpose(options)[0]
    yield from textwrap.wrap(
      purpose,
      WIDTH,
      initial_indent=f'  {name:<{width}}',
      subsequent_indent=' ' * (width + 2),
    )
  yield '\n`python run.py --mode=NAME --help` shows the flags of a mode.'


def _of_mode(options: type[ModeFlags]) -> Iterator[str]:
  yield f'python run.py --mode={options.mode}\n'
  yield '\n'.join(_purpose(options))
  own = _purpose(options)[0].rstrip('.')
  title = None
  for flag in flags_of(options).values():
    group = 'Flags of this mode' if flag.group == own else flag.group
    if group != title:
      yield f'\n{group}:'
      title = group
    yield from _entry(flag)


def _purpose(options: type[ModeFlags]) -> list[str]:
  return inspect.cleandoc(options.__doc__ or '').splitlines()


def _entry(flag: Flag) -> Iterator[str]:
  """The lines of a flag: its name, type, help and default."""
  prefix = f'--[no]{flag.name}' if flag.kind is bool else f'--{flag.name}='
  kind = '' if flag.kind is bool else _KINDS[flag.kind]
  if flag.path:
    kind = 'PATH'
  if flag.choices:
    kind = 'NAME,...' if flag.kind == tuple[str, ...] else 'NAME'
  yield f'  {prefix}{kind}'
  for line in _details(flag):
    yield from textwrap.wrap(
      line, WIDTH, initial_indent=' ' * 6, subsequent_indent=' ' * 6
    )


def _details(flag: Flag) -> Iterator[str]:
  if flag.default is REQUIRED:
    yield f'{flag.help} Required.'
  elif flag.default is None or flag.default == ():
    yield flag.help
  else:
    yield f'{flag.help} Default: {_shown(flag.default)}.'
  if flag.choices:
    yield f'One of {", ".join(flag.choices())}.'
  elif flag.known:
    yield f'Names: {", ".join(flag.known())}.'


def _shown(default: Any) -> str:
  """A default as on a command line."""
  if isinstance(default, bool):
    return 'yes' if default else 'no'
  if isinstance(default, tuple):
    return ','.join(map(_shown, default))
  return f'{default:g}' if isinstance(default, float) else str(default)
