"""Flags as fields of a frozen dataclass per mode, without heavy imports.

The type and the default of a flag are those of its field; `modes/flags.py`
reads both. Lists are tuples:

    tuple[int, ...], tuple[float, ...]   a comma-separated list
    tuple[int | str, ...]                a comma-separated list with `auto`
    tuple[str, ...] with `choices`       a comma-separated list of names
    tuple[str, ...]                      a flag given once per item
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from kdtree_jax.errors import UserError

# The default of a flag that must be given.
REQUIRED = dataclasses.MISSING
Names = Callable[[], Sequence[str]]
_KEY = 'flag'


@dataclasses.dataclass(frozen=True)
class Flag:
  """The description of a flag.

  Attributes:
    name: name of the field and the flag.
    kind: type of the value, without None.
    default: `REQUIRED`, or the default.
    help: help text.
    choices: a function that returns the allowed values.
    known: a function that returns some allowed values, for help.
    path: whether the value is the path of an input or an output, or None.
    may_be_empty: whether an empty list is allowed.
    group: title of its group in help.
  """

  name: str
  kind: Any
  default: Any
  help: str
  choices: Names | None = None
  known: Names | None = None
  path: Literal['input', 'output'] | None = None
  may_be_empty: bool = False
  group: str = ''

  @property
  def repeated(self) -> bool:
    """Whether the flag is given once per item of its list."""
    return self.kind == tuple[str, ...] and self.choices is None


def flag(
  default: Any,
  help: str,
  *,
  choices: Names | None = None,
  known: Names | None = None,
  path: Literal['input', 'output'] | None = None,
  may_be_empty: bool = False,
) -> Any:
  """A field for a flag; see `Flag` for the arguments."""
  facts = {
    'help': help,
    'choices': choices,
    'known': known,
    'path': path,
    'may_be_empty': may_be_empty,
  }
  return dataclasses.field(default=default, metadata={_KEY: facts})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModeFlags:
  """The flags of one mode, checked without a model or a file.

  Attributes:
    mode: name of the mode.
    given: names of the flags on the command line.
  """

  mode: ClassVar[str]
  given: frozenset[str] = dataclasses.field(
    default=frozenset(), repr=False, compare=False
  )

  def __post_init__(self):
    for name, each in flags_of(type(self)).items():
      if getattr(self, name) == () and not each.may_be_empty:
        known = (
          f'; choose from {", ".join(each.choices())}' if each.choices else ''
        )
        raise UserError(f'--{name} is empty{known}')

  def refuse(self, names: Sequence[str], why: str) -> None:
    """Raises a UserError for the first of these flags that was given."""
    for name in names:
      if name in self.given:
        raise UserError(f'--{name} {why}')

  def at_least_one(self, *names: str) -> None:
    """Raises a UserError for the first of these counts that is below 1."""
    for name in names:
      if getattr(self, name) < 1:
        raise UserError(f'--{name}={getattr(self, name)} is below 1')


def flags_of(options: type[ModeFlags]) -> Mapping[str, Flag]:
  """The flags of a mode by name, in the order of their groups."""
  hints, groups = typing.get_type_hints(options), {}
  for base in reversed(options.__mro__):
    for name in inspect.get_annotations(base):
      groups.setdefault(name, (base.__doc__ or '').splitlines()[0].rstrip('.'))
  return {
    each.name: Flag(
      each.name,
      _without_none(hints[each.name]),
      each.default,
      group=groups[each.name],
      **each.metadata[_KEY],
    )
    for each in dataclasses.fields(options)
    if _KEY in each.metadata
  }


def _without_none(kind: Any) -> Any:
  if not isinstance(kind, types.UnionType):
    return kind
  (kind,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
  return kind
