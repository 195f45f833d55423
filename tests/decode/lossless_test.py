"""DDTree output equals AR output, token for token, in float32."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decode import Engine, drivers, init_state
from tests import support
from tests.decode import matrix

BLOCK_SIZE = 5
NEW_TOKENS = 18
CAPACITY = 32
LENGTHS = (3, 9, 1)
# Of a budget that is chosen each round.
WIDTHS = (3, 9)


@functools.cache
def autoregressive(variant, row):
  """The answer, and a few tokens more for drafters that look ahead."""
  target = support.variant(variant)
  prompt = support.prompt_of(target.config, LENGTHS[row], seed=row)
  result = generation.generate(
    target,
    None,
    prompt,
    max_new_tokens=NEW_TOKENS + BLOCK_SIZE,
    stop_ids=(),
    capacity=CAPACITY,
    prefill_chunk=4,
  )
  return prompt, result.output_ids


def speculative(case):
  target = support.variant(case.variant)
  drafter = api.load_drafter(case.drafter, target, BLOCK_SIZE)
  decode = DecodeConfig(
    tree_budget=WIDTHS[-1] if case.budget == 'auto' else case.budget,
    widths=WIDTHS if case.budget == 'auto' else (),
    draft_depth=BLOCK_SIZE - 1,
    tree_policy=case.policy,
    capacity=CAPACITY,
    prefill_chunk=4,
  )
  engine = Engine(target.config, drafter.drafter, decode)
  answers = [autoregressive(case.variant, row) for row in range(case.batch)]
  prompts = [prompt for prompt, _ in answers]
  params = {'target': target.params, 'drafter': drafter.params}
  if drafter.drafter.needs_golden:
    params['drafter'] = generation.golden_params(
      engine, [[*prompt, *output] for prompt, output in answers]
    )
  state = init_state(
    engine, prompts, [NEW_TOKENS] * case.batch, (), jnp.float32
  )
  params, state = support.with_costs(engine, params, state)
  state, seconds = drivers.decode_to_end(engine, params, state)
  return [
    drivers.result_of(state, row, NEW_TOKENS, seconds)
    for row in range(case.batch)
  ]


def check(case):
  results = speculative(case)
  auto = case.budget == 'auto'
  horizon = BLOCK_SIZE - 1 if auto else min(BLOCK_SIZE - 1, case.budget)
  for row, result in enumerate(results):
    _, wanted = autoregressive(case.variant, row)
    assert result.output_ids == wanted[:NEW_TOKENS], f'row {row}'
    assert result.stop_reason == 'length'
    lengths = np.array(result.acceptance_lengths)
    assert (lengths >= 1).all() and (lengths <= 1 + horizon).all()
    assert lengths.sum() >= NEW_TOKENS > lengths[:-1].sum()
    if case.drafter == 'oracle' and not auto:
      assert (lengths == 1 + horizon).all(), 'an oracle was refused'
    if case.drafter == 'adversarial':
      assert (lengths == 1).all(), 'a wrong token was accepted'


def name_of(case):
  return '-'.join(map(str, case))


@pytest.mark.parametrize('case', matrix.pairwise(), ids=name_of)
def test_pairwise(case):
  check(case)


@pytest.mark.matrix
@pytest.mark.parametrize('case', matrix.each_once(), ids=name_of)
def test_recipe(case):
  """What a fork adds, by name: each entry of each axis once."""
  check(case)


@pytest.mark.matrix
@pytest.mark.parametrize('case', matrix.whole(), ids=name_of)
def test_whole(case):
  check(case)
