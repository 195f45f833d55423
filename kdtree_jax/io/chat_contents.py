"""Contents of chats whose text must not become control tokens.

A template decides by the contents, as they are; in what it writes, the names
of control tokens that come from contents are placeholders.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# Methods of a text that give parts of it, or the text in another form.
_DERIVED = (
  '__getitem__ __mod__ __mul__ __rmul__ capitalize casefold center '
  'expandtabs join ljust lower lstrip partition removeprefix removesuffix '
  'replace rjust rpartition rsplit rstrip split splitlines strip swapcase '
  'title translate upper zfill'
).split()


def one_of(names: Iterable[str]) -> str:
  """A pattern that matches the longest of some names; none matches nothing."""
  longest_first = sorted(names, key=len, reverse=True)
  return '|'.join(map(re.escape, longest_first)) or r'(?!)'


class HiddenNames:
  """Placeholders for the names of control tokens.

  Attributes:
    content: the type of a content: a `str` as any other until it is put
      together with other text or written, when names become placeholders.
  """

  def __init__(self, names: Iterable[str]):
    self._names = list(names)
    self._places = {name: i for i, name in enumerate(self._names)}
    # Private characters only, of which no name is a part, and so many drawn
    # that nobody can know what to write to get a placeholder.
    mark = ''.join(chr(0xE000 + byte) for byte in secrets.token_bytes(8))
    self._mark, number = f'\uf000{mark}', '([\ue100-\ue109]+)\uf001'
    self._name = re.compile(one_of(self._names))
    self._either = re.compile(f'{self._mark}{number}|{one_of(self._names)}')
    self.content = _content_type(self.hidden)

  def hidden(self, text: str) -> str:
    """The text with placeholders in the place of names."""
    return self._name.sub(lambda found: self.placeholder(found[0]), text)

  def placeholder(self, name: str) -> str:
    """What stands for a name."""
    digits = (chr(0xE100 + int(digit)) for digit in str(self._places[name]))
    return f'{self._mark}{"".join(digits)}\uf001'

  def shown(self, text: str) -> str:
    """The text with names in the place of placeholders."""
    return self._either.sub(lambda f: self._shown(f) if f[1] else f[0], text)

  def swapped(self, text: str) -> str:
    """Names in the place of placeholders, placeholders in that of names."""
    return self._either.sub(
      lambda f: self._shown(f) if f[1] else self.placeholder(f[0]), text
    )

  def _shown(self, found: re.Match[str]) -> str:
    digits = (str(ord(letter) - 0xE100) for letter in found[1])
    return self._names[int(''.join(digits))]

  def occur_in(self, value: Any) -> bool:
    """Whether a text, or one in a list or object, spells out a name."""
    if isinstance(value, str):
      return self._name.search(value) is not None
    if isinstance(value, Mapping):
      value = value.values()
    elif not isinstance(value, list | tuple):
      return False
    return any(map(self.occur_in, value))


def wrapped(value: Any, kind: type[str]) -> Any:
  """A value whose texts are of this kind, in lists and objects too."""
  if isinstance(value, str):
    return kind(value)
  if isinstance(value, Mapping):
    return {key: wrapped(item, kind) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(wrapped(item, kind) for item in value)
  return value


def _content_type(hidden: Callable[[str], str]) -> type[str]:
  class Content(str):
    """A text that comes from a message."""

    __slots__ = ()

    def __str__(self) -> str:
      return hidden(str.__str__(self))

    def __format__(self, spec: str) -> str:
      return format(str(self), spec)

    def __add__(self, other: Any) -> str:
      return str(self) + str(other)

    def __radd__(self, other: Any) -> str:
      return str(other) + str(self)

    def __iter__(self) -> Iterator[str]:
      return map(Content, str.__iter__(self))

  def derived(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: str, *args: Any, **kwargs: Any) -> Any:
      return wrapped(method(self, *args, **kwargs), Content)

    return call

  for name in _DERIVED:
    setattr(Content, name, derived(name))
  return Content
