"""Draft trees by best-first search with a heap, and the walk through them.

Source: the DDTree paper's tree construction. The search is slow and simple, so
that faster builders can be compared with it.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

NO_PARENT = -1


@dataclasses.dataclass(frozen=True)
class ReferenceTree:
  """A root and its nodes, in the order in which they leave the heap.

  Attributes:
    tokens: int64 `[N]`; the first is the root's.
    depths: int64 `[N]`; 0 at the root.
    parents: int64 `[N]`; -1 at the root; a node's parent precedes it.
    scores: `[N]`, float64 or int64 like the log probabilities; 0 at the root,
      never rising with the index.
    visibility: bool `[N, N]`; row i is True at i and at its ancestors.
  """

  tokens: np.ndarray
  depths: np.ndarray
  parents: np.ndarray
  scores: np.ndarray
  visibility: np.ndarray


def make_tree(
  tokens: ArrayLike, parents: Sequence[int], scores: ArrayLike
) -> ReferenceTree:
  """A tree with derived depths and visibility; parents precede children."""
  depths = np.zeros(len(parents), np.int64)
  visibility = np.eye(len(parents), dtype=bool)
  for node, parent in enumerate(parents):
    if parent != NO_PARENT:
      depths[node] = depths[parent] + 1
      visibility[node] |= visibility[parent]
  return ReferenceTree(
    tokens=np.asarray(tokens, np.int64),
    depths=depths,
    parents=np.asarray(parents, np.int64),
    scores=np.asarray(scores),
    visibility=visibility,
  )


def rank_tokens(log_probs: np.ndarray, count: int) -> np.ndarray:
  """Token ids of the `count` largest entries `[D, V]`, ties to the lowest.

  The reversed row is sorted in ascending order, instead of the negated one: the
  lowest int64 has no negation.
  """
  vocab_size = log_probs.shape[-1]
  ascending = np.argsort(log_probs[:, ::-1], axis=-1, kind='stable')
  return vocab_size - 1 - ascending[:, ::-1][:, :count]


def build_tree(
  log_probs: np.ndarray, budget: int, root_token: int = -1
) -> ReferenceTree:
  """Finds the `budget` best prefixes by best-first search.

  A prefix scores the sum of its log probabilities. Ties go to the path of
  ranks that is lower in lexicographic order. Popping a prefix pushes its next
  sibling and its first child; both come later in that order, so the heap yields
  all prefixes in order and a parent before its children.

  Args:
    log_probs: `[D, V]`, floats or integers (fixed point, with exact scores);
      values above 0 count as 0, entries of minus infinity never become nodes.
    budget: the most nodes, the root not counted.
    root_token: the value of `tokens[0]`.

  Returns:
    The tree; it has fewer nodes if there are fewer prefixes.

  Raises:
    ValueError: an entry is NaN.
  """
  log_probs = np.asarray(log_probs)
  if np.isnan(log_probs).any():
    raise ValueError('log_probs contains NaN')
  log_probs = np.minimum(log_probs, 0)
  max_depth, vocab_size = log_probs.shape
  ranked = rank_tokens(log_probs, min(budget, vocab_size))
  # Python numbers: integers cannot overflow, floats are float64.
  values = np.take_along_axis(log_probs, ranked, axis=-1).tolist()

  tokens, parents = [root_token], [NO_PARENT]
  scores = [log_probs.dtype.type(0).item()]
  heap = []

  def push(path: tuple[int, ...], parent: int) -> None:
    depth, rank = len(path) - 1, path[-1]
    if depth < max_depth and rank < ranked.shape[-1]:
      value = values[depth][rank]
      if value != -np.inf:
        heapq.heappush(heap, (-(scores[parent] + value), path, parent))

  push((0,), 0)
  while heap and len(tokens) <= budget:
    negated_score, path, parent = heapq.heappop(heap)
    node = len(tokens)
    tokens.append(int(ranked[len(path) - 1, path[-1]]))
    parents.append(parent)
    scores.append(-negated_score)
    push((*path[:-1], path[-1] + 1), parent)
    push((*path, 0), node)
  return make_tree(tokens, parents, scores)


def chain_tree(log_probs: np.ndarray, root_token: int = -1) -> ReferenceTree:
  """The chain of the most probable token of every depth of `[D, V]`."""
  best = np.argmax(log_probs, axis=-1)
  values = np.take_along_axis(log_probs, best[:, None], axis=-1)[:, 0]
  return make_tree(
    tokens=[root_token, *best],
    parents=range(NO_PARENT, len(best)),
    scores=np.concatenate([[0], np.cumsum(values)]),
  )


def walk(
  tree: ReferenceTree, target_tokens: Sequence[int] | np.ndarray
) -> tuple[list[int], int]:
  """The path from the root along the target's own tokens.

  Args:
    tree: any tree; of siblings with the same token the first one counts.
    target_tokens: `[N]`, the token that the target chooses after every node.

  Returns:
    The accepted indices, the root first, and the token after the last of
    them, which no child holds.
  """
  accepted = [0]
  while True:
    node = accepted[-1]
    wanted = int(target_tokens[node])
    children = np.flatnonzero((tree.parents == node) & (tree.tokens == wanted))
    if not children.size:
      return accepted, wanted
    accepted.append(int(children[0]))
