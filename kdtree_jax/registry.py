"""Names for the things a researcher adds: drafters, tree policies.

One registry, keyed by kind and name. A file registers what it defines with one
decorator; flags and the test suite read the names from here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from kdtree_jax.errors import UserError

T = TypeVar('T')
_ENTRIES: dict[str, dict[str, Any]] = {}


def register(kind: str, name: str) -> Callable[[T], T]:
  """Decorator that files an object under `kind` and `name`.

  Raises:
    ValueError: the name is taken.
  """

  def add(entry: T) -> T:
    entries = _ENTRIES.setdefault(kind, {})
    if name in entries:
      raise ValueError(f'{kind} {name!r} is already registered')
    entries[name] = entry
    return entry

  return add


def get(kind: str, name: str) -> Any:
  """The object filed under `kind` and `name`.

  Raises:
    UserError: no such name; the message lists those that exist.
  """
  try:
    return _ENTRIES[kind][name]
  except KeyError:
    known = ', '.join(names(kind)) or 'none'
    raise UserError(f'unknown {kind} {name!r}; known: {known}') from None


def names(kind: str) -> tuple[str, ...]:
  """All names of a kind, sorted."""
  return tuple(sorted(_ENTRIES.get(kind, {})))
