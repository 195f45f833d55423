"""Text to token ids and back, with the files of a checkpoint or a bundle.

`tokenizer.json` is read by `tokenizers`, Kimi's `tiktoken.model` by `tiktoken`.
Nothing of a checkpoint is executed but its chat template, in a sandbox.
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kdtree_jax.io.chat_contents import HiddenNames
from kdtree_jax.io.chat_template import ChatTemplate
from kdtree_jax.io.files import file_kind, one_line, show
from kdtree_jax.io.json_tokenizer import JsonBackend
from kdtree_jax.io.kdtr import read_tokenizer
from kdtree_jax.io.kimi_tokenizer import KIMI_PATTERN, KimiBackend
from kdtree_jax.io.text_stream import StreamDecoder, TextStream, WindowDecoder
from kdtree_jax.io.tokenizer_files import (
  CONFIG_FILE,
  JSON_FILE,
  KIMI_FILE,
  TokenizerError,
  TokenizerFiles,
  read_files,
  token_text,
)

__all__ = (
  'KIMI_PATTERN',
  'StreamDecoder',
  'Tokenizer',
  'TokenizerError',
  'load_tokenizer',
  'read_files',
  'text_stream',
)


class _Backend(Protocol):
  """One kind of tokenizer.

  Attributes:
    controls: ids by name of the tokens that no user's text may become.
    first_ids: what the file itself puts before a text.
    hidden: placeholders for `controls`.
  """

  controls: Mapping[str, int]
  first_ids: tuple[int, ...]

  @property
  def hidden(self) -> HiddenNames: ...

  def token_id(self, name: str) -> int | None: ...
  def encode(self, text: str) -> list[int]: ...
  def encode_hidden(self, text: str) -> list[int]: ...
  def decode(self, ids: Sequence[int]) -> str: ...
  def piece(self, before: int | None, token: int) -> bytes | None: ...


class Tokenizer:
  """One interface to both kinds.

  Attributes:
    template: of a chat, or None.
  """

  def __init__(
    self, backend: _Backend, config: Mapping[str, Any], files: TokenizerFiles
  ):
    self._backend, self._home = backend, files.home
    self._first_ids = _first_ids(backend, config, files.where(CONFIG_FILE))
    self.template = ChatTemplate.read(files.data, config, files.home)

  def encode(self, text: str) -> list[int]:
    """Ids of a text; special tokens that it spells out are those tokens.

    Begins with what the checkpoint wants at the beginning, if anything, once.

    Raises:
      TokenizerError: the text is no valid unicode, or refused by the library.
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
    # Rust's panics are no Exceptions.
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
      parse_special: special tokens that contents spell out are those tokens,
        not text.

    Raises:
      TokenizerError: no template, or text that the library refuses.
      TemplateError: the template fails.
    """
    if self.template is None:
      raise TokenizerError(f'{self._home}: has no chat template')
    text = self.template.render(messages)
    hidden = self._backend.hidden
    if parse_special or not hidden.occur_in(list(messages)):
      return self._encode(text)
    apart = self.template.render(messages, hidden=hidden)
    if hidden.shown(apart) != text:
      raise TokenizerError(
        f'{self._home}: the chat template reworks a content that spells out '
        'special tokens, so that they cannot be told from its own; remove '
        'them, or give --parse_special_in_messages'
      )
    return self._encode(apart, self._backend.encode_hidden)

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, special tokens included; what is no unicode is U+FFFD."""
    return self._backend.decode([int(token) for token in ids])

  def stream(self) -> StreamDecoder:
    """A decoder for ids that come one by one."""
    return StreamDecoder(self._backend.piece)


def text_stream(decode: Callable[[list[int]], str]) -> TextStream:
  """A stream of what a function makes of ids, by bytes if they are known."""
  owner = getattr(decode, '__self__', None)
  if isinstance(owner, Tokenizer) and decode == owner.decode:
    return owner.stream()
  return WindowDecoder(decode)


def _first_ids(
  backend: _Backend, config: Mapping[str, Any], where: str
) -> tuple[int, ...]:
  """What a text begins with; `add_bos_token` overrules tokenizer.json."""
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


def load_tokenizer(path: os.PathLike | str) -> Tokenizer | None:
  """The tokenizer of a checkpoint's folder or of a bundle, None without one.

  Raises:
    UserError: a broken file, or `tiktoken` is needed and not installed.
  """
  path = pathlib.Path(path)
  if file_kind(path) == 'file':
    files = TokenizerFiles(str(path), read_tokenizer(path))
  else:
    files = TokenizerFiles(str(path), read_files(path))
  config = files.config()
  if JSON_FILE in files.data:
    return Tokenizer(JsonBackend(files, config), config, files)
  if KIMI_FILE in files.data:
    return Tokenizer(KimiBackend(files, config), config, files)
  return None
