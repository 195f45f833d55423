"""Kimi's `tiktoken.model`: a rank a line; special tokens follow the ranks."""

import base64
import binascii
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdtree_jax.io.chat_contents import HiddenNames, one_of
from kdtree_jax.io.files import one_line, show
from kdtree_jax.io.tokenizer_files import (
  CONFIG_FILE,
  KIMI_FILE,
  TokenizerError,
  TokenizerFiles,
  added_tokens,
)

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
# Kimi's own tokenizer cuts texts so, and tiktoken takes every part.
_MAX_LETTERS, _MAX_RUN = 400_000, 25_000


class KimiBackend:
  """The tokenizer of `tiktoken.model`.

  Attributes:
    controls: every special token's id by its name.
    first_ids: empty; only tokenizer_config.json asks for a first token.
  """

  def __init__(self, files: TokenizerFiles, config: Mapping[str, Any]):
    where = files.where(KIMI_FILE)
    try:
      import tiktoken
    except ImportError:
      raise TokenizerError(
        f'{where}: needs tiktoken: pip install kdtree_jax[kimi]'
      ) from None
    ranks = _ranks(files.data[KIMI_FILE], where)
    self.controls = _special_tokens(files, config, len(ranks))
    self.first_ids: tuple[int, ...] = ()
    try:
      self._encoding = tiktoken.Encoding(
        name='kimi',
        pat_str=KIMI_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=self.controls,
      )
    except Exception as e:  # from Rust: bytes without a rank, and the like
      raise TokenizerError(f'{where}: no tokenizer: {one_line(e)}') from e
    self._size = len(ranks) + KIMI_RESERVED
    self._control = re.compile(f'({one_of(self.controls)})')

  def token_id(self, name: str) -> int | None:
    return self.controls.get(name)

  def encode(self, text: str) -> list[int]:
    try:
      return self._encoding.encode(text, allowed_special='all')
    except ValueError:  # its regular expressions run out of stack
      return self._joined(self._control.split(text))

  def encode_hidden(self, text: str) -> list[int]:
    return self._joined(self._control.split(text))

  @functools.cached_property
  def hidden(self) -> HiddenNames:
    return HiddenNames(self.controls)

  def _joined(self, parts: Sequence[str]) -> list[int]:
    """Ids of texts and, at odd places, special tokens."""
    ids: list[int] = []
    for place, part in enumerate(parts):
      if place % 2:
        ids.append(self.controls[part])
      else:
        ids += self._ordinary(self.hidden.shown(part))
    return ids

  def _ordinary(self, text: str) -> list[int]:
    """Ids without any special token."""
    # Not `encode_ordinary`, which panics where this one raises.
    plain = functools.partial(self._encoding.encode, disallowed_special=())
    try:
      return plain(text)
    except ValueError:
      return [token for part in map(plain, _short(text)) for token in part]

  def decode(self, ids: Sequence[int]) -> str:
    # The vocabulary of a model may be padded beyond the tokenizer's.
    known = [token for token in ids if 0 <= token < self._size]
    return self._encoding.decode_bytes(known).decode('utf-8', 'replace')

  def piece(self, before: int | None, token: int) -> bytes | None:
    del before
    if not 0 <= token < self._size:
      return None
    return self._encoding.decode_single_token_bytes(token)


def _short(text: str) -> Iterator[str]:
  """Parts without long runs of blanks, or of anything else."""
  run = re.compile(rf'\s{{1,{_MAX_RUN}}}|\S{{1,{_MAX_RUN}}}')
  for start in range(0, len(text), _MAX_LETTERS):
    part, begin, end, blank = text[start : start + _MAX_LETTERS], 0, 0, None
    for match in run.finditer(part):
      same = blank == match[0][0].isspace()
      if same:  # The run goes on: it was cut here.
        yield part[begin:end]
        begin = end
      end, blank = match.end(), match[0][0].isspace()
    yield part[begin:]


def special_tokens(
  files: TokenizerFiles, config: Mapping[str, Any]
) -> dict[str, int]:
  """Ids of the special tokens by name, for which tiktoken is not needed.

  Raises:
    TokenizerError: a broken file.
  """
  ranks = _ranks(files.data[KIMI_FILE], files.where(KIMI_FILE))
  return _special_tokens(files, config, len(ranks))


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
  files: TokenizerFiles, config: Mapping[str, Any], first: int
) -> dict[str, int]:
  """Ids behind the ranks by name."""
  where = files.where(CONFIG_FILE)
  added = added_tokens(config, where)
  names: dict[str, int] = {}
  for token in range(first, first + KIMI_RESERVED):
    name = f'<|reserved_token_{token}|>'
    if token in added:
      name = added[token]['content']
    if name in names:
      raise TokenizerError(f'{where}: {show(name)} is the name of two tokens')
    names[name] = token
  return names
