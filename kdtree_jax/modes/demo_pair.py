"""The second part of the demo: a trained target and drafter on real text."""

import dataclasses

import jax

from kdtree_jax import api, generation
from kdtree_jax.analysis.acceptance import sibling_ranks
from kdtree_jax.decode import GenerateResult, RoundRecord
from kdtree_jax.io.tokenizer import Tokenizer
from kdtree_jax.modes.status import status
from kdtree_jax.options import GenerateOptions
from kdtree_jax.tree.draft_tree import format_tree

TARGET, DRAFTER = 'python_small', 'python_small_drafter'
MAX_NEW_TOKENS = 64
TREE_BUDGET = 16
PROMPT = '''"""Count the words of a text file."""

import argparse
import collections


def count_words(path):
    """Return how often each word occurs in a file."""
    counts = collections.Counter()
    with open(path, encoding="utf-8") as file:
        for line in file:
'''


def show_pair(
  target: api.Target, drafter: api.LoadedDrafter, tokenizer: Tokenizer
) -> bool:
  """Continues `PROMPT` by AR, chain and DDTree; whether outputs are equal."""
  prompt = tokenizer.encode(PROMPT)
  print(
    f'trained pair: {target.name}, {_size(target.params)} parameters, and its '
    f'DFlash drafter, {_size(drafter.params)}, block size {drafter.block_size}'
  )
  print(f'prompt({len(prompt)}):\n{_indented(PROMPT)}')
  options = GenerateOptions(max_new_tokens=MAX_NEW_TOKENS, stop_ids=())
  with status('AR: compiling and decoding'):
    (ar,) = generation.continue_prompts(target, None, [prompt], options)
  print(f'AR ({ar.target_forwards} target forwards):')
  print(_indented(tokenizer.decode(ar.output_ids)))
  same = True
  for name, policy, budget in (
    ('DFlash chain', 'chain', drafter.block_size - 1),
    (f'DDTree, budget {TREE_BUDGET}', 'best_first', TREE_BUDGET),
  ):
    with status(f'{name}: compiling and decoding'):
      (result,) = generation.continue_prompts(
        target,
        drafter,
        [prompt],
        dataclasses.replace(options, tree_policy=policy, tree_budget=budget),
        record_rounds=True,
      )
    print(
      f'{name} ({result.target_forwards} target forwards, acceptance length '
      f'{result.mean_acceptance_length:.2f}):'
    )
    if result.output_ids == ar.output_ids:
      print('  the same text, token for token')
    else:
      same = False
      print(_indented(tokenizer.decode(result.output_ids)))
  print(_drawing(result, tokenizer))
  return same


def _drawing(result: GenerateResult, tokenizer: Tokenizer) -> str:
  """The tree of the round that gained most from being a tree."""
  rounds = result.rounds or []
  number = max(range(len(rounds)), key=lambda i: _worth(rounds[i]))
  shown = rounds[number]
  drawing = format_tree(
    [shown.root_token_id, *shown.node_token_ids],
    shown.parents,
    shown.accepted_indices,
    label=lambda token: repr(tokenizer.decode([token])),
    scores=shown.scores,
  )
  return (
    f'round {number + 1} of {len(rounds)}: the tree from its root, with the '
    "drafter's probability of each token\nand of the path to it; * was "
    f'committed, {len(shown.accepted_indices)} tokens by one target forward\n'
    f'{_indented(drawing)}'
  )


def _worth(record: RoundRecord) -> tuple[bool, int]:
  """Whether a lower-ranked sibling was accepted, and how many tokens were."""
  ranks = sibling_ranks(record.parents)
  second = any(ranks[node] > 0 for node in record.accepted_indices)
  return second, len(record.accepted_indices)


def _size(params) -> str:
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  return f'{count / 1e6:.1f} M'


def _indented(text: str) -> str:
  return '\n'.join(f'  {line}'.rstrip() for line in text.splitlines())
