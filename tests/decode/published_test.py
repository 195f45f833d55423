"""Rounds, trees and acceptance lengths of the published DDTree code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kdtree_jax import api, generation
from kdtree_jax.decode import init_state
from kdtree_jax.decode.prefill import prefill
from kdtree_jax.decode.round import draft
from tests import support

# Nodes whose scores are closer than this may change places.
NEAR = 1e-5
CASES = tuple(
  (name, run['tree_budget'])
  for name in support.TRACED
  for run in support.trace(name)['runs']
)


def drafter_of(name):
  folder = support.DATA / name / 'dflash'
  return api.load_drafter(folder, support.fixture(name))


def run(name, drafter, **options):
  trace = support.trace(name)
  return generation.generate(
    support.fixture(name),
    drafter,
    trace['prompt'],
    max_new_tokens=trace['max_new_tokens'],
    stop_ids=(),
    **options,
  )


def ids_of(result):
  return [*result.prompt_ids, *result.output_ids]


# AR's ids are also those of the chain, in every trace.
AR = ('deepseek_v3_trained_drafter', 'moonlight')


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in AR))
    for name in support.TRACED
  ],
)
def test_autoregressive(name):
  trace = support.trace(name)
  result = run(name, None)
  assert ids_of(result) == trace['ar_ids']
  assert result.acceptance_lengths == [1] * trace['max_new_tokens']


@pytest.mark.parametrize('name', support.TRACED)
def test_chain(name):
  wanted = support.trace(name)['chain']
  drafter = drafter_of(name)
  depth = drafter.block_size - 1
  result = run(name, drafter, tree_policy='chain', tree_budget=depth)
  assert ids_of(result) == wanted['output_ids']
  assert result.acceptance_lengths == wanted['acceptance_lengths']


@pytest.mark.parametrize('name', support.TRACED)
def test_first_draft(name):
  """Golden draft logits: losslessness would hide every drafter bug."""
  trace, drafter = support.trace(name), drafter_of(name)
  target = support.fixture(name)
  options = generation.GenerateOptions(tree_budget=1, prefill_chunk=5)
  engine = generation.make_engine(target, drafter, 64, options)
  state = init_state(engine, [trace['prompt']], [1], (), jnp.float32)
  params = {'target': target.params, 'drafter': drafter.params}
  state = jax.jit(prefill, static_argnums=0)(engine, params, state)
  logits = jax.jit(draft, static_argnums=0)(engine, params, state)[0]
  path = support.DATA / name / 'ddtree_first_draft_logits.safetensors'
  wanted = load_file(path)['draft_logits']
  assert support.relative_error(np.asarray(logits), wanted) < 5e-5


# A tree of 24 nodes lies between the others, and the first fixture has it too.
MIDDLE = 24


@pytest.mark.parametrize(
  ('name', 'budget'),
  [
    pytest.param(
      *case,
      marks=[pytest.mark.slow] * (case[1] == MIDDLE and case[0] != CASES[0][0]),
    )
    for case in CASES
  ],
)
def test_ddtree(name, budget):
  (wanted,) = [
    run for run in support.trace(name)['runs'] if run['tree_budget'] == budget
  ]
  result = run(name, drafter_of(name), tree_budget=budget, record_rounds=True)
  assert ids_of(result) == wanted['output_ids']
  assert result.acceptance_lengths == wanted['acceptance_lengths']
  assert len(result.rounds) == len(wanted['rounds'])
  pairs = zip(result.rounds, wanted['rounds'], strict=True)
  for number, (ours, theirs) in enumerate(pairs):
    check_round(ours, theirs, f'round {number}')


def paths(node_token_ids, parents):
  """The token path of every node, the root's being empty."""
  found = [()]
  for token, parent in zip(node_token_ids, parents[1:], strict=True):
    found.append((*found[parent], token))
  return found


def check_round(ours, theirs, where):
  """The same nodes in the same order, near-ties aside."""
  assert ours.parents[0] == theirs['parents'][0] == -1
  mine = paths(ours.node_token_ids, ours.parents)
  published = paths(theirs['node_token_ids'], theirs['parents'])
  assert ours.node_depths == [len(path) for path in mine[1:]]
  if mine != published:
    check_swaps(mine, published, ours.scores, where)
  accepted = [published[i] for i in theirs['accepted_indices']]
  assert [mine[i] for i in ours.accepted_indices] == accepted, where


def check_swaps(mine, published, scores, where):
  """Every node that moved has moved among nodes of nearly its own score."""
  score = dict(zip(mine, scores, strict=True))
  last = min(scores)
  for place, path in enumerate(published):
    # A node that is missing here was cut at a tie with the last one.
    ours = score.get(path, last)
    assert abs(ours - scores[place]) < NEAR, f'{where}: node {path} moved'
