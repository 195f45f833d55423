"""The reference's decoding against the published code's traces."""

import numpy as np
import pytest

from kdtree_jax import reference
from tests.reference import fixtures

DRAFT_TOLERANCE = 5e-5
SCORE_TOLERANCE = 1e-5


def scored_paths(tokens, parents, scores) -> list[tuple]:
  """Lists `(path of tokens, score)` of all nodes but the root."""
  paths = [()]
  for token, parent in zip(tokens, parents[1:], strict=True):
    paths.append((*paths[parent], int(token)))
  return list(zip(paths[1:], scores, strict=True))


def assert_same_tree(mine, tree_trace, log_probs) -> None:
  """Allows other nodes only where their scores are all but equal."""
  parents = tree_trace['parents']
  tokens = tree_trace['node_token_ids']
  ours = scored_paths(mine.tokens[1:], mine.parents, mine.scores[1:])
  theirs = [
    (path, sum(log_probs[depth, token] for depth, token in enumerate(path)))
    for path, _ in scored_paths(tokens, parents, tokens)
  ]
  assert [len(path) for path, _ in theirs] == tree_trace['node_depths']
  for (our_path, our_score), (path, score) in zip(ours, theirs, strict=True):
    assert our_path == path or abs(our_score - score) < SCORE_TOLERANCE


def assert_same_rounds(model, drafter, result, trace, run) -> None:
  """Compares every tree and path; redrafts to score the trace's nodes."""
  prompt, ids = trace['prompt'], result.output_ids
  out = model.forward(ids, range(len(ids)))
  features = drafter.features(out.layers)
  start = len(prompt)
  for mine, theirs in zip(result.rounds, run['rounds'], strict=True):
    logits = drafter.draft(features[:start], ids[start], trace['block_size'])
    log_probs = reference.layers.log_softmax(logits)
    assert_same_tree(mine.tree, theirs, log_probs)
    path = theirs['accepted_indices']
    drafted = [theirs['node_token_ids'][node - 1] for node in path[1:]]
    accepted = mine.accepted_indices
    assert mine.tree.tokens[accepted[1:]].tolist() == drafted
    start += len(accepted)


@pytest.mark.parametrize('name', fixtures.WITH_DRAFTER)
def test_first_draft_logits(name):
  model, drafter = fixtures.load_model(name), fixtures.load_drafter(name)
  trace = fixtures.load_trace(name)
  assert drafter.block_size == trace['block_size']
  assert drafter.mask_token_id == trace['mask_token_id']
  prompt = trace['prompt']
  out = model.forward(prompt, range(len(prompt)))
  context = drafter.features(out.layers)
  logits = drafter.draft(context, int(np.argmax(out.logits[-1])))
  expected = fixtures.load_first_draft_logits(name)
  error = np.abs(logits - expected).max() / np.abs(expected).max()
  assert error < DRAFT_TOLERANCE


@pytest.mark.parametrize('name', fixtures.WITH_DRAFTER)
def test_trees_follow_the_published_trace(name):
  model, drafter = fixtures.load_model(name), fixtures.load_drafter(name)
  trace = fixtures.load_trace(name)
  for run in trace['runs']:
    result = reference.ddtree_generate(
      model,
      drafter,
      trace['prompt'],
      run['tree_budget'],
      trace['block_size'],
      trace['max_new_tokens'],
    )
    assert result.output_ids == run['output_ids'] == trace['ar_ids']
    assert result.acceptance_lengths == run['acceptance_lengths']
    assert_same_rounds(model, drafter, result, trace, run)


@pytest.mark.parametrize('name', fixtures.WITH_DRAFTER)
def test_chain_follows_the_published_trace(name):
  trace = fixtures.load_trace(name)
  result = reference.chain_generate(
    fixtures.load_model(name),
    fixtures.load_drafter(name),
    trace['prompt'],
    trace['block_size'],
    trace['max_new_tokens'],
  )
  assert result.output_ids == trace['chain']['output_ids']
  lengths = trace['chain']['acceptance_lengths']
  assert result.acceptance_lengths == lengths


@pytest.mark.parametrize('name', fixtures.WITH_DRAFTER)
def test_greedy_follows_the_published_trace(name):
  trace = fixtures.load_trace(name)
  prompt = trace['prompt']
  tokens = reference.greedy(
    fixtures.load_model(name), prompt, trace['max_new_tokens']
  )
  assert prompt + tokens == trace['ar_ids']


@pytest.mark.parametrize('max_new_tokens', [0, 1, 2, 3])
def test_exactly_as_many_tokens_as_asked(max_new_tokens):
  name = 'deepseek_v3_trained_drafter'
  trace = fixtures.load_trace(name)
  result = reference.ddtree_generate(
    fixtures.load_model(name),
    fixtures.load_drafter(name),
    trace['prompt'],
    16,
    trace['block_size'],
    max_new_tokens,
  )
  end = len(trace['prompt']) + max_new_tokens
  assert result.output_ids == trace['ar_ids'][:end]


def test_no_budget_is_autoregression():
  name = 'deepseek_v3'
  trace = fixtures.load_trace(name)
  result = reference.ddtree_generate(
    fixtures.load_model(name),
    fixtures.load_drafter(name),
    trace['prompt'],
    0,
    trace['block_size'],
    8,
  )
  assert result.acceptance_lengths == [1] * 8
  assert result.output_ids == trace['ar_ids'][: len(trace['prompt']) + 8]


@pytest.mark.parametrize(
  'change',
  [
    {'layer_types': ['sliding_attention']},
    {'dflash_config': {'causal_head': True}},
    {'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 1e4}},
  ],
)
def test_unknown_drafters_are_refused(change):
  model = fixtures.load_model('moonlight')
  drafter = fixtures.load_drafter('moonlight')
  merged = dict(drafter.config)
  for key, value in change.items():
    old = merged.get(key)
    merged[key] = old | value if isinstance(old, dict) else value
  with pytest.raises(ValueError, match='not supported'):
    reference.ReferenceDrafter(merged, {}, model)
