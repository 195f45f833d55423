"""The registry of what a researcher adds: drafters and tree policies.

Entries are keyed by kind and name. A file registers its class or function with
a decorator; flags and the test suite list the names.
"""

from collections.abc import Callable
from typing import Any

from kdtree_jax.errors import UserError

_ENTRIES: dict[str, dict[str, Any]] = {}


def register[T](kind: str, name: str) -> Callable[[T], T]:
  """A decorator that registers an object under `kind` and `name`.

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
  """The object registered under `kind` and `name`.

  Raises:
    UserError: there is no such name; the message lists those that exist.
  """
  try:
    return _ENTRIES[kind][name]
  except KeyError:
    known = ', '.join(names(kind)) or 'none'
    raise UserError(f'unknown {kind} {name!r}; known: {known}') from None


def names(kind: str) -> tuple[str, ...]:
  """All names of a kind, sorted."""
  return tuple(sorted(_ENTRIES.get(kind, {})))
