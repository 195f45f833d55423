"""Text to token ids and back, with the files of a checkpoint or a bundle.

`tokenizer.json` is read by `tokenizers`, Kimi's `tiktoken.model` by `tiktoken`.
Nothing of a checkpoint is executed but its chat template, in a sandbox.
"""

import base64
import binascii
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import tokenizers

from kdtree_jax.errors import UserError
from kdtree_jax.io.bundle import TOKENIZER_FILES
from kdtree_jax.io.chat_template import ChatTemplate
from kdtree_jax.io.files import file_kind, one_line, show
from kdtree_jax.io.kdtr import read_tokenizer
from kdtree_jax.io.tensors import json_object

JSON_FILE, KIMI_FILE = 'tokenizer.json', 'tiktoken.model'
CONFIG_FILE = 'tokenizer_config.json'

# How Kimi cuts text into words (tokenization_kimi.py): Han runs by themselves,
# other letters by case, digits by threes. GPT-4's pattern gives other ids.
_LOWER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
_UPPER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = '|'.join(
  (
    r'[\p{Han}]+',
    rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}',
    rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}',
    r'\p{N}{1,3}',
    r' ?[^\s\p{L}\p{N}]+[\r\n]*',
    r'\s*[\r\n]+',
    r'\s+(?!\S)',
    r'\s+',
  )
)
# Ids behind the ranks; those that tokenizer_config.json does not name are
# called <|reserved_token_N|>.
KIMI_RESERVED = 256


class TokenizerError(UserError):
  """A tokenizer's file is missing, broken or unsupported."""


class _Backend(Protocol):
  def encode(self, text: str) -> list[int]: ...
  def decode(self, ids: Sequence[int]) -> str: ...


class StreamDecoder:
  """Text of a growing sequence; holds back the bytes of an unfinished letter.

  The pieces that `push` and `finish` return are together `decode` of all ids.
  """

  def __init__(self, tokenizer: 'Tokenizer'):
    self._tokenizer = tokenizer
    self._ids: list[int] = []
    # Ids before `_settled` are said; those from `_context` on are decoded
    # again, because a token may look different after another one.
    self._context = self._settled = 0

  def push(self, ids: Iterable[int]) -> str:
    """Takes new ids, returns the text that they complete."""
    self._ids += ids
    return self._advance(final=False)

  def finish(self) -> str:
    """The rest, an unfinished letter as U+FFFD."""
    return self._advance(final=True)

  def _advance(self, final: bool) -> str:
    decode = self._tokenizer.decode
    before = decode(self._ids[self._context : self._settled])
    text = decode(self._ids[self._context :])
    if text.endswith('\ufffd') and not final:
      return ''
    self._context, self._settled = self._settled, len(self._ids)
    return text[len(before) :]


class Tokenizer:
  """One interface to both kinds.

  Attributes:
    template: of a chat, or None.
  """

  def __init__(
    self, backend: _Backend, config: Mapping[str, Any], files: '_Files'
  ):
    self._backend, self._home = backend, files.home
    self._bos = None
    if config.get('add_bos_token') is True:
      bos = _content(config.get('bos_token'))
      self._bos = None if bos is None else self._only_id(bos)
    self.template = ChatTemplate.read(files.data, config, files.home)

  def _only_id(self, token: str) -> int | None:
    ids = self._backend.encode(token)
    return ids[0] if len(ids) == 1 else None

  def encode(self, text: str) -> list[int]:
    """Ids of a text; special tokens that it spells out are those tokens.

    Begins with the token that the checkpoint wants at the beginning, if any.

    Raises:
      TokenizerError: the text is no valid unicode.
    """
    ids = self._encode(text)
    if self._bos is not None and ids[:1] != [self._bos]:
      ids = [self._bos, *ids]
    return ids

  def _encode(self, text: str) -> list[int]:
    try:
      text.encode()
    except UnicodeEncodeError as e:
      raise TokenizerError(f'text {show(text, 40)} is not valid: {e}') from e
    return self._backend.encode(text)

  def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation, up to where the model is to answer.

    Args:
      messages: each with `role` (`system`, `user`, `assistant`) and `content`.

    Raises:
      TokenizerError: no template, or one that fails.
    """
    if self.template is None:
      raise TokenizerError(f'{self._home}: has no chat template')
    return self._encode(self.template.render(messages))

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, special tokens included; what is no unicode is U+FFFD."""
    return self._backend.decode([int(token) for token in ids])

  def stream(self) -> StreamDecoder:
    """A decoder for ids that come one by one."""
    return StreamDecoder(self)


class _Files(NamedTuple):
  """A tokenizer's files, wherever they are.

  Attributes:
    home: the folder or bundle.
    data: bytes by file name.
  """

  home: str
  data: Mapping[str, bytes]

  def where(self, name: str) -> str:
    return f'{self.home}/{name}'


