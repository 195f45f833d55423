"""Reads a corpus: a folder that `--mode=make_corpus` wrote.

It holds `tokenizer.json`; `train.npz`, `validation.npz` and `test.npz`, each
with one array `tokens`, uint16 or, for more than 65536 ids, uint32, in which
every document ends with the end-of-text token; and `manifest.json`, which says
where each document is from and, since they are written, what tokenizer and
tokens belong to it, by their digests.
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import sha256, short, tokenizer_digest
from kdtree_jax.io.files import one_line, parse_json
from kdtree_jax.training.streams import (
  as_ids,
  check_stream,
  id_dtype,
  read_arrays,
)

SPLITS = ('train', 'validation', 'test')
MANIFEST, TOKENIZER = 'manifest.json', 'tokenizer.json'
END_OF_TEXT = '<|kdtree_end_of_text|>'
# For drafters: no text has it, and a target never learns to say it.
MASK = '<|kdtree_mask|>'


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """A corpus on disk; its splits are read when they are asked for.

  Attributes:
    folder: where it is.
    manifest: the contents of `manifest.json`.
    vocab_size: one more than the tokenizer's largest id.
    end_of_text: id of the token that ends every document.
    mask: id of the token that stands for "unknown" in a drafter's block.
    token_bytes: `[vocab_size]` int32, bytes of text that a token stands for;
      0 for the two special ones. Bits per byte need it.
    tokenizer_digest: see `digests.tokenizer_digest`; None: not known.
  """

  folder: pathlib.Path
  manifest: dict[str, Any]
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
    """`[T]` ids of `train`, `validation` or `test`, read once.

    See `streams.id_dtype` for their dtype.

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
      raise UserError(f'{path}: holds ids that the tokenizer has not')
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

  def identity(self, *splits: str) -> dict[str, Any]:
    """What makes these splits of two corpora the same, as JSON."""
    return {
      'tokenizer': self.tokenizer_digest,
      'manifest': sha256(self.manifest),
      'tokens': {split: tokens_digest(self.tokens(split)) for split in splits},
    }

  def check_tokenizer(self, files: Mapping[str, bytes], name: str) -> None:
    """Refuses a target whose ids mean other text than the corpus's.

    Args:
      files: of the target's tokenizer; without any nothing can be told.
      name: of the target.

    Raises:
      UserError: names both.
    """
    theirs = tokenizer_digest(files, name)
    if None not in (theirs, self.tokenizer_digest):
      if theirs != self.tokenizer_digest:
        raise UserError(
          f'--corpus={self.folder}: its tokenizer '
          f'({short(self.tokenizer_digest)}) is not that of the target {name} '
          f'({short(theirs)}); give the corpus that the target was trained on, '
          'or make one in its tokens'
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


def read_corpus(folder: os.PathLike | str) -> Corpus:
  """Opens a corpus.

  Raises:
    UserError: no such folder, it is no corpus, or its files are of two.
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
  except Exception as e:  # tokenizers raises nothing more special
    raise UserError(f'--corpus={folder}: is damaged: {one_line(e)}') from e
  if not isinstance(manifest, dict):
    raise UserError(f'--corpus={folder}: {MANIFEST} is no JSON object')
  digest = tokenizer_digest({TOKENIZER: data}, f'--corpus={folder}')
  if manifest.get('tokenizer') not in (None, digest):
    raise UserError(
      f'--corpus={folder}: is damaged: {TOKENIZER} is not the one that '
      f'{MANIFEST} names; make the corpus again'
    )
  specials = [tokenizer.token_to_id(name) for name in (END_OF_TEXT, MASK)]
  if None in specials:
    raise UserError(
      f'--corpus={folder}: its tokenizer lacks {END_OF_TEXT} or {MASK}'
    )
  vocabulary = tokenizer.get_vocab()
  # A byte-level vocabulary spells every byte as one character.
  # Ids may have gaps.
  vocab_size = max(vocabulary.values()) + 1
  token_bytes = np.zeros(vocab_size, np.int32)
  for text, token in vocabulary.items():
    token_bytes[token] = 0 if token in specials else len(text)
  return Corpus(folder, manifest, vocab_size, *specials, token_bytes, digest)


def tokens_digest(tokens: np.ndarray) -> str:
  """The SHA-256 of a stream's ids, whatever their type was in a file."""
  digest = hashlib.sha256(np.ascontiguousarray(tokens))
  return digest.hexdigest()
