"""Reading of a corpus: a folder that `--mode=make_corpus` wrote.

It holds `tokenizer.json`; `train.npz`, `validation.npz` and `test.npz`, each
with one array `tokens`, uint16 or, for more than 65536 ids, uint32, in which
every document ends with the end-of-text token; and `manifest.json`, which lists
the documents with their sources and, in newer corpora, digests of tokenizer and
tokens.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping

import numpy as np
import tokenizers

from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import sha256, short, tokenizer_digest
from kdtree_jax.io.files import JsonObject, StrPath, one_line, parse_json
from kdtree_jax.training.streams import (
  as_ids,
  check_stream,
  id_dtype,
  read_arrays,
)

SPLITS = ('train', 'validation', 'test')
MANIFEST, TOKENIZER = 'manifest.json', 'tokenizer.json'
END_OF_TEXT = '<|kdtree_end_of_text|>'
# The mask token of drafters: it is in no text, so no target generates it.
MASK = '<|kdtree_mask|>'


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """A corpus on disk, whose splits are read at the first use.

  Attributes:
    folder: the corpus's folder.
    manifest: the contents of `manifest.json`.
    vocab_size: one more than the tokenizer's largest id.
    end_of_text: id of the token that ends every document.
    mask: id of the mask token in a drafter's block.
    token_bytes: `[vocab_size]` int32, bytes of text of each token, 0 for the
      two special ones; needed for bits per byte.
    tokenizer_digest: see `digests.tokenizer_digest`; None: unknown.
  """

  folder: pathlib.Path
  manifest: JsonObject
  vocab_size: int
  end_of_text: int
  mask: int
  token_bytes: np.ndarray
  tokenizer_digest: str | None = None
  _read: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def tokenizer_path(self) -> pathlib.Path:
    return self.folder / TOKENIZER

  def tokens(self, split: str) -> np.ndarray:
    """The ids `[stream]` of a split, in the dtype of `streams.id_dtype`.

    Raises:
      UserError: the file is missing, damaged or of another corpus.
    """
    if split not in self._read:
      self._read[split] = self._load(split)
    return self._read[split]

  def _load(self, split: str) -> np.ndarray:
    path = self.folder / f'{split}.npz'
    tokens = read_arrays(path).get('tokens', np.zeros(0))
    check_stream(tokens, str(path))
    if not tokens.size:
      raise UserError(f'{path}: holds no token')
    wanted = id_dtype(self.vocab_size)
    if tokens.itemsize < wanted.itemsize:
      raise UserError(
        f'{path}: is {tokens.dtype}, but the tokenizer has {self.vocab_size} '
        'ids: larger ones were wrapped; make the corpus again'
      )
    if tokens.max() >= self.vocab_size:
      raise UserError(f'{path}: holds ids that the tokenizer does not have')
    tokens = as_ids(tokens, self.vocab_size, str(path))
    splits = self.manifest.get('splits')
    entry = splits.get(split) if isinstance(splits, dict) else None
    stated = entry.get('sha256') if isinstance(entry, dict) else None
    if stated not in (None, tokens_digest(tokens)):
      raise UserError(
        f'{path}: is not what {MANIFEST} beside it describes; make the corpus '
        'again'
      )
    return tokens

  def identity(self, *splits: str) -> JsonObject:
    """Digests by which these splits of two corpora are compared, as JSON."""
    return {
      'tokenizer': self.tokenizer_digest,
      'manifest': sha256(self.manifest),
      'tokens': {split: tokens_digest(self.tokens(split)) for split in splits},
    }

  def check_tokenizer(self, files: Mapping[str, bytes], name: str) -> None:
    """Refuses a target with another tokenizer.

    Args:
      files: the target's tokenizer files; without any all corpora are accepted.
      name: the target's name.

    Raises:
      UserError: names both.
    """
    ours, theirs = self.tokenizer_digest, tokenizer_digest(files, name)
    if ours is not None and theirs is not None and ours != theirs:
      raise UserError(
        f'--corpus={self.folder}: its tokenizer ({short(ours)}) is not that of '
        f'the target {name} ({short(theirs)}); give the corpus that the target '
        'was trained on, or make one in its tokens'
      )

  def check_vocabulary(self, vocab_size: int) -> None:
    """Refuses a target with fewer ids than the corpus.

    Raises:
      UserError: names both sizes.
    """
    if self.vocab_size > vocab_size:
      raise UserError(
        f'--corpus={self.folder}: its tokenizer has {self.vocab_size} '
        f'tokens, the target {vocab_size}'
      )

  def documents(self, split: str) -> list[np.ndarray]:
    """The documents of a split, without their end-of-text token."""
    tokens = self.tokens(split)
    ends = np.flatnonzero(tokens == self.end_of_text)
    return [part[:-1] for part in np.split(tokens, ends + 1) if part.size]


def read_corpus(folder: StrPath) -> Corpus:
  """Opens a corpus.

  Raises:
    UserError: the folder is missing, is no corpus, or mixes two.
  """
  folder = pathlib.Path(folder)
  try:
    manifest = parse_json((folder / MANIFEST).read_bytes())
    data = (folder / TOKENIZER).read_bytes()
    tokenizer = tokenizers.Tokenizer.from_buffer(data)
  except OSError as e:
    raise UserError(
      f'--corpus={folder}: {e.strerror or e}: {MANIFEST}; '
      '--mode=make_corpus makes a corpus'
    ) from e
  except Exception as e:  # tokenizers raises no narrower type.
    raise UserError(f'--corpus={folder}: is damaged: {one_line(e)}') from e
  if not isinstance(manifest, dict):
    raise UserError(f'--corpus={folder}: {MANIFEST} is no JSON object')
  digest = tokenizer_digest({TOKENIZER: data}, f'--corpus={folder}')
  if manifest.get('tokenizer') not in (None, digest):
    raise UserError(
      f'--corpus={folder}: is damaged: {TOKENIZER} is not the one that '
      f'{MANIFEST} names; make the corpus again'
    )
  end, mask = map(tokenizer.token_to_id, (END_OF_TEXT, MASK))
  if end is None or mask is None:
    raise UserError(
      f'--corpus={folder}: its tokenizer lacks {END_OF_TEXT} or {MASK}'
    )
  vocabulary = tokenizer.get_vocab()
  # Ids may have gaps.
  vocab_size = max(vocabulary.values()) + 1
  token_bytes = np.zeros(vocab_size, np.int32)
  # A byte-level vocabulary writes every byte as one character.
  for text, token in vocabulary.items():
    token_bytes[token] = 0 if token in (end, mask) else len(text)
  return Corpus(folder, manifest, vocab_size, end, mask, token_bytes, digest)


def tokens_digest(tokens: np.ndarray) -> str:
  """The SHA-256 of a stream's ids."""
  return hashlib.sha256(np.ascontiguousarray(tokens)).hexdigest()
