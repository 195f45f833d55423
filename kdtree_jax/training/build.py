"""Building of a corpus: tokenizer, token streams and manifest of documents."""

import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import tokenizer_digest
from kdtree_jax.io.files import JsonObject, write_atomically
from kdtree_jax.training.corpus import (
  END_OF_TEXT,
  MANIFEST,
  MASK,
  SPLITS,
  TOKENIZER,
  tokens_digest,
)
from kdtree_jax.training.sources import Document, Skipped, read_documents
from kdtree_jax.training.streams import as_ids, check_stream, write_arrays

# How text is split before merging: a line break with the indentation after it
# is one piece, a word may include the space, dot or underscore before it,
# numbers are split into three digits, and other characters form runs.
PATTERN = (
  r'\s*\n[ \t]*'
  r'|[ ._]?\p{L}+'
  r'|\p{N}{1,3}'
  r'| ?[^\s\p{L}\p{N}]+'
  r'|\s+(?!\S)|\s'
)
# The part of the train split that the tokenizer is trained on: more hardly
# changes 4096 merges and takes minutes.
TOKENIZER_BYTES = 60_000_000
MIN_VOCAB, MAX_VOCAB = 256 + 2, 1 << 20
_AT_ONCE = 512


def build_corpus(
  folders: Sequence[str],
  output: pathlib.Path,
  vocab_size: int,
  max_tokens: int | None = None,
) -> JsonObject:
  """Writes a corpus that `corpus.read_corpus` reads.

  Args:
    folders: see `sources.read_documents`.
    output: folder of the corpus; made if it is missing.
    vocab_size: size of the vocabulary, the two special tokens included.
    max_tokens: the most tokens of the train split; documents are then taken in
      the order of their digests, which is random in effect.

  Returns:
    The manifest.

  Raises:
    UserError: bad sizes, a missing folder, or a split without documents.
  """
  if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
    raise UserError(
      f'--vocab_size={vocab_size} is not in {MIN_VOCAB}..{MAX_VOCAB}: every '
      'byte has a token, and no more can be drafted from'
    )
  if max_tokens is not None and max_tokens < 1:
    raise UserError(f'--max_tokens={max_tokens} is below 1')
  skipped = Skipped({}, collections.Counter())
  documents = list(read_documents(folders, skipped))
  documents.sort(key=lambda document: document.digest)
  for split in SPLITS:
    if not any(document.split == split for document in documents):
      raise UserError(
        f'--corpus_sources: {len(documents)} documents leave the split '
        f'{split} empty; name more folders'
      )
  train = [d.text for d in documents if d.split == 'train']
  sample = _up_to(train, TOKENIZER_BYTES)
  tokenizer = train_tokenizer(sample, vocab_size)
  tokenizer_json = tokenizer.to_str().encode()
  _make_folder(output)
  manifest: JsonObject = {
    'vocab_size': tokenizer.get_vocab_size(),
    'tokenizer': tokenizer_digest({TOKENIZER: tokenizer_json}, TOKENIZER),
    'tokenizer_bytes': sum(len(text.encode()) for text in sample),
    'splits': {},
    'skipped_packages': dict(sorted(skipped.packages.items())),
    'skipped_files': dict(sorted(skipped.files.items())),
    'files': [],
  }
  for split in SPLITS:
    chosen = [d for d in documents if d.split == split]
    tokens, files = encode_documents(tokenizer, chosen)
    if split == 'train' and max_tokens is not None:
      tokens, files = _cut(tokens, files, max_tokens)
    check_stream(tokens, split)
    write_arrays(output / f'{split}.npz', {'tokens': tokens})
    manifest['splits'][split] = {
      'documents': len(files),
      'bytes': sum(file['bytes'] for file in files),
      'tokens': len(tokens),
      'sha256': tokens_digest(tokens),
    }
    manifest['files'] += files
  write_atomically(output / TOKENIZER, [tokenizer_json])
  text = json.dumps(manifest, indent=0, ensure_ascii=True)
  write_atomically(output / MANIFEST, [text.encode()])
  return manifest


def train_tokenizer(
  texts: Sequence[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """A byte-level BPE whose ids 0 and 1 are the special tokens.

  It can encode every text, and decoding restores it.
  """
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_OF_TEXT, MASK],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def encode_documents(
  tokenizer: tokenizers.Tokenizer, documents: Sequence[Document]
) -> tuple[np.ndarray, list[JsonObject]]:
  """Documents as one stream of ids, and their manifest entries."""
  end = tokenizer.token_to_id(END_OF_TEXT)
  size = max(tokenizer.get_vocab().values()) + 1
  parts: list[np.ndarray] = []
  files = []
  for batch in itertools.batched(documents, _AT_ONCE):
    encoded = tokenizer.encode_batch_fast([d.text for d in batch])
    for document, found in zip(batch, encoded, strict=True):
      ids = as_ids(np.array([*found.ids, end]), size, document.path)
      parts.append(ids)
      entry = dataclasses.asdict(document)
      length = len(entry.pop('text').encode())
      files.append({**entry, 'bytes': length, 'tokens': len(ids)})
  return np.concatenate(parts), files


def _up_to(texts: Sequence[str], max_size: int) -> list[str]:
  """The first texts that together have about `max_size` characters."""
  chosen, size = [], 0
  for text in texts:
    if size >= max_size:
      break
    chosen.append(text)
    size += len(text)
  return chosen


def _cut(
  tokens: np.ndarray, files: list[JsonObject], max_tokens: int
) -> tuple[np.ndarray, list[JsonObject]]:
  """The first documents of at most `max_tokens` tokens, at least one."""
  ends = np.cumsum([file['tokens'] for file in files])
  count = max(1, int(np.searchsorted(ends, max_tokens, side='right')))
  return tokens[: ends[count - 1]], files[:count]


def _make_folder(folder: pathlib.Path) -> None:
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise UserError(
      f'--output={folder}: cannot be made: {e.strerror or e}'
    ) from e
