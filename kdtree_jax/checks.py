"""Checks of single values, in one line that names the value.

Integers of Python, NumPy and JAX are integers; text, booleans and fractions
are not, however they could be converted.
"""

import dataclasses
import math
import operator
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np

from kdtree_jax.errors import UserError

# Ids, counts and positions are int32 on the device.
MAX_INT = 2**31 - 1
# Temperatures and shares are float32 there.
MAX_FLOAT = float(np.finfo(np.float32).max)

_TEXT = str | bytes | bytearray


def require(condition: bool, message: str) -> None:
  """Raises a UserError with this message unless the condition holds."""
  if not condition:
    raise UserError(message)


def integer(
  value: Any, name: str, least: int | None = None, most: int | None = None
) -> int:
  """`value` as a Python integer.

  Args:
    value: an integer of any library, arrays without axes included.
    name: for the message.
    least: the smallest that is allowed.
    most: the largest that is allowed.

  Raises:
    UserError: it is none, or out of range.
  """
  try:
    number = None if isinstance(value, bool) else operator.index(value)
  except TypeError:
    number = None
  if number is None:
    raise UserError(f'{name}={shown(value)} is not an integer')
  if least is not None and number < least:
    raise UserError(f'{name}={number} is below {least}')
  if most is not None and number > most:
    raise UserError(f'{name}={number} exceeds {most}')
  return number


def sequence(values: Any, name: str) -> list[Any]:
  """The items of a list, an array or another ordered collection.

  Raises:
    UserError: text, a mapping, a set, or nothing that has items.
  """
  if hasattr(values, '__array__'):
    # At once: an array on a device is slow to iterate over.
    values = np.asarray(values).tolist()
  unordered = isinstance(values, _TEXT | Mapping | Set)
  if unordered or not isinstance(values, Iterable):
    raise UserError(f'{name}={shown(values)} is not a sequence')
  return list(values)


def integers(values: Any, name: str) -> list[int]:
  """A sequence of integers, such as token ids.

  Raises:
    UserError: it is no sequence, or an item is no integer.
  """
  values = sequence(values, name)
  if all(type(value) is int for value in values):
    return values
  return [integer(value, f'{name}[{i}]') for i, value in enumerate(values)]


def number(value: Any, name: str) -> float:
  """`value` as a Python number, integers as they are.

  Raises:
    UserError: it is none, or not finite in float32.
  """
  found = None
  if not isinstance(value, _TEXT | bool | np.bool_):
    try:
      found = value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError, OverflowError):
      found = None
  if found is None:
    raise UserError(f'{name}={shown(value)} is not a number')
  if not (math.isfinite(found) and abs(found) <= MAX_FLOAT):
    raise UserError(f'{name}={found} is not finite')
  return found


def boolean(value: Any, name: str) -> bool:
  """`value` as a Python boolean; 0 and 1 are none.

  Raises:
    UserError: it is none.
  """
  if not isinstance(value, bool | np.bool_):
    raise UserError(f'{name}={shown(value)} is neither True nor False')
  return bool(value)


def text(value: Any, name: str) -> str:
  """`value` if it is a string.

  Raises:
    UserError: it is none.
  """
  if not isinstance(value, str):
    raise UserError(f'{name}={shown(value)} is not a string')
  return value


def _ids(values: Any, name: str) -> tuple[int, ...]:
  return tuple(integers(values, name))


_CHECKS = {
  int: integer,
  float: number,
  bool: boolean,
  str: text,
  tuple[int, ...]: _ids,
}


def check_types(config: Any) -> None:
  """Checks the fields of a frozen dataclass by their annotations.

  What other libraries call an integer or a number becomes Python's own, so
  that equal configs are equal and can be written as JSON.

  Raises:
    UserError: a field of another type; its name is in the message.
  """
  for field in dataclasses.fields(config):
    value, kinds = getattr(config, field.name), (field.type,)
    if isinstance(field.type, types.UnionType):
      kinds = typing.get_args(field.type)
    if value is None and types.NoneType in kinds:
      continue
    for kind in kinds:
      if kind in _CHECKS:
        value = _CHECKS[kind](value, field.name)
        object.__setattr__(config, field.name, value)


def check_fields(cls: type, fields: Any) -> dict[str, Any]:
  """A copy of `fields` if they suit the dataclass `cls` by name and JSON type.

  Raises:
    UserError: an unknown, missing or ill-typed field, by name.
  """
  require(isinstance(fields, dict), f'{cls.__name__}: not a JSON object')
  known = {f.name: f for f in dataclasses.fields(cls)}
  unknown = sorted(set(fields) - set(known))
  require(not unknown, f'{cls.__name__}: unknown fields {", ".join(unknown)}')
  missing = [
    name
    for name, f in known.items()
    if f.default is dataclasses.MISSING and name not in fields
  ]
  require(not missing, f'{cls.__name__}: missing {", ".join(missing)}')
  for name, value in fields.items():
    kind = known[name].type
    if not _fits(value, str(kind)):
      raise UserError(f'{cls.__name__}: {name}={value!r} is not {kind}')
  return dict(fields)


def _fits(value: Any, annotation: str) -> bool:
  """Whether a JSON value suits a field of this (stringified) type."""
  if value is None:
    return 'None' in annotation
  if isinstance(value, bool):
    return 'bool' in annotation
  if isinstance(value, int):
    return 'int' in annotation or 'float' in annotation
  if isinstance(value, float):
    return 'float' in annotation and math.isfinite(value)
  if isinstance(value, str):
    return annotation == "<class 'str'>"
  if isinstance(value, list | tuple):
    inner = int if 'tuple[int' in annotation else str
    return 'tuple' in annotation and all(type(v) is inner for v in value)
  return 'RopeScaling' in annotation and isinstance(value, dict)


def shown(value: Any) -> str:
  """A value for a message: one short line, whatever it is."""
  return ' '.join(reprlib.repr(value).split())
