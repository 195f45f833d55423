"""The router's kernels: interpreted, against the reference; lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.expert_router import (
  api,
  cases,
  logits,
  mosaic_gpu,
  reference,
)
from tests.kernels import witness

V3 = dict(n_group=8, topk_group=4, group_score_experts=2, masked_score=-np.inf)
V2 = dict(scoring_func='softmax', norm_topk_prob=False, n_group=8, topk_group=3)
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def make_config(choices, **changes):
  known = dict(
    scoring_func='sigmoid', norm_topk_prob=True, routed_scaling_factor=2.5
  )
  return api.RouterConfig(choices, **(known | changes))


@functools.partial(jax.jit, static_argnums=3)
def interpreted(parts, bias, valid, config):
  """Compiled together, as each takes a second by itself."""
  rows = parts.shape[1]
  return mosaic_gpu.choose(parts, bias, valid, rows, config, INTERPRET)


def check(parts, bias, valid, config):
  """`parts` `[S, T, E]` of logits."""
  parts = jnp.asarray(parts, jnp.float32)
  bias = None if bias is None else jnp.asarray(bias, jnp.float32)
  valid = None if valid is None else jnp.asarray(valid)
  ids, dispatch_ids, weights = interpreted(parts, bias, valid, config)
  routing = reference.route(sum(parts[1:], parts[0]), bias, config)
  np.testing.assert_array_equal(ids, routing.ids)
  np.testing.assert_array_equal(
    dispatch_ids, reference.dispatch_ids(routing.ids, valid, parts.shape[2])
  )
  np.testing.assert_allclose(weights, routing.weights, rtol=1e-6)


@pytest.mark.parametrize(
  ('rows', 'experts', 'choices', 'number', 'changes'),
  [
    (1, 64, 6, 1, {}),
    (7, 8, 1, 1, {'norm_topk_prob': False}),
    (5, 384, 8, 2, {}),
    (9, 72, 6, 3, {'scoring_func': 'softmax'}),
    (5, 256, 8, 1, V3),
    (3, 160, 6, 2, V2),
    (5, 384, 8, 1, V3 | {'n_group': 16, 'topk_group': 1}),
    (3, 64, 8, 1, V3 | {'n_group': 2, 'topk_group': 2}),
    (1, 72, 6, 1, V3 | {'n_group': 4, 'topk_group': 3}),
    pytest.param(63, 64, 6, 2, {}, marks=pytest.mark.slow),
    pytest.param(
      65, 8, 8, 1, {'scoring_func': 'softmax'}, marks=pytest.mark.slow
    ),
    pytest.param(257, 64, 6, 1, {}, marks=pytest.mark.slow),
  ],
)
def test_is_the_reference(rows, experts, choices, number, changes):
  rng = np.random.default_rng(rows)
  parts = rng.normal(size=(number, rows, experts))
  bias = rng.normal(size=experts) - 1  # Some biased scores are negative.
  valid = rng.random(rows) < 0.7
  check(parts, bias, valid, make_config(choices, **changes))


def test_ties_and_what_is_not_finite():
  """A row each: all equal, pairs of equals, infinities, NaN of either sign."""
  rows = np.random.default_rng(0).normal(size=(8, 64))
  rows[0] = 0.5
  rows[1] = np.repeat(rows[1, :32], 2)
  rows[2] = -np.inf
  rows[3, 5:] = -np.inf
  rows[4, [9, 40]] = np.inf
  rows[5, [3, 50]] = np.nan
  rows[6, [3, 50]] = -np.nan
  rows[7] = np.nan
  check(rows[None], None, None, make_config(6))


@pytest.mark.parametrize('changes', [V3, V2])
def test_groups_that_tie_or_are_not_finite(changes):
  """A row each; the bias makes all choices negative but the last group's."""
  rows = np.random.default_rng(0).normal(size=(8, 64))
  rows[0] = 0.5
  rows[1] = np.tile(rows[1, :8], 8)  # Groups tie.
  rows[2] = np.repeat(rows[2, :32], 2)  # Experts tie.
  rows[3] = -np.inf
  rows[4, 8:] = -np.inf
  rows[5, 40] = np.inf
  rows[6, [3, 50]] = np.nan
  rows[7] = np.nan
  bias = np.full(64, -2.0)
  bias[:16] = -np.inf
  bias[56:] = 0
  check(rows[None], bias, None, make_config(6, **changes))
  check(rows[None], None, None, make_config(6, **changes))


def test_bias_of_infinity_closes_an_expert():
  rng = np.random.default_rng(0)
  bias = np.where(np.arange(8) < 6, -np.inf, 0)
  check(rng.normal(size=(1, 4, 8)), bias, None, make_config(4))


