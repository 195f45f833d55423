"""Routing switches against the NumPy reference, on random scores."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.model.moe import router_config
from kdtree_jax.named_configs import load_config
from kdtree_jax.reference import model as reference_model
from pallas_kernels.expert_router.api import route


@pytest.mark.parametrize(
  'name', ('tiny', 'grouped_yarn', 'softmax_yarn', 'group_limited')
)
@pytest.mark.parametrize('normalise', (False, True))
def test_route(name, normalise):
  config = dataclasses.replace(load_config(name), norm_topk_prob=normalise)
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(57, config.n_routed_experts)).astype(np.float32)
  bias = None
  if config.topk_method == 'noaux_tc':
    # Large enough that biased scores of whole groups are negative.
    bias = rng.normal(size=config.n_routed_experts).astype(np.float32) - 1
  ids, weights, _ = route(
    jnp.asarray(logits),
    None if bias is None else jnp.asarray(bias),
    router_config(config),
  )
  wanted_ids, wanted = reference_model.route(config.to_dict(), logits, bias)
  order = np.argsort(ids, axis=1)
  wanted_order = np.argsort(wanted_ids, axis=1)
  assert np.array_equal(
    np.take_along_axis(np.asarray(ids), order, 1),
    np.take_along_axis(wanted_ids, wanted_order, 1),
  )
  np.testing.assert_allclose(
    np.take_along_axis(np.asarray(weights), order, 1),
    np.take_along_axis(wanted, wanted_order, 1),
    rtol=2e-5,
  )
