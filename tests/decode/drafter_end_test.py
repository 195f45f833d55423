"""Texts that outgrow the drafter's positions: AR's steps from there."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.decode import drivers, init_state
from kdtree_jax.modes import loading
from kdtree_jax.modes.generate import Variant, record
from tests import support

FIXTURE = 'deepseek_v3_trained_drafter'
POSITIONS, BUDGET, NEW_TOKENS = 24, 16, 30
OPTIONS = {
  'max_new_tokens': NEW_TOKENS,
  'tree_budget': BUDGET,
  'capacity': 64,
  'prefill_chunk': 8,
  'stop_ids': (),
}


@pytest.fixture(scope='module')
def pair():
  """A pair whose drafter has 24 positions, the target 512."""
  target = support.fixture(FIXTURE)
  drafter = api.load_drafter(support.DATA / FIXTURE / 'dflash', target)
  config = dataclasses.replace(
    drafter.drafter.config, max_position_embeddings=POSITIONS
  )
  short = dataclasses.replace(drafter.drafter, config=config)
  return target, dataclasses.replace(drafter, drafter=short)


@pytest.fixture(scope='module')
def prompts():
  """One row ends its drafts long before the other begins to."""
  return [support.prompt_of(support.fixture(FIXTURE).config, n) for n in (4, 9)]


def engine_of(pair, **changes):
  options = generation.GenerateOptions(**OPTIONS | changes)
  engine = generation.make_engine(*pair, 0, options)
  return engine, {'target': pair[0].params, 'drafter': pair[1].params}


def test_every_driver_takes_them_at_the_same_place(pair, prompts):
  engine, params = engine_of(pair)

  def fresh():
    return init_state(engine, prompts, [NEW_TOKENS] * 2, (), jnp.float32)

  looped, _ = drivers.decode_to_end(engine, params, fresh())
  widths = []
  for state, trace in drivers.traced(engine, params, fresh()):
    widths += [] if trace is None else [trace.tree.tokens.shape[1]]
    traced = state
  streamed = [*drivers.stream(engine, params, fresh(), 3)][-1]
  for other in (traced, streamed):
    for a, b in zip(
      jax.tree.leaves(looped), jax.tree.leaves(other), strict=True
    ):
      assert np.array_equal(a, b)
  # A round is wide while some row can be drafted for, and never again.
  lengths = [len(p) for p in prompts] + np.cumsum(
    np.pad(looped.stats.acceptance_length, ((0, 0), (1, 0))), axis=1
  ).T
  wanted = [
    1 + BUDGET if min(row) + 8 <= POSITIONS else 1
    for row in lengths[: len(widths)]
  ]
  assert widths == wanted and 1 < widths.count(1) < len(widths)


def test_the_draws_stay_those_of_ar(pair, prompts):
  options = OPTIONS | {'temperature': 0.8}
  wanted = generation.generate_batch(pair[0], None, prompts, **options)
  found = generation.generate_batch(
    *pair, prompts, tree_policy='chain', keep_top1_chain=True, **options
  )
  for ours, theirs in zip(found, wanted, strict=True):
    assert ours.output_ids == theirs.output_ids
    assert ours.num_nodes[-8:] == [1] * 8
    assert max(ours.num_nodes) > 1


def loops(pair, **changes):
  """The bodies of the loops in `decode_rounds`, as text."""
  engine, params = engine_of(pair, **changes)
  state = init_state(engine, [[1]], [4], (), jnp.float32)
  jaxpr = jax.make_jaxpr(drivers.decode_rounds, static_argnums=0)(
    engine, params, state, drivers.ALL
  )
  return [
    str(equation.params['body_jaxpr'])
    for equation in jaxpr.eqns
    if equation.primitive.name == 'while'
  ]


def test_the_second_loop_neither_drafts_nor_verifies_a_tree(pair):
  first, second = loops(pair)
  vocabulary = pair[0].config.vocab_size
  wide, narrow = (f'f32[1,{n},{vocabulary}]' for n in (1 + BUDGET, 1))
  assert wide in first and f'f32[1,7,{vocabulary}]' in first
  assert wide not in second and f'f32[1,7,{vocabulary}]' not in second
  assert narrow in second


def test_where_no_row_outgrows_the_drafter_there_is_one_loop(pair):
  assert len(loops(pair, capacity=POSITIONS)) == 1
  assert len(loops(pair, tree_budget=0)) == 1


def copies(pair, **changes):
  """Copies of a cache's shape in the loop's program."""
  engine, params = engine_of(pair, **changes)
  state = init_state(engine, [[1, 2, 3]], [4], (), jnp.float32)
  call = drivers.decode_calls(engine, params, state)[1]
  text, found = call.lower().compile().as_text(), 0
  for cache in (state.cache.latent, state.drafter_state.context):
    shape = re.escape(','.join(map(str, cache.shape)))
    assert re.search(rf'f32\[{shape}\]', text), 'the pattern is stale'
    found += len(re.findall(rf'= f32\[{shape}\]\S* copy\(', text))
  return found


def test_no_cache_is_copied_between_the_loops(pair):
  """What the loops themselves copy, `loop_test` counts."""
  assert copies(pair) <= copies(pair, tree_budget=0)


def test_a_line_names_the_limit(pair, prompts):
  target, drafter = pair
  result = generation.generate(*pair, prompts[0], **OPTIONS)
  alone = result.num_nodes.count(1)
  assert drafter.name in loading.ends_early(target, drafter, [result])
  assert f'first {POSITIONS} positions' in loading.ends_early(
    target, drafter, [result]
  )
  variant = Variant('ddtree', BUDGET, 'best_first')
  line = record(variant, result, drafter, temperature=0.0, seed=0)
  assert line['draft_forwards'] == line['target_forwards'] - alone
  short = generation.generate(
    *pair, prompts[0], **OPTIONS | {'max_new_tokens': 4}
  )
  assert loading.ends_early(target, drafter, [short]) is None
  assert loading.ends_early(target, None, [result]) is None
  stub = api.load_drafter('oracle', target)
  assert loading.ends_early(target, stub, [result]) is None
