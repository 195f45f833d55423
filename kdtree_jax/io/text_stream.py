"""Text of tokens that arrive one by one, and stop strings in it."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

# The most bytes of an incomplete UTF-8 character, and so the most tokens that
# `WindowDecoder` holds back.
MAX_PENDING = 3
# Tokens decoded again before each new one, whose text may depend on them.
_CONTEXT = 4


class TextStream(Protocol):
  """An object that takes ids and returns the text that they complete."""

  def push(self, ids: Iterable[int]) -> str: ...


class StreamDecoder:
  """A decoder that holds back the bytes of an incomplete character.

  Invalid bytes become U+FFFD at once: at most three bytes are pending. What
  `push` and `finish` return adds up to the text of all ids.
  """

  def __init__(self, piece: Callable[[int | None, int], bytes | None]):
    """Begins a text.

    Args:
      piece: maps the previous token (None at the beginning) and the next one to
        the bytes of the latter, or to None if it has no text.
    """
    self._piece = piece
    self._before: int | None = None
    self._utf8 = codecs.getincrementaldecoder('utf-8')('replace')

  def push(self, ids: Iterable[int]) -> str:
    """Takes new ids, returns the text that they complete."""
    return self._utf8.decode(b''.join(map(self._bytes, ids)))

  def _bytes(self, token: int) -> bytes:
    piece = self._piece(self._before, token)
    if piece is None:
      return b''
    self._before = token
    return piece

  def finish(self) -> str:
    """The rest of the text; an incomplete character becomes U+FFFD."""
    return self._utf8.decode(b'', final=True)


class WindowDecoder:
  """A decoder that uses any function from ids to text.

  A few tokens are decoded again with each new one. While the text ends in
  U+FFFD, which may be an incomplete character, up to `MAX_PENDING` tokens are
  held back.
  """

  def __init__(self, decode: Callable[[list[int]], str]):
    self._decode = decode
    self._context: list[int] = []
    self._pending: list[int] = []

  def push(self, ids: Iterable[int]) -> str:
    """Takes new ids, returns the text that they complete."""
    return ''.join(map(self._next, ids))

  def _next(self, token: int) -> str:
    pending = [*self._pending, token]
    start = len(self._decode(self._context))
    text = self._decode(self._context + pending)[start:]
    count = len(pending)
    if text.endswith('\ufffd'):
      if count <= MAX_PENDING:
        self._pending = pending
        return ''
      # The first bytes are invalid: releases as few tokens as end there.
      for count in range(1, len(pending) + 1):
        part = self._decode(self._context + pending[:count])[start:]
        if text.startswith(part):
          text = part
          break
    self._context = (self._context + pending[:count])[-_CONTEXT:]
    self._pending = pending[count:]
    return text


class StopStrings:
  """A search for several strings in a text that grows token by token."""

  def __init__(self, stops: Sequence[str], stream: TextStream):
    """Begins a text.

    Args:
      stops: strings to find, none of them empty.
      stream: turns the tokens into text.
    """
    self._stops, self._stream = tuple(stops), stream
    # The last characters, which may be the beginning of a stop string.
    self._tail, self._keep = '', max(map(len, self._stops)) - 1

  def push(self, token: int) -> bool:
    """Whether this token completes one of the strings."""
    text = self._tail + self._stream.push([token])
    self._tail = text[max(0, len(text) - self._keep) :]
    return any(stop in text for stop in self._stops)
