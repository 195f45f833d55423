"""Strict, typed access to the keys of a foreign JSON object."""

from collections.abc import Iterable, Mapping
from typing import Any

from kdtree_jax.errors import show
from kdtree_jax.io.tensors import CheckpointError
from kdtree_jax.schema import MAX_INT, problem

REQUIRED: Any = object()


def is_inert(value: object) -> bool:
  """Whether a switch of any meaning is off with this value."""
  return value is None or value is False or value in (0, '', [], {})


class Fields:
  """Typed access to a JSON object that remembers which keys were read.

  An absent key equals null. Every failure is a CheckpointError that names the
  file and the key.
  """

  def __init__(self, raw: object, where: str):
    self._where = where
    if not isinstance(raw, Mapping):
      raise CheckpointError(f'{where}: {show(raw)} is not a JSON object')
    self._raw, self._used = raw, set()

  def error(self, key: str, problem: str) -> CheckpointError:
    return CheckpointError(f'{self._where}: {show(key)[1:-1]} {problem}')

  def get(self, key: str, default: Any = None) -> Any:
    self._used.add(key)
    value = self._raw.get(key)
    if value is not None:
      return value
    if default is REQUIRED:
      raise self.error(key, 'is missing')
    return default

  def _typed(self, key: str, default: Any, kind: Any) -> Any:
    value = self.get(key, default)
    if isinstance(value, list):
      value = tuple(value)
    if value is not default and (why := problem(value, kind)):
      raise self.error(key, f'is {show(value)}, {why}')
    return value

  def integer[D](
    self, key: str, default: D = REQUIRED, least: int = 0
  ) -> int | D:
    value = self._typed(key, default, int)
    if value is not default and value < least:
      raise self.error(key, f'is {show(value)}, not in {least}..{MAX_INT}')
    return value

  def sizes(self, keys: Iterable[str]) -> dict[str, Any]:
    """Required integers of at least 1, by key."""
    return {key: self.integer(key, least=1) for key in keys}

  def number[D](
    self,
    key: str,
    default: D = REQUIRED,
    *,
    above: float | None = None,
    least: float | None = None,
  ) -> float | D:
    value = self._typed(key, default, float)
    if value is default:
      return value
    if above is not None and value <= above:
      raise self.error(key, f'is {show(value)}, not above {above}')
    if least is not None and value < least:
      raise self.error(key, f'is {show(value)}, below {least}')
    return float(value)

  def boolean[D](self, key: str, default: D = REQUIRED) -> bool | D:
    return self._typed(key, default, bool)

  def string[D](self, key: str, default: D = REQUIRED) -> str | D:
    return self._typed(key, default, str)

  def tuple_of[K, D](
    self, kind: type[K], key: str, default: D = REQUIRED
  ) -> tuple[K, ...] | D:
    return self._typed(key, default, tuple[kind, ...])

  def fixed(self, key: str, supported: object) -> None:
    """Refuses a key that is present with another than the supported value."""
    value = self.get(key)
    if value is None:
      return
    # In Python True == 1, in JSON it is not.
    same = isinstance(value, bool) == isinstance(supported, bool)
    if not same or value != supported:
      raise self.error(
        key, f'is {show(value)}; only {supported!r} is supported'
      )

  def finish(self, ignored: frozenset[str] | set[str] = frozenset()) -> None:
    """Raises for a key that was not read, is not ignored and not off."""
    for key, value in self._raw.items():
      if key in self._used or key in ignored or is_inert(value):
        continue
      raise self.error(
        key,
        f'({show(value, 40)}) is not known to this engine and may change the '
        'model',
      )
