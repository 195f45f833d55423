"""Noise is of one purpose: what drafts or trains never shares a draw's."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import kdtree_jax
from kdtree_jax import api, generation
from kdtree_jax.keys import Purpose, key_for
from tests import support

FOLDER = pathlib.Path(kdtree_jax.__file__).parent


def test_no_purpose_has_a_key_of_a_request_or_of_another():
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  positions = jnp.arange(2048, dtype=jnp.int32)

  @jax.jit
  def below(key):
    return jax.random.key_data(fold(key, positions))

  families = [below(jax.random.key(seed)) for seed in range(20)]
  for seed in (0, 1):
    families += [below(key_for(purpose, seed)) for purpose in Purpose]
  own = [jax.random.key_data(key_for(purpose)) for purpose in Purpose]
  rows = np.concatenate([*families, np.stack(own)])
  assert len(np.unique(rows, axis=0)) == len(rows)


def test_keys_are_made_in_one_place():
  """But for the requests' own, which `Sampling.of` maps over."""
  makers = [
    path.name
    for path in sorted(FOLDER.rglob('*.py'))
    if 'random.key(' in path.read_text() or 'PRNGKey' in path.read_text()
  ]
  assert makers == ['keys.py']


def test_the_random_drafter_does_not_know_the_draws():
  """All but noise, a request of any seed accepts by chance: 1 + 1/V."""
  target = support.variant('tiny')
  drafter = api.load_drafter('random', target, 8)
  accepted = [
    result.mean_acceptance_length
    for result in generation.generate_batch(
      target,
      drafter,
      [[1, 2]] * 4,
      seeds=[0, 1, 2, 3],
      max_new_tokens=60,
      tree_budget=7,
      tree_policy='chain',
      temperature=50.0,
      stop_ids=(),
    )
  ]
  assert max(accepted) < 1.3
