"""Kimi's `tiktoken.model`: one token and its rank, which is its id, a line."""

import base64
import functools
import re
from collections.abc import Iterator, Mapping, Sequence

from kdtree_jax.io.chat_template import SpecialTokenEscapes, one_of
from kdtree_jax.io.files import JsonObject, one_line, show
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
# The number of ids after the ranks, which are special tokens; those that
# tokenizer_config.json does not name are called <|reserved_token_N|>.
KIMI_RESERVED = 256
# Kimi's own tokenizer splits texts into parts of these sizes, each of which
# tiktoken accepts.
_MAX_LETTERS, _MAX_RUN = 400_000, 25_000


class KimiBackend:
  """The tokenizer of `tiktoken.model`.

  Attributes:
    special_tokens: ids of all special tokens by name.
    first_ids: empty; only tokenizer_config.json asks for a first token.
  """

  def __init__(self, files: TokenizerFiles, config: JsonObject):
    where = files.where(KIMI_FILE)
    try:
      import tiktoken
    except ImportError:
      raise TokenizerError(
        f'{where}: needs tiktoken: pip install kdtree_jax[kimi]'
      ) from None
    ranks = _ranks(files.data[KIMI_FILE], where)
    self.special_tokens = special_tokens(files, config, ranks)
    self.first_ids: tuple[int, ...] = ()
    try:
      self._encoding = tiktoken.Encoding(
        name='kimi',
        pat_str=KIMI_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=self.special_tokens,
      )
    except Exception as e:  # from Rust: bytes without a rank, and the like
      raise TokenizerError(f'{where}: no tokenizer: {one_line(e)}') from e
    self._size = len(ranks) + KIMI_RESERVED
    self._control = re.compile(f'({one_of(self.special_tokens)})')

  def token_id(self, name: str) -> int | None:
    return self.special_tokens.get(name)

  def encode(self, text: str) -> list[int]:
    try:
      return self._encoding.encode(text, allowed_special='all')
    except ValueError:  # A regular expression ran out of stack.
      return self._joined(self._control.split(text))

  def encode_escaped(self, text: str) -> list[int]:
    """Ids of a text in which placeholders stand for ordinary text."""
    return self._joined(self._control.split(text))

  @functools.cached_property
  def escapes(self) -> SpecialTokenEscapes:
    return SpecialTokenEscapes(self.special_tokens)

  def _joined(self, parts: Sequence[str]) -> list[int]:
    """Ids of parts: texts and, at odd indices, names of special tokens."""
    ids: list[int] = []
    for place, part in enumerate(parts):
      if place % 2:
        ids.append(self.special_tokens[part])
      else:
        ids += self._ordinary(self.escapes.unescape(part))
    return ids

  def _ordinary(self, text: str) -> list[int]:
    """Ids of a text in which names of special tokens are ordinary text."""
    # Not `encode_ordinary`, which panics where `encode` raises.
    plain = functools.partial(self._encoding.encode, disallowed_special=())
    try:
      return plain(text)
    except ValueError:
      return [token for part in map(plain, _short(text)) for token in part]

  def decode(self, ids: Sequence[int]) -> str:
    # A model's vocabulary may be padded beyond the tokenizer's.
    known = [token for token in ids if 0 <= token < self._size]
    return self._encoding.decode_bytes(known).decode('utf-8', 'replace')

  def piece(self, before: int | None, token: int) -> bytes | None:
    del before
    if not 0 <= token < self._size:
      return None
    return self._encoding.decode_single_token_bytes(token)


def _short(text: str) -> Iterator[str]:
  """Parts of a text without long runs of spaces, or of anything else."""
  run = re.compile(rf'\s{{1,{_MAX_RUN}}}|\S{{1,{_MAX_RUN}}}')
  for start in range(0, len(text), _MAX_LETTERS):
    part, begin, end, blank = text[start : start + _MAX_LETTERS], 0, 0, None
    for match in run.finditer(part):
      same = blank == match[0][0].isspace()
      if same:  # A run too long for one match.
        yield part[begin:end]
        begin = end
      end, blank = match.end(), match[0][0].isspace()
    yield part[begin:]


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
  """Ranks by token, from lines of a token in base64 and its rank.

  Raises:
    TokenizerError: an ill-formed line, ranks that are not 0, 1, 2, ..., or a
      byte without a rank.
  """
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(data.split(b'\n'), 1):
    if not line.strip():
      continue
    try:
      token, rank = line.split()
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
      raise TokenizerError(
        f'{where}: line {number} is {show(line, 40)}, not base64 and a rank'
      ) from None
  if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
    raise TokenizerError(f'{where}: ranks are not 0 to {len(ranks) - 1}')
  if any(bytes([byte]) not in ranks for byte in range(256)):
    raise TokenizerError(f'{where}: not every byte has a rank')
  return ranks


def special_tokens(
  files: TokenizerFiles,
  config: JsonObject,
  ranks: Mapping[bytes, int] | None = None,
) -> dict[str, int]:
  """Ids of the special tokens by name; needs no tiktoken.

  Args:
    files: the tokenizer's files.
    config: the parsed tokenizer_config.json.
    ranks: contents of `tiktoken.model`; None: read from `files`.

  Raises:
    TokenizerError: a broken file.
  """
  ranks = ranks or _ranks(files.data[KIMI_FILE], files.where(KIMI_FILE))
  where, first = files.where(CONFIG_FILE), len(ranks)
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
