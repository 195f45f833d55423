"""Flags of the command line, parsed into the dataclass of their mode.

Each call defines its own flags; of absl's global ones it uses those of logging.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags, logging

from kdtree_jax.errors import UserError, show
from kdtree_jax.io.files import file_kind
from kdtree_jax.io.paths import check_path
from kdtree_jax.modes.options import MODES, Flag, ModeFlags, flags_of
from kdtree_jax.modes.options.fields import REQUIRED
from kdtree_jax.options import AUTO

DEFAULT_MODE = 'demo'
# Old names, which still work but are not in help; CHANGELOG.md lists them.
FLAG_ALIASES = {
  'hit_rate': 'acceptance_rate',
  'chain_seed': 'keep_top1_chain',
}
VALUE_ALIASES = {
  'drafter': {'hit_rate': 'acceptance_rate', 'silent': 'null'},
}
# Flags of other engines that depend on the tokens along each path.
_NOT_PER_PATH = ('repetition_penalty', 'presence_penalty', 'frequency_penalty')


def parse(argv: Sequence[str]) -> ModeFlags:
  """The flags of a command line.

  Args:
    argv: the program's name, then its arguments.

  Raises:
    UserError: a flag is missing, unknown or not used by the mode, or has a
      value that is not allowed.
  """
  mode = mode_of(argv)
  values = flags.FlagValues()
  _define_mode(values)
  for name, each in flags_of(MODES[mode]).items():
    flags.DEFINE_flag(_absl_flag(each), values)
    for old in (old for old, new in FLAG_ALIASES.items() if new == name):
      flags.DEFINE_alias(old, name, values)
  _share_logging(values)
  try:
    rest = values(list(argv))
  except flags.UnrecognizedFlagError as error:
    raise UserError(_unrecognized(error, mode)) from None
  except flags.Error as error:
    raise UserError(_reason(error)) from None
  if len(rest) > 1:
    raise UserError(f'unexpected argument {rest[1]!r}; flags begin with --')
  flags.FLAGS.mark_as_parsed()  # Else logging complains.
  if not values['verbosity'].present:
    # JAX reports at INFO every accelerator that it does not find.
    logging.set_verbosity(logging.WARNING)
  return _made(MODES[mode], values)


def mode_of(argv: Sequence[str]) -> str:
  """The value of `--mode`, or its default.

  Raises:
    UserError: no such mode.
  """
  return _first_look(argv)['mode'].value or DEFAULT_MODE


def help_mode(argv: Sequence[str]) -> str | None:
  """The mode of a command line with `--help`.

  Returns:
    '' if it names no mode; None without `--help`.
  """
  values = _first_look(argv)
  if not values['help'].value:
    return None
  return values['mode'].value or ''


def _first_look(argv: Sequence[str]) -> flags.FlagValues:
  """Only `--mode` and `--help`; ignores other flags."""
  values = flags.FlagValues()
  _define_mode(values)
  values.set_gnu_getopt(True)
  try:
    values(list(argv), known_only=True)
  except flags.Error as error:
    raise UserError(_reason(error)) from None
  return values


def _define_mode(values: flags.FlagValues) -> None:
  names = tuple(MODES)
  mode = Flag('mode', str, None, 'The mode.', choices=lambda: names)
  flags.DEFINE_flag(_absl_flag(mode), values)
  flags.DEFINE_bool('help', False, 'Show help.', values, short_name='h')


def _share_logging(values: flags.FlagValues) -> None:
  """Adds absl's logging flags, such as `--verbosity`, as not given."""
  for each in flags.FLAGS.get_flags_for_module('absl.logging'):
    each.unparse()
    values[each.name] = each


class _Parser(flags.ArgumentParser[Any]):
  """A parser of the value of one flag."""

  def __init__(self, convert: Callable[[str], Any]):
    self._convert = convert

  def parse(self, argument: str) -> Any:
    return self._convert(argument)


