"""The n-gram model is a distribution, and the one of its formula."""

import math

import numpy as np
import pytest
import tokenizers

from kdtree_jax.errors import UserError
from kdtree_jax.training import streams
from kdtree_jax.training.corpus import END_OF_TEXT, MASK
from tests.peers.ngram import NGram, longest_order, main

VOCAB, END = 7, 6


def stream(count, seed=0):
  rng = np.random.default_rng(seed)
  # A chain with a memory of two, so that orders differ.
  tokens = [0, 1]
  for _ in range(count):
    noise = rng.random()
    likely = (tokens[-1] * 2 + tokens[-2]) % VOCAB
    tokens.append(likely if noise < 0.6 else int(rng.integers(VOCAB)))
  return np.array(tokens, np.uint16)


@pytest.mark.parametrize('order', (1, 2, 3, 5))
def test_probabilities_sum_to_one(order):
  model = NGram(stream(400), VOCAB, END, order)
  contexts = [
    (0,),
    (3, 5),
    (END, 2, 1),
    (1, 2, 4, 4, 4),
    (5, 5, 5, 5, 5, 5),
    (2, END),
  ]
  for context in contexts:
    total = sum(
      math.exp(
        model.log_probabilities(np.array([*context, word], np.uint16))[-1]
      )
      for word in range(VOCAB)
    )
    assert total == pytest.approx(1, abs=1e-12), context


def test_bigrams_by_hand():
  """a b a b a c, end: counts, discounts and continuations on paper."""
  a, b, c, end = 0, 1, 2, 3
  model = NGram(np.array([a, b, a, b, a, c, end]), 4, end, order=2)
  # Bigrams: ab 2, ba 2, ac 1, c-end 1. d2 = 2 / (2 + 2 * 2) = 1/3.
  # Left neighbours: a 1, b 1, c 1, end 1; d1 = 4 / 4, cut to 0.99.
  uniform, d1, d2 = 1 / 4, 0.99, 1 / 3
  unigram = (1 - d1) / 4 + d1 * 4 / 4 * uniform
  wanted = (2 - d2) / 3 + d2 * 2 / 3 * unigram
  got = np.exp(model.log_probabilities(np.array([a, b])))
  assert got == pytest.approx([unigram, wanted], abs=1e-12)
  # After the end nothing is known of the next document.
  got = np.exp(model.log_probabilities(np.array([end, b])))
  assert got[1] == pytest.approx(unigram, abs=1e-12)


def test_longer_contexts_help_and_bytes_are_counted():
  train, test = stream(20000, 1), stream(2000, 2)
  sizes = np.array([1, 2, 3, 1, 1, 2, 0], np.int32)
  bits = [
    NGram(train, VOCAB, END, n).bits_per_byte(test, sizes) for n in (1, 3)
  ]
  assert bits[1] < 0.9 * bits[0]
  model = NGram(train, VOCAB, END, 3)
  counted = np.flatnonzero(test[:-1] != END) + 1
  nats = -model.log_probabilities(test)[counted].sum()
  wanted = nats / math.log(2) / sizes[test[counted]].sum()
  assert bits[1] == pytest.approx(wanted)


def test_a_vocabulary_that_does_not_fit():
  with pytest.raises(UserError, match='do not fit 64 bits'):
    NGram(np.zeros(9, np.uint16), 10000, 0, 5)


def test_many_ids():
  """Ids that need 32 bits, with as long n-grams as their width allows."""
  large = 70_000
  assert [longest_order(n, 5) for n in (4096, 8192, large)] == [5, 4, 3]
  tokens = np.array([7, 69999, 65536, 7, 69999, 65536, 0], np.uint32)
  model = NGram(tokens, large, 0, longest_order(large, 5))
  logs = model.log_probabilities(tokens)
  assert logs[4] > -1.5 > logs[0]
  with pytest.raises(UserError, match='token 70000 is outside'):
    NGram(np.array([large]), large, 0, 1)


def test_the_figure_of_a_corpus(tmp_path, capsys):
  words = ['a', 'bc', 'def', 'g', 'h', 'ij', END_OF_TEXT, MASK]
  vocab = {word: i for i, word in enumerate(words)}
  model = tokenizers.models.WordLevel(vocab, unk_token=MASK)
  tokenizers.Tokenizer(model).save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'manifest.json').write_text('{}')
  train, test = stream(3000, 1), stream(300, 2)
  for split, tokens in (('train', train), ('test', test)):
    streams.write_arrays(tmp_path / f'{split}.npz', {'tokens': tokens})
  main(str(tmp_path))
  sizes = np.array([1, 2, 3, 1, 1, 2, 0, 0], np.int32)
  wanted = NGram(train, 8, END, 5).bits_per_byte(test, sizes)
  printed = capsys.readouterr().out
  assert printed == f'5-gram with backoff: {wanted:.4f} bits per byte\n'
