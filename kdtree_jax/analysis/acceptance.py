"""Statistics of acceptance: means with intervals, by depth, rank and node.

An *acceptance length* is the number of tokens that one target forward commits,
the root included. Means are over rounds. Intervals are bootstrapped over
prompts, because rounds of one prompt resemble one another.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

# Upper ends of the bins of path probabilities, finer where most nodes of a
# large tree are.
PROBABILITIES = (
  *(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
  1.0,
)
# Sibling ranks that are counted; the last one includes all higher ranks.
RANKS = 8
RESAMPLES = 2000
# Text is a loop if it repeats itself so often, over at least so many tokens.
LOOP_REPEATS, LOOP_TOKENS = 3, 16


@dataclasses.dataclass(frozen=True)
class Interval:
  """A mean and its 95% bootstrap interval."""

  mean: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class NodeCounts:
  """Counts of the draft nodes of some trees.

  Attributes:
    nodes: nodes by bin of `PROBABILITIES`.
    predicted: sum of the drafter's probabilities of their paths, by bin.
    accepted: accepted nodes by bin.
    rank_offered: nodes whose parent was accepted, by sibling rank.
    rank_accepted: accepted nodes by sibling rank.
  """

  nodes: list[int]
  predicted: list[float]
  accepted: list[int]
  rank_offered: list[int]
  rank_accepted: list[int]


def sibling_ranks(parents: ArrayLike) -> np.ndarray:
  """The number of siblings before each node `[N]`.

  Siblings are in the order of their probability, so this is the rank of a
  node's token in the drafter's distribution.
  """
  above = np.asarray(parents)
  order = np.argsort(above, kind='stable')
  grouped = above[order]
  starts = np.searchsorted(grouped, grouped)
  ranks = np.empty_like(order)
  ranks[order] = np.arange(len(above)) - starts
  return ranks


def count_nodes(
  trees: Sequence[tuple[Sequence[int], Sequence[float], Sequence[int]]],
) -> NodeCounts:
  """Counts over the trees of one run.

  Args:
    trees: parents, scores (sums of log q) and accepted indices of each tree,
      all with the root, node 0.
  """
  nodes = np.zeros(len(PROBABILITIES), np.int64)
  hits, predicted = nodes.copy(), nodes.astype(np.float64)
  offered = np.zeros(RANKS, np.int64)
  taken = offered.copy()
  for parents, scores, path in trees:
    above = np.asarray(parents)
    accepted = np.zeros(len(above), np.bool_)
    accepted[list(path)] = True
    ranks = np.minimum(sibling_ranks(above), RANKS - 1)[1:]
    probability = np.exp(np.asarray(scores, np.float64)[1:])
    at = np.searchsorted(PROBABILITIES[:-1], probability)
    hit, had = accepted[1:], accepted[above[1:]]
    nodes += np.bincount(at, minlength=len(nodes))
    predicted += np.bincount(at, probability, len(nodes))
    hits += np.bincount(at[hit], minlength=len(nodes))
    offered += np.bincount(ranks[had], minlength=RANKS)
    taken += np.bincount(ranks[hit], minlength=RANKS)
  return NodeCounts(
    nodes.tolist(),
    predicted.round(6).tolist(),
    hits.tolist(),
    offered.tolist(),
    taken.tolist(),
  )


def add_counts(counts: Sequence[NodeCounts]) -> NodeCounts:
  """The counts of several runs together."""
  names = [field.name for field in dataclasses.fields(NodeCounts)]
  return NodeCounts(
    *(
      np.sum([getattr(one, name) for one in counts], axis=0).tolist()
      for name in names
    )
  )


def loop_start(tokens: Sequence[int]) -> int | None:
  """The first index at which a text repeats itself, or None.

  From that index on the text equals the text p tokens earlier, for some period
  p, until the period has occurred at least `LOOP_REPEATS` times, over at least
  `LOOP_TOKENS` tokens. Its first occurrence is before that index.
  """
  text = np.asarray(tokens)
  best = None
  for period in range(1, len(text) // LOOP_REPEATS + 1):
    same = text[period:] == text[:-period]
    # Lengths of the runs of repeated tokens, by where they begin.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same, [0]])))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
      stretch = end - begin + period
      if stretch >= max(LOOP_REPEATS * period, LOOP_TOKENS):
        start = int(begin) + period
        best = start if best is None else min(best, start)
        break
  return best


def rounds_before(
  acceptance_lengths: Sequence[int], cut: int | None
) -> list[int]:
  """The rounds that begin before output token `cut`; None: all.

  Their ends do not matter, because long rounds cross a border more often than
  short ones.
  """
  lengths = list(acceptance_lengths)
  if cut is None:
    return lengths
  begins = np.cumsum([0, *lengths])[:-1]
  return [length for length, b in zip(lengths, begins, strict=True) if b < cut]


def mean_interval(
  runs: Sequence[Sequence[int]], seed: int = 0
) -> Interval | None:
  """Mean acceptance length, with an interval over prompts.

  Args:
    runs: acceptance lengths of each prompt.
    seed: seed of the resampling.

  Returns:
    None if there is no round.
  """
  tokens, rounds, chosen = _resampled(runs, seed)
  if not rounds.sum():
    return None
  return _interval(
    tokens.sum() / rounds.sum(), _ratio(tokens[chosen], rounds[chosen])
  )


def ratio_interval(
  runs: Sequence[Sequence[int]], base: Sequence[Sequence[int]], seed: int = 0
) -> Interval | None:
  """Mean of `runs` over mean of `base`, for the same prompts in order."""
  tokens, rounds, chosen = _resampled(runs, seed)
  base_tokens, base_rounds, _ = _resampled(base, seed)
  if not rounds.sum() or not base_rounds.sum():
    return None
  mean = tokens.sum() / rounds.sum() * base_rounds.sum() / base_tokens.sum()
  spread = _ratio(tokens[chosen], rounds[chosen]) / _ratio(
    base_tokens[chosen], base_rounds[chosen]
  )
  return _interval(mean, spread)


def _resampled(
  runs: Sequence[Sequence[int]], seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Tokens and rounds by prompt, and prompts `[RESAMPLES, P]` to resample."""
  tokens = np.array([sum(run) for run in runs], np.float64)
  rounds = np.array([len(run) for run in runs], np.float64)
  rng = np.random.default_rng(seed)
  chosen = rng.integers(0, len(runs), (RESAMPLES, len(runs)))
  return tokens, rounds, chosen


def _ratio(tokens: np.ndarray, rounds: np.ndarray) -> np.ndarray:
  """Means of the resamples; NaN for one without a round."""
  total = rounds.sum(axis=1)
  return np.divide(
    tokens.sum(axis=1),
    total,
    out=np.full(len(total), np.nan),
    where=total > 0,
  )


def _interval(mean: float, spread: np.ndarray) -> Interval:
  low, high = np.nanpercentile(spread, [2.5, 97.5])
  return Interval(float(mean), float(low), float(high))


def histogram(lengths: Sequence[int], block_size: int) -> list[int]:
  """Rounds by acceptance length, 1 to `block_size`."""
  return np.bincount(lengths, minlength=block_size + 1)[1:].tolist()


def by_depth(
  lengths: Sequence[int], block_size: int
) -> list[tuple[float, float | None]]:
  """The share of rounds that accept each depth, 1..block_size - 1.

  Returns:
    The share of all rounds, and of those that accepted the depth before.
  """
  each = np.asarray(lengths)
  reached = [(each > depth).sum() for depth in range(block_size)]
  return [
    (
      float(reached[d] / len(each)),
      float(reached[d] / reached[d - 1]) if reached[d - 1] else None,
    )
    for d in range(1, block_size)
  ]
