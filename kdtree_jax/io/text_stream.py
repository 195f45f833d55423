"""Text of tokens that come one by one, and stop strings in it."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

# Bytes of a letter that may be missing its last one, and so the tokens that
# a decoder without bytes may hold back.
MAX_PENDING = 3
# Tokens that are decoded again before a new one, which may look different
# after them.
_CONTEXT = 4


class TextStream(Protocol):
  """Takes ids, returns the text that they complete."""

  def push(self, ids: Iterable[int]) -> str: ...


class StreamDecoder:
  """Text of a growing sequence; holds back the bytes of an unfinished letter.

  Bytes that can begin no letter, or not go on with one, are U+FFFD at once:
  at most three bytes are pending. The pieces that `push` and `finish` return
  are together the text of all ids.
  """

  def __init__(self, piece: Callable[[int | None, int], bytes | None]):
    """A stream at its beginning.

    Args:
      piece: bytes of a token (second) after another one (first; None at the
        beginning), or None for a token without text.
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
    """The rest, an unfinished letter as U+FFFD."""
    return self._utf8.decode(b'', final=True)


class WindowDecoder:
  """The same for any function from ids to text, which gives no bytes.

  A few tokens are decoded again with each new one. While the text ends in
  U+FFFD, which may be a letter whose last bytes are to come, at most
  `MAX_PENDING` tokens are held back.
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
      # The first of them are broken for good: as few as end between letters.
      for count in range(1, len(pending) + 1):
        part = self._decode(self._context + pending[:count])[start:]
        if text.startswith(part):
          text = part
          break
    self._context = (self._context + pending[:count])[-_CONTEXT:]
    self._pending = pending[count:]
    return text


class StopStrings:
  """The first of several strings in a text that grows token by token."""

  def __init__(self, stops: Sequence[str], stream: TextStream):
    """A text at its beginning.

    Args:
      stops: strings that are not empty.
      stream: of the text's tokens.
    """
    self._stops, self._stream = tuple(stops), stream
    # The last letters, with which a stop string may have begun.
    self._tail, self._keep = '', max(map(len, self._stops)) - 1

  def push(self, token: int) -> bool:
    """Whether this token completes one of the strings."""
    text = self._tail + self._stream.push([token])
    self._tail = text[max(0, len(text) - self._keep) :]
    return any(stop in text for stop in self._stops)
