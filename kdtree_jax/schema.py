"""Checks of the types of fields, in dataclasses and in JSON.

`problem` compares a value with the annotation of its field. `check_types` does
so for every field of a new dataclass, and `from_json` makes a dataclass from a
JSON object. `io/fields.py` reads foreign JSON with the same check.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from kdtree_jax.errors import UserError, show

# Ids, counts and positions are int32 on the device, seeds are uint32 there.
MAX_INT = 2**31 - 1
_MAX_ANY = 2**32 - 1
MAX_FLOAT = 1e30
_WORDS = {
  int: 'an integer',
  float: 'a number',
  bool: 'true or false',
  str: 'a string',
  dict: 'a JSON object',
}


class _Dataclass(Protocol):
  """Any dataclass."""

  __dataclass_fields__: ClassVar[dict[str, Any]]


def problem(value: Any, kind: Any) -> str | None:
  """Why a value is not of a type; None if it is.

  Types are exact, as in JSON: True is no integer. An integer is a number too.

  Args:
    value: the value of a field.
    kind: its annotation: a class, `dict[str, Any]`, `tuple[kind, ...]` or a
      union of these and None.

  Returns:
    A phrase that follows the value, as in 'not an integer'.
  """
  if isinstance(kind, types.UnionType):
    if value is None and types.NoneType in typing.get_args(kind):
      return None
    kinds = [k for k in typing.get_args(kind) if k is not types.NoneType]
    problems = [problem(value, kind) for kind in kinds]
    return None if None in problems else problems[0]
  if typing.get_origin(kind) is tuple:
    if type(value) is not tuple:
      return 'not a list'
    kind = typing.get_args(kind)[0]
    for item in value:
      if why := problem(item, kind):
        return f'a list that holds {show(item)}, which is {why}'
    return None
  kind = typing.get_origin(kind) or kind  # `dict[str, Any]` is checked as dict.
  if type(value) is not kind and (kind, type(value)) != (float, int):
    return f'not {_WORDS.get(kind, kind.__name__)}'
  if kind is int and abs(value) > _MAX_ANY:
    return f'not in {-_MAX_ANY}..{_MAX_ANY}'
  if kind is float and not abs(value) <= MAX_FLOAT:
    return 'out of range'
  return None


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
  return typing.get_type_hints(cls)


def check_types(value: object) -> None:
  """Checks every field of a dataclass, at the start of its `__post_init__`.

  Numbers and lists of other libraries become Python's own first, so that equal
  configs compare equal and can be written as JSON.

  Raises:
    UserError: a field is not of its type; the message names it.
  """
  for name, kind in _annotations(type(value)).items():
    field = _plain(getattr(value, name))
    if why := problem(field, kind):
      where = f'{type(value).__name__}: {name}'
      raise UserError(f'{where}={show(getattr(value, name))} is {why}')
    object.__setattr__(value, name, field)


def _plain(value: Any) -> Any:
  """The value with arrays as Python's numbers and lists as tuples."""
  if hasattr(value, '__array__'):
    value = np.asarray(value).tolist()
  return tuple(value) if isinstance(value, list) else value


def from_json[T: _Dataclass](cls: type[T], raw: object) -> T:
  """The dataclass whose `asdict` is this JSON object.

  Args:
    cls: a dataclass that calls `check_types`.
    raw: the parsed JSON.

  Raises:
    UserError: it is no object, or a field is unknown, missing or ill-typed;
      the message names the field.
  """
  where = cls.__name__
  if not isinstance(raw, Mapping):
    raise UserError(f'{where}: {show(raw)} is not a JSON object')
  fields = {field.name: field for field in dataclasses.fields(cls)}
  for key in raw:
    if key not in fields:
      raise UserError(f'{where}: unknown field {show(key)}')
  for name, field in fields.items():
    if name not in raw and field.default is dataclasses.MISSING:
      raise UserError(f'{where}: {name} is missing')
  kinds = _annotations(cls)
  return cls(**{key: _from_json(raw[key], kinds[key]) for key in raw})


def _from_json(value: Any, kind: Any) -> Any:
  """The value of a field, as a dataclass if the field holds one."""
  for option in (kind, *typing.get_args(kind)):
    if dataclasses.is_dataclass(option) and value is not None:
      return from_json(option, value)
  return value
