"""Text to token ids and back, with the files of a checkpoint or a bundle.

`tokenizer.json` is read by `tokenizers`, Kimi's `tiktoken.model` by `tiktoken`.
No code of a checkpoint runs, except its chat template, in a sandbox.
"""

import codecs
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsInt

from kdtree_jax.io.chat_template import ChatTemplate
from kdtree_jax.io.files import JsonObject, StrPath, file_kind, one_line, show
from kdtree_jax.io.json_tokenizer import JsonBackend
from kdtree_jax.io.kdtr import read_tokenizer
from kdtree_jax.io.kimi_tokenizer import KimiBackend
from kdtree_jax.io.tokenizer_files import (
  CONFIG_FILE,
  JSON_FILE,
  KIMI_FILE,
  TokenizerError,
  TokenizerFiles,
  read_files,
  token_text,
)

_Backend = JsonBackend | KimiBackend

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


class Tokenizer:
  """A tokenizer of either kind.

  Attributes:
    template: the chat template, or None.
  """

  def __init__(
    self, backend: _Backend, config: JsonObject, files: TokenizerFiles
  ):
    self._backend, self._home = backend, files.home
    self._first_ids = _first_ids(backend, config, files.where(CONFIG_FILE))
    self.template = ChatTemplate.read(files.data, config, files.home)

  def encode(self, text: str) -> list[int]:
    """Ids of a text; names of special tokens in it become those tokens.

    The ids that the checkpoint wants first (BOS) are added if they are missing.

    Raises:
      TokenizerError: the text is no valid unicode, or the library refuses it.
    """
    ids = self._encode(text)
    first = [*self._first_ids]
    return ids if ids[: len(first)] == first else first + ids

  def _encode(
    self, text: str, encode: Callable[[str], list[int]] | None = None
  ) -> list[int]:
    try:
      text.encode()
    except UnicodeEncodeError as e:
      raise TokenizerError(f'text {show(text, 40)} is not valid: {e}') from e
    try:
      return (encode or self._backend.encode)(text)
    # A panic in Rust is a BaseException.
    except BaseException as e:
      if not isinstance(e, Exception) and type(e).__name__ != 'PanicException':
        raise
      raise TokenizerError(
        f'{self._home}: the tokenizer refuses text {show(text, 40)}: '
        f'{one_line(e)}'
      ) from e

  def encode_chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    parse_special: bool = False,
  ) -> list[int]:
    """Ids of a conversation, up to where the model is to answer.

    Args:
      messages: each with `role` (`system`, `user`, `assistant`) and `content`.
      parse_special: names of special tokens in messages become those tokens;
        else they stay text.

    Raises:
      TokenizerError: there is no template, or the library refuses the text.
      TemplateError: the template fails.
    """
    if self.template is None:
      raise TokenizerError(f'{self._home}: has no chat template')
    text = self.template.render(messages)
    escapes = self._backend.escapes
    if parse_special or not escapes.found_in(list(messages)):
      return self._encode(text)
    escaped = self.template.render(messages, escapes=escapes)
    if escapes.unescape(escaped) != text:
      raise TokenizerError(
        f'{self._home}: the chat template reworks a content that spells out '
        'special tokens, so that they cannot be told from its own; remove '
        'them, or give --parse_special_in_messages'
      )
    return self._encode(escaped, self._backend.encode_escaped)

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """Text of ids, special tokens included; invalid UTF-8 becomes U+FFFD."""
    # NumPy's integers, which the libraries refuse, become Python's.
    return self._backend.decode([int(token) for token in ids])

  def stream(self) -> StreamDecoder:
    """A decoder for ids that arrive one by one."""
    return StreamDecoder(self._backend.piece)


def text_stream(decode: Callable[[list[int]], str]) -> TextStream:
  """A streaming form of a function from ids to text.

  Exact for `Tokenizer.decode`, whose tokens are known as bytes.
  """
  owner = getattr(decode, '__self__', None)
  if isinstance(owner, Tokenizer) and decode == owner.decode:
    return owner.stream()
  return WindowDecoder(decode)


def _first_ids(
  backend: _Backend, config: JsonObject, where: str
) -> tuple[int, ...]:
  """Ids that begin every text; `add_bos_token` overrules tokenizer.json."""
  stated = config.get('add_bos_token')
  if stated is None:
    return backend.first_ids
  if not isinstance(stated, bool):
    raise TokenizerError(
      f'{where}: add_bos_token is {show(stated)}, not true or false'
    )
  if not stated:
    return ()
  bos = token_text(config.get('bos_token'))
  token = None if bos is None else backend.token_id(bos)
  if token is None:
    raise TokenizerError(
      f'{where}: add_bos_token is true, but bos_token is {show(bos)}, which '
      'the tokenizer does not have'
    )
  return backend.first_ids if token in backend.first_ids else (token,)


def load_tokenizer(path: StrPath) -> Tokenizer | None:
  """The tokenizer of a checkpoint's folder or of a bundle; None without one.

  Raises:
    UserError: a broken file, or `tiktoken` is needed and not installed.
  """
  path = pathlib.Path(path)
  read = read_tokenizer if file_kind(path) == 'file' else read_files
  files = TokenizerFiles(str(path), read(path))
  config = files.config()
  if JSON_FILE in files.data:
    return Tokenizer(JsonBackend(files, config), config, files)
  if KIMI_FILE in files.data:
    return Tokenizer(KimiBackend(files, config), config, files)
  return None
