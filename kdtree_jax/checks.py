"""Checks of single values; an error is one line that names the value.

Integers of Python, NumPy and JAX are integers. Text, booleans and floats are
not, even if they could be converted.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np

from kdtree_jax.errors import UserError, show

# Temperatures and probabilities are float32 on the device.
MAX_FLOAT = float(np.finfo(np.float32).max)

_TEXT = (str, bytes, bytearray)


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
    UserError: it is no integer, or out of range.
  """
  try:
    number = None if isinstance(value, bool) else operator.index(value)
  except TypeError:
    number = None
  if number is None:
    raise UserError(f'{name}={show(value)} is not an integer')
  if least is not None and number < least:
    raise UserError(f'{name}={number} is below {least}')
  if most is not None and number > most:
    raise UserError(f'{name}={number} exceeds {most}')
  return number


def sequence(values: object, name: str) -> list[Any]:
  """The items of a list, an array or another ordered collection.

  Raises:
    UserError: it is text, a mapping or a set, or has no items.
  """
  if hasattr(values, '__array__'):
    # All at once: iterating over an array on a device is slow.
    values = np.asarray(values).tolist()
  unordered = isinstance(values, (*_TEXT, Mapping, Set))
  if unordered or not isinstance(values, Iterable):
    raise UserError(f'{name}={show(values)} is not a sequence')
  return list(values)


def integers(values: object, name: str) -> list[int]:
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
    UserError: it is no number, or not finite in float32.
  """
  found = None
  if not isinstance(value, (*_TEXT, bool, np.bool_)):
    try:
      found = value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError, OverflowError):
      found = None
  if found is None:
    raise UserError(f'{name}={show(value)} is not a number')
  if not (math.isfinite(found) and abs(found) <= MAX_FLOAT):
    raise UserError(f'{name}={found} is not finite')
  return found
