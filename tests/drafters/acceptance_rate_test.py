"""The drafter with a set acceptance rate accepts what its rate implies."""

import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.benchmark.end_to_end import expected_acceptance_length
from kdtree_jax.errors import UserError
from tests import support

BLOCK_SIZE, COUNT = 6, 300


def run(acceptance_rate, policy='best_first'):
  target = support.variant('single_head')
  drafter = api.load_drafter(
    'acceptance_rate', target, BLOCK_SIZE, acceptance_rate=acceptance_rate
  )
  prompt = support.prompt_of(target.config, 5)
  options = {'stop_ids': (), 'capacity': 400}
  ar = generation.generate(
    target, None, prompt, max_new_tokens=COUNT + BLOCK_SIZE, **options
  )
  result = generation.generate(
    target,
    drafter,
    prompt,
    max_new_tokens=COUNT,
    tree_budget=13,
    tree_policy=policy,
    golden_ids=[*prompt, *ar.output_ids],
    **options,
  )
  assert result.output_ids == ar.output_ids[:COUNT]
  return np.array(result.acceptance_lengths)


def test_expected_length_by_hand():
  assert expected_acceptance_length(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
  assert expected_acceptance_length(1.0, 5) == 6
  assert expected_acceptance_length(0.0, 5) == 1


@pytest.mark.parametrize('policy', ('best_first', 'chain'))
def test_acceptance_is_what_the_rate_implies(policy):
  lengths = run(0.7, policy)
  wanted = expected_acceptance_length(0.7, BLOCK_SIZE - 1)
  # Rounds are independent: a mean is off by its own standard error.
  error = lengths.std() / np.sqrt(len(lengths))
  assert abs(lengths.mean() - wanted) < 3 * error
  assert len(set(lengths)) > 3


def test_a_rate_of_one_is_the_oracle_and_of_none_never_right():
  assert (run(1.0)[:-1] == BLOCK_SIZE).all()
  assert (run(0.0) == 1).all()


@pytest.mark.parametrize('rate', (-0.1, 1.5))
def test_rates_out_of_range(rate):
  with pytest.raises(UserError, match=f'acceptance_rate={rate} is not in 0..1'):
    api.load_drafter(
      'acceptance_rate', support.variant('tiny'), acceptance_rate=rate
    )


def test_other_drafters_have_no_rate():
  with pytest.raises(UserError, match='acceptance_rate is not used by oracle'):
    api.load_drafter('oracle', support.variant('tiny'), acceptance_rate=0.5)
