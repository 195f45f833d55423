"""Greedy decoding of the reference: autoregressive, by trees, by chains."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kdtree_jax.reference import ddtree
from kdtree_jax.reference.cache import ListCache
from kdtree_jax.reference.dflash import ReferenceDrafter
from kdtree_jax.reference.layers import log_softmax
from kdtree_jax.reference.model import ForwardOutput, ReferenceModel

# A tree for log probabilities [D, V] and the root's token.
TreePolicy = Callable[[np.ndarray, int], ddtree.ReferenceTree]


@dataclasses.dataclass(frozen=True)
class Round:
  """One round's tree and its accepted nodes, the root's 0 included."""

  tree: ddtree.ReferenceTree
  accepted_indices: list[int]


@dataclasses.dataclass(frozen=True)
class Generation:
  """The result of speculative decoding.

  Attributes:
    output_ids: the prompt and exactly `max_new_tokens` tokens.
    acceptance_lengths: tokens that every target forward committed, its root
      included; prefill is not counted. The sum may pass `max_new_tokens`.
    rounds: every round's tree and path.
  """

  output_ids: list[int]
  acceptance_lengths: list[int]
  rounds: list[Round]


def _prefill(
  model: ReferenceModel, prompt: Sequence[int] | np.ndarray
) -> tuple[ForwardOutput, ListCache]:
  out = model.forward(prompt, range(len(prompt)))
  cache = ListCache(model.config)
  cache.append(out.rows, range(len(prompt)))
  return out, cache


def greedy(
  model: ReferenceModel, prompt: Sequence[int] | np.ndarray, num_tokens: int
) -> list[int]:
  """The `num_tokens` greedy tokens after `prompt`, one a forward."""
  out, cache = _prefill(model, prompt)
  generated = []
  while len(generated) < num_tokens:
    generated.append(int(np.argmax(out.logits[-1])))
    out = model.forward(generated[-1:], [len(cache)], cache)
    cache.append(out.rows, [0])
  return generated


def _speculate(
  model: ReferenceModel,
  drafter: ReferenceDrafter,
  prompt: Sequence[int] | np.ndarray,
  policy: TreePolicy,
  block_size: int,
  max_new_tokens: int,
) -> Generation:
  """Drafts, verifies and commits until enough rows are in the cache."""
  out, cache = _prefill(model, prompt)
  context = drafter.features(out.layers)
  output_ids = [int(token) for token in prompt]
  root = int(np.argmax(out.logits[-1]))
  rounds = []
  end = len(prompt) + max_new_tokens
  while len(cache) < end:
    drafted = drafter.draft(context, root, block_size)
    tree = policy(log_softmax(drafted), root)
    positions = len(cache) + tree.depths
    out = model.forward(tree.tokens, positions, cache, tree.visibility)
    accepted, root = ddtree.walk(tree, np.argmax(out.logits, axis=-1))
    cache.append(out.rows, accepted)
    new = drafter.features([state[accepted] for state in out.layers])
    context = np.concatenate([context, new])
    output_ids += tree.tokens[accepted].tolist()
    rounds.append(Round(tree, accepted))
  lengths = [len(item.accepted_indices) for item in rounds]
  # The last root is not committed, but it is a token of the output.
  return Generation([*output_ids, root][:end], lengths, rounds)


def ddtree_generate(
  model: ReferenceModel,
  drafter: ReferenceDrafter,
  prompt: Sequence[int] | np.ndarray,
  tree_budget: int,
  block_size: int,
  max_new_tokens: int,
) -> Generation:
  """Decodes greedily with the `tree_budget` best prefixes in every round.

  Args:
    model: the target.
    drafter: its drafter.
    prompt: token ids, not empty.
    tree_budget: nodes, the root not counted.
    block_size: the drafter's block, root included.
    max_new_tokens: tokens to generate; rounds run while fewer than
      `len(prompt) + max_new_tokens` tokens are in the cache.
  """

  def policy(log_probs: np.ndarray, root: int) -> ddtree.ReferenceTree:
    return ddtree.build_tree(log_probs, tree_budget, root)

  return _speculate(model, drafter, prompt, policy, block_size, max_new_tokens)


def chain_generate(
  model: ReferenceModel,
  drafter: ReferenceDrafter,
  prompt: Sequence[int] | np.ndarray,
  block_size: int,
  max_new_tokens: int,
) -> Generation:
  """Decodes like `ddtree_generate`, with chains of the drafter's top tokens."""
  return _speculate(
    model, drafter, prompt, ddtree.chain_tree, block_size, max_new_tokens
  )
