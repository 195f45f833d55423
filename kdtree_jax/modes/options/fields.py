"""Flags as fields: a frozen dataclass a mode, which imports nothing heavy.

A field's annotation is the flag's type and its default is the one that is
used. `modes/flags.py` reads both.

    tuple[int, ...], tuple[float, ...]   a comma-separated list
    tuple[str, ...] with `choices`       likewise, of names
    tuple[str, ...]                      given once for each, taken as it is
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
  """What a field says of its flag.

  Attributes:
    name: of the field and the flag.
    kind: the type of the value, without None.
    default: `REQUIRED`, or the value that is used.
    help: a sentence or two.
    choices: the values that are allowed, found when they are needed.
    known: values that help lists, beside which there are others.
    path: whether the flag names what is read or what is written, or neither.
    may_be_empty: an empty list means something.
    group: the title under which help has it.
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
    """Whether the flag is given once for each item of its list."""
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
  """A field that is a flag; see `Flag` for the arguments."""
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
  """What one mode was asked for; its checks need neither model nor file.

  Attributes:
    mode: its name.
    given: the flags that the command line has, whatever their values.
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
  """The flags of a mode by name, group by group."""
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