def _absl_flag(each: Flag) -> flags.Flag[Any]:
  """A flag whose value is None if it is not given."""
  if each.kind is bool:
    return flags.BooleanFlag(each.name, None, each.help)
  if each.repeated:
    parser = flags.ArgumentParser()
    return flags.MultiFlag(parser, None, each.name, None, each.help)
  parser = _Parser(functools.partial(_value, each))
  return flags.Flag(parser, None, each.name, None, each.help)


def _value(each: Flag, text: str) -> Any:
  """The value of a flag with this text.

  Raises:
    UserError: the text has another type; names the flag.
  """
  names = each.choices() if each.choices else None
  if each.kind is str:
    return _name(each.name, text, names)
  if each.kind == tuple[str, ...]:
    return tuple(_name(each.name, item, names) for item in _items(text))
  kind = each.kind
  if kind == tuple[int | str, ...]:
    return _budgets(each.name, text)
  is_list = kind not in (int, float)
  if is_list:
    kind = int if kind == tuple[int, ...] else float
  wanted = 'an integer' if kind is int else 'a number'
  if is_list:
    wanted = f'a comma-separated list of {wanted.split()[1]}s'
  try:
    return tuple(map(kind, _items(text))) if is_list else kind(text)
  except ValueError:
    raise UserError(f'--{each.name}={_shown(text)} is not {wanted}') from None


def _budgets(flag: str, text: str) -> tuple[int | str, ...]:
  try:
    return tuple(x if x == AUTO else int(x) for x in _items(text))
  except ValueError:
    raise UserError(
      f'--{flag}={_shown(text)} is not a comma-separated list of integers or '
      f'{AUTO}'
    ) from None


def _items(text: str) -> list[str]:
  return [item.strip() for item in text.split(',')] if text.strip() else []


def _name(flag: str, text: str, names: Sequence[str] | None) -> str:
  if names is not None and text not in names:
    known = ', '.join(names)
    raise UserError(f'--{flag}={_shown(text)} is none of {known}')
  return text


def _shown(text: str) -> str:
  """A text, escaped and cut unless it is a short line."""
  return text if text.isprintable() and len(text) <= 80 else show(text)


def _reason(error: flags.Error) -> str:
  """The message of our own parser, or else of absl."""
  cause = error.__context__
  return str(cause if isinstance(cause, UserError) else error)


def _unrecognized(error: flags.UnrecognizedFlagError, mode: str) -> str:
  name = error.flagname
  if name in _NOT_PER_PATH:
    return (
      f'--{name} is not supported: it depends on the history along every path '
      'of the tree'
    )
  known = {name for each in MODES.values() for name in flags_of(each)}
  known |= FLAG_ALIASES.keys()
  for each in (name, name.removeprefix('no')):
    if each in known:
      return f'--{each} is not used by --mode={mode}'
  return str(error)


def _made(options: type[ModeFlags], values: flags.FlagValues) -> ModeFlags:
  """The flags that are given, and the defaults of the others."""
  found: dict[str, Any] = {}
  for name, each in flags_of(options).items():
    if values[name].present:
      value = values[name].value
      value = tuple(value) if isinstance(value, list) else value
      if isinstance(value, str):
        value = VALUE_ALIASES.get(name, {}).get(value, value)
      found[name] = value
    elif each.default is REQUIRED:
      raise UserError(f'--mode={options.mode} needs --{name}')
  return options(**found, given=frozenset(found))


def check_paths(options: ModeFlags) -> None:
  """Checks all paths, and that the output would not replace an input.

  Raises:
    UserError: a path is not valid, or would be replaced; names the flag.
  """
  for flag, path in (*_paths(options, 'input'), *_paths(options, 'output')):
    check_path(path, flag)
  output = getattr(options, 'output', None)
  if output is None or file_kind(output) != 'file':
    return
  for flag, path in _paths(options, 'input'):
    if file_kind(path) and os.path.samefile(path, output):
      raise UserError(
        f'--output={output} is --{flag}={path}, which it would replace'
      )


def _paths(options: ModeFlags, path: str) -> Iterator[tuple[str, str]]:
  """The flags for inputs or for outputs, with each of their paths."""
  for name, each in flags_of(type(options)).items():
    value = getattr(options, name)
    if each.path == path and value is not None:
      for one in (value,) if isinstance(value, str) else value:
        yield name, one
