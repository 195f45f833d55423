"""Reads a corpus: a folder that `--mode=make_corpus` wrote.

It holds `tokenizer.json`; `train.npz`, `validation.npz` and `test.npz`, each
with one array `tokens`, uint16, in which every document ends with the
end-of-text token; and `manifest.json`, which says where each document is from.
"""

import dataclasses
import os
import pathlib
import zipfile
from typing import Any

import numpy as np
import tokenizers

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import one_line, parse_json

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
    vocab_size: ids that the tokenizer has.
    end_of_text: id of the token that ends every document.
    mask: id of the token that stands for "unknown" in a drafter's block.
    token_bytes: `[vocab_size]` int32, bytes of text that a token stands for;
      0 for the two special ones. Bits per byte need it.
  """

  folder: pathlib.Path
  manifest: dict[str, Any]
  vocab_size: int
  end_of_text: int
  mask: int
  token_bytes: np.ndarray
  _read: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def tokenizer_path(self) -> pathlib.Path:
    return self.folder / TOKENIZER

  def tokens(self, split: str) -> np.ndarray:
    """`[T]` uint16 ids of `train`, `validation` or `test`; read once.

    Raises:
      UserError: the file is missing or damaged.
    """
    if split not in self._read:
      self._read[split] = self._load(split)
    return self._read[split]

  def _load(self, split: str) -> np.ndarray:
    path = self.folder / f'{split}.npz'
    try:
      with np.load(path) as arrays:
        tokens = arrays['tokens']
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
      raise UserError(f'{path}: cannot be read: {one_line(e)}') from e
    if tokens.ndim != 1 or tokens.dtype != np.uint16 or not tokens.size:
      raise UserError(f'{path}: is no row of uint16 tokens')
    if tokens.max() >= self.vocab_size:
      raise UserError(f'{path}: holds ids that the tokenizer has not')
    return tokens

  def documents(self, split: str) -> list[np.ndarray]:
    """The documents of a split, without their end-of-text token."""
    tokens = self.tokens(split)
    ends = np.flatnonzero(tokens == self.end_of_text)
    return [part[:-1] for part in np.split(tokens, ends + 1) if part.size]


def read_corpus(folder: os.PathLike | str) -> Corpus:
  """Opens a corpus.

  Raises:
    UserError: no such folder, or it is no corpus.
  """
  folder = pathlib.Path(folder)
  try:
    manifest = parse_json((folder / MANIFEST).read_bytes())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
  except OSError as e:
    raise UserError(
      f'--corpus={folder}: {e.strerror or e}: {MANIFEST}; '
      '--mode=make_corpus makes a corpus'
    ) from e
  except Exception as e:  # tokenizers raises nothing more special
    raise UserError(f'--corpus={folder}: is damaged: {one_line(e)}') from e
  specials = [tokenizer.token_to_id(name) for name in (END_OF_TEXT, MASK)]
  if None in specials:
    raise UserError(
      f'--corpus={folder}: its tokenizer lacks {END_OF_TEXT} or {MASK}'
    )
  vocabulary = tokenizer.get_vocab()
  # A byte-level vocabulary spells every byte as one character.
  token_bytes = np.zeros(len(vocabulary), np.int32)
  for text, token in vocabulary.items():
    token_bytes[token] = 0 if token in specials else len(text)
  return Corpus(folder, manifest, len(vocabulary), *specials, token_bytes)
