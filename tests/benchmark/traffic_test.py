"""Bytes that a step must move, worked by hand; experts; what follows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api
from kdtree_jax.benchmark import report, traffic
from kdtree_jax.benchmark.sweep import SweepPoint
from kdtree_jax.config import ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.model import abstract_params
from kdtree_jax.model.random_params import random_params
from kdtree_jax.named_configs import load_config
from tests import support

CONFIG = ModelConfig(
  vocab_size=11,
  hidden_size=6,
  num_hidden_layers=3,
  num_attention_heads=2,
  q_lora_rank=None,
  kv_lora_rank=4,
  qk_nope_head_dim=3,
  qk_rope_head_dim=2,
  v_head_dim=5,
  intermediate_size=7,
  moe_intermediate_size=3,
  n_routed_experts=4,
  num_experts_per_tok=2,
  n_shared_experts=1,
  first_k_dense_replace=1,
)
# q, kv_a, its norm, both halves of kv_b, o, two norms.
ATTENTION = 10 * 6 + 6 * 6 + 4 + 2 * 3 * 4 + 2 * 5 * 4 + 6 * 10 + 2 * 6
DENSE_MLP = 3 * 7 * 6
SHARED = 3 * 3 * 6
# The router stays float32, its bias too.
ROUTER_BYTES = 4 * (4 * 6 + 4)
EXPERT = 3 * 3 * 6


@pytest.mark.parametrize(('dtype', 'size'), (('bfloat16', 2), ('float32', 4)))
def test_weights_by_hand(dtype, size):
  params = abstract_params(CONFIG, api.DTYPES[dtype])
  found = traffic.weight_bytes(CONFIG, params)
  values = 3 * ATTENTION + DENSE_MLP + 2 * SHARED + 6
  assert found.dense == size * values + 2 * ROUTER_BYTES
  assert found.head == found.embedding == size * 11 * 6
  assert found.expert == (size * EXPERT,) * 2
  assert found.experts == 2 * 4 * size * EXPERT
  assert found.drafter == 0
  assert found.total == support.tree_bytes(params)


def test_a_tied_head_is_read_and_is_no_table_beside():
  config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
  found = traffic.weight_bytes(config, abstract_params(config, jnp.bfloat16))
  assert (found.head, found.embedding) == (2 * 11 * 6, 0)


def test_step_by_hand():
  weights = traffic.WeightBytes(
    dense=100, head=10, embedding=10, expert=(3, 5), experts=32, drafter=70
  )
  cache = {'target_cache': 1000, 'drafter_cache': 200}
  ar = traffic.step_bytes(weights, [2, 2], **cache)
  assert ar == {
    'dense': 100,
    'head': 10,
    'experts': 2 * 3 + 2 * 5,
    'drafter': 0,
    'cache': 1000,
  }
  drafted = traffic.step_bytes(weights, [2.5, 4], drafts=True, **cache)
  assert drafted == {
    'dense': 100,
    'head': 20,
    'experts': round(2.5 * 3 + 4 * 5),
    'drafter': 70,
    'cache': 1200,
  }
  own = traffic.step_bytes(weights, [0, 0], drafts=True, own_head=True, **cache)
  assert (own['head'], own['experts']) == (10, 0)


def test_active_experts_of_a_prefix():
  ids = np.array([[[0, 1], [1, 2], [7, 0], [-1, -1]], [[3, 3]] * 4])
  assert traffic.active_experts(ids, 1) == [2, 1]
  assert traffic.active_experts(ids, 2) == [3, 1]
  assert traffic.active_experts(ids, 4) == [4, 1]


def test_attention_flops():
  """A multiply-add is two; scores over 6 values, values over 4."""
  rows, context = 5, 100
  wanted = 2 * (6 + 4) * 2 * 3 * rows * context
  assert traffic.attention_flops(CONFIG, rows, context) == wanted


def record(context, budget, ms, method='ddtree'):
  return {
    'kind': 'step',
    'method': method,
    'context': context,
    'tree_budget': budget,
    'block_size': 4,
    'measured': {'ms': ms},
  }


def test_break_even_and_speedup():
  records = [
    record(16, 8, 5.0),
    record(16, 0, 2.0, 'ar'),
    record(16, 1, 3.0),
    record(99, 8, 5.0),
  ]
  large, small = report.computed(records)
  assert large['break_even_acceptance_length'] == 2.5
  speedups = large['speedup_at_acceptance_length']
  assert speedups['2'] == 0.8 and speedups['4'] == 1.6
  # A block of 4 commits no 5 tokens, a tree of one node no 3.
  assert speedups['5'] is None
  assert small['speedup_at_acceptance_length']['2'] == pytest.approx(4 / 3)
  assert small['speedup_at_acceptance_length']['3'] is None


def test_a_step_knows_its_record():
  ar, empty = record(16, 0, 1.0, 'ar'), record(16, 0, 1.0)
  assert SweepPoint(16, None).is_of(ar) and not SweepPoint(16, None).is_of(
    empty
  )
  assert SweepPoint(16, 0).is_of(empty) and not SweepPoint(16, 0).is_of(ar)
  assert not SweepPoint(17, 0).is_of(empty)
  assert not SweepPoint(16, 0).is_of({'kind': 'memory'})


def test_random_parameters():
  def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)

  shapes = {
    'norm': {'weight': shape(7)},
    'gate': {'e_score_correction_bias': shape(5, dtype=jnp.float32)},
    'matrix': {'weight': shape(90, 70)},
    'same': {'weight': shape(90, 70)},
    'stack': shape(3, 60, 50),
  }
  made, again, other = (random_params(shapes, seed) for seed in (0, 0, 1))
  kinds = jax.tree.map(lambda x: (x.shape, x.dtype), (made, shapes))
  assert kinds[0] == kinds[1]
  assert (made['norm']['weight'] == 1).all()
  assert (made['gate']['e_score_correction_bias'] == 0).all()
  sampled = [made['matrix']['weight'], made['same']['weight'], *made['stack']]
  for values in sampled:
    values = np.asarray(values, np.float32)
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean()) < 4 * 0.02 / math.sqrt(values.size)
  assert len({np.asarray(x).tobytes() for x in sampled}) == len(sampled)
  equal = jax.tree.map(np.array_equal, made, again)
  assert all(jax.tree.leaves(equal))
  assert not np.array_equal(made['stack'], other['stack'])


def test_what_a_random_layer_adds_is_small():
  """Also what makes rounding matter little: see `random_params`."""
  shapes = abstract_params(load_config('tiny'), jnp.float32)
  made = random_params(shapes)
  layer = made['layers_1']
  branches = 2 * 4
  for value, std in (
    (made['embed_tokens']['weight'], 1.0),
    (made['lm_head']['weight'], 0.02),
    (layer['self_attn']['o_proj']['weight'], 0.02 / math.sqrt(branches)),
    (layer['mlp']['experts']['down_proj'], 0.02 / branches),
    (layer['mlp']['experts']['gate_up_proj'], 0.02),
  ):
    assert np.asarray(value).std() == pytest.approx(std, rel=0.05)


def test_a_random_target_has_the_layers_that_are_kept():
  target = api.random_target('single_head', layers=1)
  shapes = abstract_params(target.config, jnp.float32)
  assert support.tree_bytes(target.params) == support.tree_bytes(shapes)


@pytest.mark.parametrize('layers', (0, 5))
def test_layers_that_a_config_lacks(layers):
  with pytest.raises(UserError, match=f'layers={layers} is not in 1..4'):
    api.random_target('tiny', layers=layers)