@pytest.mark.parametrize('shape', [(7, 128, 64), (65, 192, 128)])
def test_logits_are_as_good_as_float32(shape):
  rows, hidden, experts = shape
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(rows, hidden)), jnp.bfloat16)
  gate = jnp.asarray(rng.normal(size=(experts, hidden)), jnp.float32)
  parts = np.asarray(logits.logits(x, gate, INTERPRET))
  assert parts.shape == (logits.parts(hidden), -(-rows // 64) * 64, experts)
  truth = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
  size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(gate)).T
  total = parts.astype(np.float64).sum(0)[:rows]
  assert np.max(np.abs(total - truth) / size) < 2**-22


@pytest.mark.parametrize(
  'case', cases.small_cases(), ids=lambda case: case.name
)
def test_case(case):
  """From rows to ids and weights; the choice is that of the same logits."""
  inputs = case.make_inputs(jax.random.key(0))
  found = witness.run(jax.jit(case.interpreted), *inputs)
  assert case.check(lambda *_: found, inputs)['ok']
  config = case.interpreted.args[0]
  routing, _ = reference.expert_router(*inputs, config)
  np.testing.assert_array_equal(found[0], routing.ids)
  np.testing.assert_allclose(found[1], routing.weights, rtol=1e-5)
  np.testing.assert_allclose(found[3], routing.choice, atol=1e-6)


@pytest.mark.parametrize(
  'rows',
  [
    1,
    pytest.param(17, marks=pytest.mark.slow),
    pytest.param(257, marks=pytest.mark.slow),
    1056,
  ],
)
@pytest.mark.parametrize(
  'model',
  [
    (6, 64, 2048, {}),
    (8, 384, 7168, {}),
    (2, 8, 256, {}),
    (8, 256, 7168, V3),
    (6, 160, 5120, V2),
  ],
)
def test_lowers_at_real_shapes(rows, model):
  choices, experts, hidden, changes = model
  device = AbstractDevice('NVIDIA H200', 132, 'gpu')
  mesh = AbstractMesh((), (), abstract_device=device)
  struct = jax.ShapeDtypeStruct
  config = make_config(choices, **changes)
  with jax.sharding.use_abstract_mesh(mesh):
    x = struct((rows, hidden), jnp.bfloat16)
    gate = struct((experts, hidden), jnp.float32)
    assert mosaic_gpu.why_not(x, gate, None, None, config) is None
    jax.jit(mosaic_gpu.run, static_argnums=4).trace(
      x,
      gate,
      struct((experts,), jnp.float32),
      struct((rows,), jnp.bool_),
      config,
    ).lower(lowering_platforms=('cuda',))


def test_what_it_leaves_to_the_reference():
  x = jnp.zeros((2, 64), jnp.bfloat16)
  gate = jnp.zeros((64, 64))

  def why_not(x, experts, config):
    gate = jnp.zeros((experts, 64))
    return mosaic_gpu.why_not(x, gate, None, None, config)

  assert 'bfloat16' in why_not(x.astype(jnp.float32), 64, make_config(6))
  assert 'groups' in why_not(x, 64, make_config(6, n_group=3))
  assert 'topk_group' in why_not(x, 64, make_config(6, n_group=2, topk_group=3))
  assert 'group_score' in why_not(
    x, 64, make_config(6, n_group=64, group_score_experts=2)
  )
  assert 'choices' in why_not(x, 64, make_config(9))
  assert 'experts' in why_not(x, 513, make_config(6))
  with pytest.raises(ValueError, match='scoring_func'):
    make_config(6, scoring_func='relu')
  with pytest.raises(ValueError, match='Hopper'):
    api.expert_router(
      x, gate, None, None, make_config(6), implementation='mosaic_gpu'
    )
  with pytest.raises(ValueError, match='valid'):
    api.expert_router(x, gate, None, jnp.ones(3, bool), make_config(6))


def test_derivative_is_the_references():
  rng = np.random.default_rng(2)
  x = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16)
  gate = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
  rest = jnp.zeros(64), jnp.ones(4, bool), make_config(6)

  def loss(op, gate):
    return jnp.sum(op(x, gate, *rest)[0].weights[:, 0])

  want = jax.grad(functools.partial(loss, reference.expert_router))(gate)
  routing, ids = reference.expert_router(x, gate, *rest)
  zeros = jax.tree.map(jnp.zeros_like, routing)
  cotangent = (
    zeros._replace(weights=zeros.weights.at[:, 0].set(1.0)),
    ids,
  )
  inputs = x, gate, *rest[:2]
  got = mosaic_gpu._backward(rest[2], inputs, cotangent)[1]
  np.testing.assert_allclose(got, want, rtol=1e-6)