def load_tokenizer(path: os.PathLike | str) -> Tokenizer | None:
  """The tokenizer of a checkpoint's folder or of a bundle, None without one.

  Raises:
    UserError: a broken file, or `tiktoken` is needed and not installed.
  """
  path = pathlib.Path(path)
  if file_kind(path) == 'file':
    files = _Files(str(path), read_tokenizer(path))
  else:
    files = _Files(str(path), read_files(path))
  config: Mapping[str, Any] = {}
  if CONFIG_FILE in files.data:
    where = files.where(CONFIG_FILE)
    config = json_object(files.data[CONFIG_FILE], where, TokenizerError)
  if JSON_FILE in files.data:
    return Tokenizer(_JsonBackend(files), config, files)
  if KIMI_FILE in files.data:
    return Tokenizer(_KimiBackend(files, config), config, files)
  return None


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
  """What a folder has of `TOKENIZER_FILES`.

  Raises:
    TokenizerError: a file that cannot be read.
  """
  data = {}
  for name in TOKENIZER_FILES:
    path = folder / name
    try:
      data[name] = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
      continue
    except OSError as e:
      raise TokenizerError(f'{path}: cannot be read: {e.strerror or e}') from e
  return data


class _JsonBackend:
  """`tokenizer.json`."""

  def __init__(self, files: _Files):
    try:
      self._tokenizer = tokenizers.Tokenizer.from_buffer(files.data[JSON_FILE])
    except Exception as e:  # the library raises nothing more special
      where = files.where(JSON_FILE)
      raise TokenizerError(f'{where}: no tokenizer: {one_line(e)}') from e
    # A prompt is neither padded nor cut, whatever training did.
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode(ids, skip_special_tokens=False)


class _KimiBackend:
  """`tiktoken.model`: a rank a line; special tokens follow the ranks."""

  def __init__(self, files: _Files, config: Mapping[str, Any]):
    where = files.where(KIMI_FILE)
    try:
      import tiktoken
    except ImportError:
      raise TokenizerError(
        f'{where}: needs tiktoken: pip install kdtree_jax[kimi]'
      ) from None
    ranks = _ranks(files.data[KIMI_FILE], where)
    specials = _special_tokens(files.where(CONFIG_FILE), config, len(ranks))
    try:
      self._encoding = tiktoken.Encoding(
        name='kimi',
        pat_str=KIMI_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=specials,
      )
    except Exception as e:  # from Rust: bytes without a rank, and the like
      raise TokenizerError(f'{where}: no tokenizer: {one_line(e)}') from e
    self._size = len(ranks) + KIMI_RESERVED

  def encode(self, text: str) -> list[int]:
    return self._encoding.encode(text, allowed_special='all')

  def decode(self, ids: Sequence[int]) -> str:
    # The vocabulary of a model may be padded beyond the tokenizer's.
    known = [token for token in ids if 0 <= token < self._size]
    return self._encoding.decode_bytes(known).decode('utf-8', 'replace')


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
  """Lines of base64 and rank.

  Raises:
    TokenizerError: another line, ranks that are not 0, 1, 2, ..., or a byte
      without one.
  """
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(data.split(b'\n'), 1):
    if not line.strip():
      continue
    try:
      token, rank = line.split()
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
      raise TokenizerError(
        f'{where}: line {number} is {show(line, 40)}, not base64 and a rank'
      ) from None
  if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
    raise TokenizerError(f'{where}: ranks are not 0 to {len(ranks) - 1}')
  if any(bytes([byte]) not in ranks for byte in range(256)):
    raise TokenizerError(f'{where}: not every byte has a rank')
  return ranks


def _special_tokens(
  where: str, config: Mapping[str, Any], first: int
) -> dict[str, int]:
  """Names of the ids behind the ranks."""
  added = config.get('added_tokens_decoder') or {}
  if not isinstance(added, Mapping):
    raise TokenizerError(f'{where}: added_tokens_decoder is no object')
  names = {}
  for token in range(first, first + KIMI_RESERVED):
    entry = _content(added.get(str(token)))
    name = f'<|reserved_token_{token}|>' if entry is None else entry
    # tiktoken would look for it for ever.
    if not name:
      raise TokenizerError(
        f'{where}: added_tokens_decoder: the name of token {token} is empty'
      )
    if name in names:
      raise TokenizerError(f'{where}: {show(name)} is the name of two tokens')
    names[name] = token
  return names


def _content(value: Any) -> str | None:
  """A token's text: itself, or the `content` of an object."""
  if isinstance(value, Mapping):
    value = value.get('content')
  return value if isinstance(value, str) else None
