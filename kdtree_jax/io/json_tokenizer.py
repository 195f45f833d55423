"""`tokenizer.json`, read by `tokenizers`."""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from kdtree_jax.io.chat_template import SpecialTokenEscapes
from kdtree_jax.io.files import JsonObject, one_line, show
from kdtree_jax.io.tokenizer_files import (
  CONFIG_FILE,
  JSON_FILE,
  TokenizerError,
  TokenizerFiles,
  added_tokens,
)

_BYTE = re.compile('<0x([0-9A-Fa-f]{2})>')
_MAX_ID = 2**32 - 1


class JsonBackend:
  """The tokenizer of `tokenizer.json`.

  Attributes:
    special_tokens: ids by name of the added tokens that text of a message
      must not become: all but whitespace and words.
    first_ids: ids that its post-processor puts before a text.
  """

  def __init__(self, files: TokenizerFiles, config: JsonObject):
    where = files.where(JSON_FILE)
    try:
      self._tokenizer = tokenizers.Tokenizer.from_buffer(files.data[JSON_FILE])
    except Exception as e:  # The library raises no narrower type.
      raise TokenizerError(f'{where}: no tokenizer: {one_line(e)}') from e
    # A prompt is neither padded nor cut, whatever the file asks for.
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()
    config_file = files.where(CONFIG_FILE)
    self._add(added_tokens(config, config_file), config_file)
    self.special_tokens = {
      token.content: number
      for number, token in self._tokenizer.get_added_tokens_decoder().items()
      if _is_special(token)
    }
    self.first_ids = self._first_ids(where)
    steps = _steps(self._tokenizer.decoder, 'decoders')
    kinds = {step['type'] for step in steps}
    self._byte_level = 'ByteLevel' in kinds
    self._byte_tokens = 'ByteFallback' in kinds

  def _add(self, added: Mapping[int, JsonObject], where: str) -> None:
    """Adds tokens that only tokenizer_config.json has; checks the others."""
    present = self._tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in present}
    missing = [
      _added_token(entry)
      for entry in added.values()
      if entry['content'] not in known
    ]
    for special, group in itertools.groupby(missing, lambda t: t.special):
      add = self._tokenizer.add_tokens
      if special:
        add = self._tokenizer.add_special_tokens
      add(list(group))
    for number, entry in added.items():
      found = self._tokenizer.token_to_id(entry['content'])
      if found != number:
        raise TokenizerError(
          f'{where}: added_tokens_decoder: {show(entry["content"])} is token '
          f'{number}, but {found} by {JSON_FILE}'
        )

  def _first_ids(self, where: str) -> tuple[int, ...]:
    """Ids that the post-processor puts before a text.

    Those after the text are left out, because a prompt is continued.
    """
    first: list[tuple[str, int]] = []
    for step in _steps(self._tokenizer.post_processor, 'processors'):
      if 'cls' in step:  # post-processors of BERT and RoBERTa
        first.append(tuple(step['cls']))
      for item in step.get('single', ()):
        if 'SpecialToken' not in item:
          break
        token = step['special_tokens'][item['SpecialToken']['id']]
        first += zip(token['tokens'], token['ids'], strict=False)
    for name, number in first:
      if self._tokenizer.token_to_id(name) != number:
        raise TokenizerError(
          f'{where}: post_processor: {show(name)} is token {number}, but '
          f'{self._tokenizer.token_to_id(name)} by the vocabulary'
        )
    return tuple(number for _, number in first)

  def token_id(self, name: str) -> int | None:
    return self._tokenizer.token_to_id(name)

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_escaped(self, text: str) -> list[int]:
    """Ids of a text in which placeholders stand for ordinary text."""
    text = self.escapes.swap(text)
    return self._renamed.encode(text, add_special_tokens=False).ids

  @functools.cached_property
  def escapes(self) -> SpecialTokenEscapes:
    return SpecialTokenEscapes(self.special_tokens)

  @functools.cached_property
  def _renamed(self) -> tokenizers.Tokenizer:
    """The tokenizer with its special tokens named by their placeholders.

    The former names are ordinary text to it, in the vocabulary too.
    """
    names = {
      name: self.escapes.placeholder(name) for name in self.special_tokens
    }
    raw = json.loads(self._tokenizer.to_str())
    for entry in raw['added_tokens']:
      entry['content'] = names.get(entry['content'], entry['content'])
    model = raw['model']
    if isinstance(model['vocab'], Mapping):
      model['vocab'] = {names.get(k, k): v for k, v in model['vocab'].items()}
    else:
      model['vocab'] = [[names.get(k, k), v] for k, v in model['vocab']]
    if 'unk_token' in model:
      model['unk_token'] = names.get(model['unk_token'], model['unk_token'])
    raw['post_processor'] = None
    return tokenizers.Tokenizer.from_str(json.dumps(raw))

  def decode(self, ids: Sequence[int]) -> str:
    known = [token for token in ids if 0 <= token <= _MAX_ID]
    text = self._tokenizer.decode(known, skip_special_tokens=False)
    if self._byte_tokens and '\ufffd' in text:
      # The library replaces a whole run of bytes if one of them is invalid.
      pieces = map(self.piece, [None, *known], known)
      text = b''.join(p or b'' for p in pieces).decode('utf-8', 'replace')
    return text

  def piece(self, before: int | None, token: int) -> bytes | None:
    """Bytes of a token that follows another one; None if it is unknown."""
    if not 0 <= token <= _MAX_ID:
      return None
    name = self._tokenizer.id_to_token(token)
    if name is None:
      return None
    if self._byte_level:
      return _level_bytes(name)
    byte = _BYTE.fullmatch(name) if self._byte_tokens else None
    if byte is not None and before is not None:
      return bytes([int(byte[1], 16)])
    decode = functools.partial(
      self._tokenizer.decode, skip_special_tokens=False
    )
    if byte is not None:  # A leading space may be dropped.
      text = decode([token])
      return bytes([int(byte[1], 16)]) if text == '\ufffd' else text.encode()
    first = [] if before is None else [before]
    return decode([*first, token])[len(decode(first)) :].encode()


def _is_special(token: tokenizers.AddedToken) -> bool:
  """Whether an added token is neither whitespace, a word nor a byte."""
  text = token.content.strip()
  if not text or token.single_word or _BYTE.fullmatch(text):
    return False
  return token.special or not text.isalnum()


def _added_token(entry: JsonObject) -> tokenizers.AddedToken:
  flags = {
    name: entry[name]
    for name in ('lstrip', 'rstrip', 'single_word', 'normalized', 'special')
    if isinstance(entry.get(name), bool)
  }
  return tokenizers.AddedToken(entry['content'], **flags)


def _steps(part: Any, key: str) -> list[JsonObject]:
  """The steps of a decoder or post-processor, which may be a sequence."""
  if part is None:
    return []
  raw = json.loads(part.__getstate__())
  return raw.get(key, [raw])


def _byte_letters() -> dict[str, int]:
  """The characters that stand for bytes in byte-level BPE (GPT-2).

  Printable bytes of Latin-1 stand for themselves, the others for the characters
  after U+00FF, in order.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  letters = {chr(byte): byte for byte in printable}
  return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _level_bytes(name: str) -> bytes:
  """Bytes of a token of byte-level BPE; an added one may be plain text."""
  try:
    return bytes(_LETTERS[letter] for letter in name)
  except KeyError:
    return name.encode()
