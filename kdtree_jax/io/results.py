"""Results as JSON lines: one record a line, the whole file or nothing."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import write_atomically


def write_jsonl(
  path: os.PathLike | str, records: Iterable[Mapping[str, Any]]
) -> None:
  """Writes records, one compact JSON object a line, in place of `path`.

  Args:
    path: replaced atomically; never appended to, so that a file holds the
      results of one run.
    records: may hold NumPy and JAX scalars and arrays; they become numbers
      and lists. Keys keep their order.

  Raises:
    UserError: the file cannot be written, or a record has no place in JSON:
      it is no object, or holds NaN, infinity or something that is no data.
  """
  lines = (_line(path, i, record) for i, record in enumerate(records))
  write_atomically(path, lines)


def _line(path: os.PathLike | str, index: int, record: Any) -> bytes:
  try:
    if not isinstance(record, Mapping):
      raise TypeError(f'a {type(record).__name__} is not a JSON object')
    text = json.dumps(
      dict(record),
      separators=(',', ':'),
      allow_nan=False,
      default=_plain,
    )
  except (TypeError, ValueError, RecursionError) as e:
    raise UserError(f'{path}: record {index} is not JSON: {e}') from e
  return text.encode() + b'\n'


def _plain(value: Any) -> Any:
  """What `json` does not know: scalars and arrays of NumPy and JAX."""
  if isinstance(value, Mapping):
    return dict(value)
  # An array of objects would come back as itself and recurse.
  if hasattr(value, '__array__') and np.asarray(value).dtype != object:
    return np.asarray(value).tolist()
  raise TypeError(f'{type(value).__name__} is not data')
