"""What is not finite on a rejected node reaches nobody else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.model import init_cache
from tests import support

FIXTURE = 'deepseek_v3_trained_drafter'
NEW_TOKENS = 24
MASK = 63  # the trained drafter's, which reads it in every draft
PROMPT = support.trace(FIXTURE)['prompt']
TEXT = support.trace(FIXTURE)['ar_ids'][: len(PROMPT) + NEW_TOKENS]


def poisoned_embedding(target, value):
  """Tokens that AR never reads, most of the vocabulary, are `value`."""
  never = {*range(target.config.vocab_size)} - {*TEXT, MASK}
  params = jax.tree.map(lambda x: x, target.params)
  table = params['embed_tokens']['weight'].at[jnp.asarray([*never])]
  params['embed_tokens']['weight'] = table.set(value)
  return dataclasses.replace(target, params=params)


def poisoned_experts(target, value):
  """Experts that no token of AR's text goes to have `value` as weights."""
  config, length = target.config, len(TEXT)
  engine = generation.make_engine(
    target, None, 0, generation.GenerateOptions(capacity=64)
  )
  out = engine.apply(
    {'target': target.params},
    jnp.asarray([TEXT], jnp.int32),
    jnp.arange(length, dtype=jnp.int32)[None],
    init_cache(config, 1, 1, jnp.float32),
    jnp.ones((1, length), jnp.bool_),
  )
  layers = [i for i in range(3) if config.is_moe_layer(i)]
  params = jax.tree.map(lambda x: x, target.params)
  for layer, routing in zip(layers, out.routing, strict=True):
    used = np.unique(routing.ids)
    idle = np.setdiff1d(np.arange(config.n_routed_experts), used)
    assert len(idle) > 4
    experts = params[f'layers_{layer}']['mlp']['experts']
    experts['down_proj'] = experts['down_proj'].at[idle].set(value)
  return dataclasses.replace(target, params=params)


POISONS = {'embedding': poisoned_embedding, 'experts': poisoned_experts}


def check(target, drafter_name, policy='best_first'):
  """Two prompts of one text, which go on as the text does."""
  drafter = None
  if drafter_name:
    folder = support.DATA / FIXTURE / 'dflash'
    source = folder if drafter_name == 'trained' else drafter_name
    drafter = api.load_drafter(source, target)
  tree = {'tree_budget': 16, 'tree_policy': policy} if drafter else {}
  starts = (len(PROMPT), len(PROMPT) + 8)
  results = generation.generate_batch(
    target,
    drafter,
    [TEXT[:start] for start in starts],
    max_new_tokens=NEW_TOKENS - 8,
    stop_ids=(),
    capacity=64,
    prefill_chunk=8,
    **tree,
  )
  for start, result in zip(starts, results, strict=True):
    assert result.output_ids == TEXT[start:][: NEW_TOKENS - 8]
  return results


@pytest.mark.parametrize('poison', POISONS)
def test_ar_never_meets_the_poison(poison):
  """The control of the test below."""
  check(POISONS[poison](support.fixture(FIXTURE), np.nan), None)


@pytest.mark.parametrize('poison', POISONS)
@pytest.mark.parametrize(
  ('drafter', 'policy', 'value'),
  (
    ('random', 'best_first', np.nan),
    ('random', 'chain', np.inf),
    ('trained', 'best_first', -np.inf),
  ),
)
def test_rejected_nodes_that_are_not_finite(poison, drafter, policy, value):
  target = POISONS[poison](support.fixture(FIXTURE), value)
  results = check(target, drafter, policy)
  if drafter == 'trained':
    assert max(results[0].acceptance_lengths) > 1, 'nothing is ever accepted'
