"""What the target itself says, as text to train a drafter on."""

import numpy as np

from kdtree_jax.errors import UserError
from kdtree_jax.training.streams import as_ids

# A loop is cut when a period of up to LONGEST_PERIOD tokens has been seen so
# often, over at least so many tokens.
LONGEST_PERIOD, TIMES, LEAST = 32, 4, 24


def choose_prompts(
  tokens: np.ndarray, end_of_text: int, count: int, length: int, seed: int
) -> np.ndarray:
  """`[count, length]` pieces of documents of a stream, drawn at random.

  Args:
    tokens: `[T]`, a stream of documents, each ended by `end_of_text`.
    end_of_text: in no prompt.
    count: prompts; they may overlap.
    length: of each.
    seed: of the draw.

  Raises:
    UserError: no document is so long.
  """
  before = np.zeros(len(tokens) + 1, np.int64)
  np.cumsum(tokens == end_of_text, out=before[1:])
  starts = np.flatnonzero(before[length:] == before[: len(before) - length])
  if not len(starts):
    raise UserError(f'no document of the corpus has {length} tokens')
  chosen = np.random.default_rng(seed).choice(starts, count)
  return tokens[chosen[:, None] + np.arange(length)]


def cut_loops(rollouts: np.ndarray) -> list[np.ndarray]:
  """Every row of `[N, T]` up to where it has repeated itself `TIMES`.

  Greedy text of small models ends in loops, which teach nothing new. A row is
  cut where its last max(LEAST, TIMES p) tokens have period p.
  """
  count, length = rollouts.shape
  cuts = np.full(count, length)
  for period in range(1, min(LONGEST_PERIOD, length - 1) + 1):
    same = rollouts[:, period:] == rollouts[:, :-period]
    index = np.arange(same.shape[1], dtype=np.int32)
    # Length of the run of equalities that ends at each token.
    broken = np.maximum.accumulate(
      np.where(same, np.int32(-1), index[None]), axis=1
    )
    run = index[None] - broken
    looped = run >= max(LEAST, TIMES * period) - period
    first = np.where(looped.any(axis=1), looped.argmax(axis=1), length)
    cuts = np.minimum(cuts, first + period + 1)
  return [row[:cut] for row, cut in zip(rollouts, cuts, strict=True)]


def num_added(num_tokens: int, share: float) -> int:
  """At least so many tokens does `mix` add to a corpus."""
  return int(num_tokens * share / (1 - share))


def mix(
  corpus: np.ndarray,
  rollouts: list[np.ndarray],
  share: float,
  end_of_text: int,
  seed: int,
) -> np.ndarray:
  """The corpus and, behind it, rollouts as documents of their own.

  They are repeated, and the last time cut short, until they are `share` of all
  tokens. The stream has the corpus's type.

  Raises:
    UserError: a rollout has an id that this type does not hold.
  """
  if not rollouts or share == 0:
    return corpus
  wanted = num_added(len(corpus), share)
  size = int(np.iinfo(corpus.dtype).max) + 1
  documents = [as_ids(row, size, 'rollouts') for row in rollouts]
  end = np.array([end_of_text], corpus.dtype)
  rng = np.random.default_rng(seed)
  parts, total = [corpus], 0
  while total < wanted:
    for row in rng.permutation(len(documents)):
      part = documents[row]
      if part[-1] != end_of_text:
        part = np.concatenate([part, end])
      parts.append(part)
      total += len(part)
      if total >= wanted:
        break
  return np.concatenate(parts)
