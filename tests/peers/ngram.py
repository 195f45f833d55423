"""An n-gram model with backoff: what a target must clearly beat.

Interpolated Kneser-Ney smoothing with one discount an order (Chen and Goodman
1999, An empirical study of smoothing techniques for language modeling, sec.
2.7). With h' the context h without its first token,

  P(w | h) = max(c(hw) - d, 0) / c(h) + d N(h) / c(h) P(w | h'),

where c counts occurrences in the highest order and different left neighbours
in the lower ones, N(h) is the number of different w after h, and below the
unigrams the distribution is uniform. d = n1 / (n1 + 2 n2), from the numbers of
n-grams that occur once and twice. NumPy only: an n-gram is one integer. Prints
the bits per byte of a corpus's test split, a figure in the README:

    python tests/peers/ngram.py folder
"""

import dataclasses
import math
import sys
from typing import Any

import numpy as np

from kdtree_jax.errors import UserError
from kdtree_jax.training.corpus import read_corpus
from kdtree_jax.training.streams import as_ids, check_length

ORDER = 5


@dataclasses.dataclass(frozen=True, eq=False)
class _Order:
  """The n-grams of one order.

  Attributes:
    grams: `[G]` uint64, sorted; the last token in the lowest bits.
    counts: `[G]` int32, c of the formula.
    contexts: `[H]` uint64, sorted.
    totals: `[H]` int64, c(h).
    kinds: `[H]` int64, N(h).
    discount: d.
  """

  grams: np.ndarray
  counts: np.ndarray
  contexts: np.ndarray
  totals: np.ndarray
  kinds: np.ndarray
  discount: float


class NGram:
  """Counts of a token stream, up to an order."""

  def __init__(
    self, tokens: np.ndarray, vocab_size: int, end_of_text: int, order: int = 5
  ):
    """Counts; about 6 seconds and 0.5 GB for every ten million tokens.

    Args:
      tokens: `[T]` unsigned; documents end with `end_of_text`, and no n-gram
        reaches from one into the next.
      vocab_size: ids are below it.
      end_of_text: the id.
      order: n.

    Raises:
      UserError: an n-gram of this vocabulary does not fit 64 bits, there
        are too many tokens, or one is outside the vocabulary.
    """
    self.vocab_size, self._end, self.order = vocab_size, end_of_text, order
    self._bits = _bits(vocab_size)
    if order * self._bits > 64:
      raise UserError(
        f'{order}-grams of a vocabulary of {vocab_size} do not fit 64 bits'
      )
    self._orders: list[_Order] = []
    # Counts are int32.
    check_length(len(tokens), 'n-grams')
    tokens = as_ids(tokens, vocab_size, 'n-grams')
    keys, ends = self._keys(tokens, order), self._reach(tokens)
    raw = keys[ends >= order - 1]
    del keys
    grams, counts = _unique(raw)
    del raw
    for n in range(order, 0, -1):
      self._orders.insert(0, self._order(grams, counts))
      if n > 1:
        # Left neighbours differ, so each longer n-gram counts once.
        mask = np.uint64((1 << (self._bits * (n - 1))) - 1)
        grams, counts = _unique(grams & mask)

  def log_probabilities(self, tokens: np.ndarray) -> np.ndarray:
    """`[T]` float64 natural logarithms, each token after those before it.

    A token's context ends at the beginning of its document.
    """
    tokens = as_ids(tokens, self.vocab_size, 'n-grams')
    reach = self._reach(tokens)
    found = np.full(len(tokens), 1.0 / self.vocab_size)
    for n, order in enumerate(self._orders, 1):
      keys = self._keys(tokens, n)
      count = _look_up(order.grams, order.counts, keys)
      context = keys >> np.uint64(self._bits)
      total = _look_up(order.contexts, order.totals, context)
      kinds = _look_up(order.contexts, order.kinds, context)
      known = (total > 0) & (reach >= n - 1)
      d, total = order.discount, np.maximum(total, 1)
      mixed = (np.maximum(count - d, 0.0) + d * kinds * found) / total
      found = np.where(known, mixed, found)
    return np.log(found)

  def bits_per_byte(self, tokens: np.ndarray, token_bytes: np.ndarray) -> float:
    """Of a stream, its documents' first tokens left out, as in training."""
    logs = self.log_probabilities(tokens)
    counted = np.zeros(len(tokens), bool)
    counted[1:] = tokens[:-1] != self._end
    size = int(token_bytes[tokens[counted]].sum())
    return float(-logs[counted].sum() / math.log(2) / max(size, 1))

  def _keys(self, tokens: np.ndarray, n: int) -> np.ndarray:
    """`[T]` uint64: the last n tokens up to each position, packed."""
    keys = np.zeros(len(tokens), np.uint64)
    for back in range(min(n, len(tokens))):
      shift = np.uint64(self._bits * back)
      part = tokens[: len(tokens) - back].astype(np.uint64) << shift
      keys[back:] |= part
    return keys

  def _reach(self, tokens: np.ndarray) -> np.ndarray:
    """`[T]`: tokens of the same document before each."""
    index = np.arange(len(tokens))
    begins = np.ones(len(tokens), bool)
    begins[1:] = tokens[:-1] == self._end
    return index - np.maximum.accumulate(np.where(begins, index, 0))

  def _order(self, grams: np.ndarray, counts: np.ndarray) -> _Order:
    of_grams = grams >> np.uint64(self._bits)
    first = np.flatnonzero(np.r_[True, of_grams[1:] != of_grams[:-1]])
    first = first[: len(grams)]
    once, twice = (int((counts == n).sum()) for n in (1, 2))
    # Without singletons the estimate would be 0, and unseen words impossible.
    discount = once / (once + 2 * twice) if once else 0.5
    return _Order(
      grams,
      counts,
      contexts=of_grams[first],
      totals=np.add.reduceat(counts, first, dtype=np.int64),
      kinds=np.diff(np.r_[first, len(grams)]),
      discount=min(discount, 0.99),
    )


def longest_order(vocab_size: int, wanted: int) -> int:
  """The order nearest to the wanted one whose n-grams fit 64 bits."""
  return min(wanted, 64 // _bits(vocab_size))


def _bits(vocab_size: int) -> int:
  return max(1, (vocab_size - 1).bit_length())


def _unique(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Sorted different keys and how often each occurs, int32."""
  keys = np.sort(keys)
  first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
  counts = np.diff(np.r_[first, len(keys)]).astype(np.int32)
  return keys[first], counts


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: Any) -> np.ndarray:
  """Values of `wanted` keys, 0 where there is none."""
  place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[place] == wanted, values[place], 0)


def main(folder: str) -> None:
  """Counts the training split and prints the bits per byte of the test split.

  Args:
    folder: a corpus.

  Raises:
    UserError: no corpus, or a damaged one.
  """
  corpus = read_corpus(folder)
  order = longest_order(corpus.vocab_size, ORDER)
  train, test = corpus.tokens('train'), corpus.tokens('test')
  model = NGram(train, corpus.vocab_size, corpus.end_of_text, order)
  bits = model.bits_per_byte(test, corpus.token_bytes)
  print(f'{order}-gram with backoff: {bits:.4f} bits per byte')


if __name__ == '__main__':
  main(*sys.argv[1:])
