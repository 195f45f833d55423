"""Validation of arguments; every error names the argument."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

INT32 = ('int32',)
FLOATS = ('float32', 'bfloat16')


def check_array(
  name: str,
  value: Any,
  shape: Sequence[int | None],
  dtypes: Sequence[str],
) -> jax.Array:
  """Returns `value` as a jax array after checking its shape and dtype.

  Args:
    name: the argument's name, for the message.
    value: the array.
    shape: expected shape; None leaves a dimension free.
    dtypes: names of the dtypes allowed.

  Raises:
    ValueError: rank, a dimension or the dtype differs.
  """
  array = jnp.asarray(value)
  check_shape(name, array.shape, shape)
  if array.dtype.name not in dtypes:
    raise ValueError(
      f'{name}: expected dtype {" or ".join(dtypes)}, got {array.dtype.name}'
    )
  return array


def check_shape(
  name: str, have: Sequence[int], shape: Sequence[int | None]
) -> None:
  """Checks a shape; None leaves a dimension free.

  Raises:
    ValueError: the rank or a dimension differs.
  """
  fits = len(have) == len(shape) and all(
    want is None or want == size for want, size in zip(shape, have, strict=True)
  )
  if not fits:
    wanted = ', '.join('any' if size is None else str(size) for size in shape)
    raise ValueError(f'{name}: expected shape [{wanted}], got {list(have)}')


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
  """Returns the static integer `value` after checking `low <= value <= high`.

  Raises:
    ValueError: not an integer (a bool is not one), or out of range.
  """
  try:
    number = operator.index(value)
  except TypeError as error:
    raise ValueError(
      f'{name}: expected a static integer, got {value!r}'
    ) from error
  too_high = high is not None and number > high
  if isinstance(value, bool) or number < low or too_high:
    bound = f'>= {low}' if high is None else f'in {low}..{high}'
    raise ValueError(f'{name}: expected an integer {bound}, got {value!r}')
  return number
