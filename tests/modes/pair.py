"""A tiny pair of models with a tokenizer and a corpus, for several tests."""

import dataclasses
import pathlib

import numpy as np
import tokenizers

from kdtree_jax.io.convert import read_checkpoint, read_drafter
from kdtree_jax.io.kdtr import write_bundle
from kdtree_jax.training.corpus import END_OF_TEXT, MASK
from tests import support

NAME = 'deepseek_v3_trained_drafter'


def write_pair(folder: pathlib.Path) -> None:
  """`target.kdtr`, `drafter.kdtr` and `corpus/`, as training leaves them.

  A letter is a token; what is none of the 62 is no token at all.
  """
  vocab = {chr(ord('A') + i): i for i in range(62)}
  vocab |= {END_OF_TEXT: 62, MASK: 63}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  inner.add_special_tokens([END_OF_TEXT, MASK])
  text = inner.to_str()
  bundle = dataclasses.replace(
    read_checkpoint(support.DATA / NAME),
    tokenizer={'tokenizer.json': text.encode()},
    drafter=None,
    drafter_config=None,
  )
  write_bundle(folder / 'target.kdtr', bundle)
  write_bundle(
    folder / 'drafter.kdtr', read_drafter(support.DATA / NAME / 'dflash')
  )
  corpus = folder / 'corpus'
  corpus.mkdir()
  (corpus / 'tokenizer.json').write_text(text)
  (corpus / 'manifest.json').write_text('{}')
  rng = np.random.default_rng(0)
  documents = [rng.integers(2, 60, n) for n in (40, 17, 9, 64, 30)]
  tokens = np.concatenate([[*document, 62] for document in documents])
  np.savez(corpus / 'test.npz', tokens=tokens.astype(np.uint16))
