"""expert_mlp against a float64 NumPy loop over rows and choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dense
from pallas_kernels.expert_mlp import api

T, H, I, E, K = 6, 7, 5, 4, 3  # noqa: E741

mlp = jax.jit(api.expert_mlp)


@pytest.fixture(autouse=True, scope='module')
def strict():
  with (
    jax.numpy_dtype_promotion('strict'),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


def expected(x, gate_up, down, ids, weights):
  out = np.zeros(x.shape)
  x, gate_up, down = (a.astype(np.float64) for a in (x, gate_up, down))
  for t, k in np.ndindex(ids.shape):
    e = ids[t, k]
    if 0 <= e < len(down):
      gate, up = gate_up[e, :I] @ x[t], gate_up[e, I:] @ x[t]
      out[t] += weights[t, k] * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
  return out


def make_arrays(seed=0):
  rng = np.random.default_rng(seed)
  x, gate_up, down, weights = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((T, H), (E, 2 * I, H), (E, H, I), (T, K))
  )
  ids = rng.integers(0, E, (T, K), dtype=np.int32)
  return x, gate_up, down, ids, weights


@settings(derandomize=True, database=None, deadline=None, max_examples=30)
@given(
  ids=st.lists(st.integers(-1, E + 1), min_size=T * K, max_size=T * K),
  seed=st.integers(0, 2**31),
)
def test_equals_float64_for_any_ids(ids, seed):
  """Ids at random: duplicates, experts without rows, ids of no expert."""
  x, gate_up, down, _, weights = make_arrays(seed)
  ids = np.array(ids, np.int32).reshape(T, K)
  np.testing.assert_allclose(
    mlp(x, gate_up, down, ids, weights),
    expected(x, gate_up, down, ids, weights),
    rtol=2e-5,
    atol=5e-5,
  )


@pytest.mark.parametrize('expert', [-(2**31), -1, 0, E - 1, E, 2**31 - 1])
def test_all_rows_on_one_expert(expert):
  x, gate_up, down, ids, weights = make_arrays(1)
  ids = np.full_like(ids, expert)
  got = np.asarray(mlp(x, gate_up, down, ids, weights))
  want = expected(x, gate_up, down, ids, weights)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=5e-5)
  assert (got == 0).all() == (not 0 <= expert < E)


def test_experts_without_rows_are_not_computed():
  x, gate_up, down, ids, weights = make_arrays(2)
  ids[:] = np.where(ids == 2, 3, ids)
  ids[-1] = E
  want = mlp(x, gate_up, down, ids, weights)
  gate_up[2] = down[2] = np.nan
  np.testing.assert_array_equal(mlp(x, gate_up, down, ids, weights), want)
  text = mlp.lower(x, gate_up, down, ids, weights).compile().as_text()
  assert ' conditional(' in text  # a branch, not a select of two results


def test_rows_are_independent():
  x, gate_up, down, ids, weights = make_arrays(3)
  want = np.asarray(mlp(x, gate_up, down, ids, weights))
  for bad in (np.nan, np.inf, 1e30):
    other = x.copy()
    other[2] = bad
    got = np.asarray(mlp(other, gate_up, down, ids, weights))
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))
  # A row of no expert is zero, whatever it holds; the others stay.
  other[2], ids[2] = np.nan, E
  got = np.asarray(mlp(other, gate_up, down, ids, weights))
  assert (got[2] == 0).all()
  np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


def test_an_expert_that_a_row_did_not_choose_cannot_poison_it():
  x, gate_up, down, ids, weights = make_arrays(4)
  ids[:] = 0
  ids[0] = 1
  want = np.asarray(mlp(x, gate_up, down, ids, weights))
  down[1] = np.inf
  got = np.asarray(mlp(x, gate_up, down, ids, weights))
  np.testing.assert_array_equal(got[1:], want[1:])


def test_order_of_choices_does_not_change_a_bit():
  x, gate_up, down, ids, weights = make_arrays(5)
  ids[:] = [[0, 2, 3]] * T  # distinct: the sum is in order of expert id
  want = mlp(x, gate_up, down, ids, weights)
  turned = mlp(x, gate_up, down, ids[:, ::-1], weights[:, ::-1])
  np.testing.assert_array_equal(turned, want)


def test_gradients_equal_finite_differences():
  x, gate_up, down, ids, weights = make_arrays(6)
  ids[0] = [1, 1, E]
  rng = np.random.default_rng(0)
  probe = rng.normal(size=x.shape).astype(np.float32)

  def loss(x, gate_up, down, weights):
    return jnp.sum(api.expert_mlp(x, gate_up, down, ids, weights) * probe)

  values = (x, gate_up, down, weights)
  grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*values)

  def exact(i, step):
    moved = [np.float64(v) for v in values]
    moved[i] = moved[i] + step
    a, b, c, w = moved
    return np.sum(expected(a, b, c, ids, w) * probe)

  for i, grad in enumerate(grads):
    direction = rng.normal(size=grad.shape)
    slope = (exact(i, 1e-5 * direction) - exact(i, -1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(
      np.sum(np.asarray(grad) * direction), slope, rtol=1e-4
    )
  unused = [e for e in range(E) if not (ids == e).any()]
  assert (np.asarray(grads[1])[unused] == 0).all()


def make_shared(width, seed=0):
  rng = np.random.default_rng(seed)
  gate, up = rng.normal(size=(2, width, H)).astype(np.float32)
  return gate, up, rng.normal(size=(H, width)).astype(np.float32)


@pytest.mark.parametrize('implementation', ['reference', 'training'])
def test_the_shared_swiglu_is_added(implementation):
  """To the bit what the two give that are added; also for a row without any."""
  inputs, shared = make_arrays(8), make_shared(2 * I + 1)
  inputs[3][0] = E
  run = functools.partial(api.expert_mlp, implementation=implementation)
  run = jax.jit(run)
  got = run(*inputs, shared=shared)
  swiglu = jax.jit(dense.swiglu)(inputs[0], *shared)
  np.testing.assert_array_equal(got, run(*inputs) + swiglu)
  x, gate, up, down = (a.astype(np.float64) for a in (inputs[0], *shared))
  gate, up = x @ gate.T, x @ up.T
  np.testing.assert_allclose(
    swiglu, (gate / (1 + np.exp(-gate)) * up) @ down.T, rtol=2e-5, atol=5e-5
  )


def test_bfloat16_stays_within_its_rounding():
  *arrays, weights = make_arrays(7)
  x, gate_up, down = (jnp.asarray(a, jnp.bfloat16) for a in arrays[:3])
  got = mlp(x, gate_up, down, arrays[3], weights)
  assert got.dtype == jnp.bfloat16
  want = expected(
    *(np.asarray(a, np.float32) for a in (x, gate_up, down)),
    arrays[3],
    weights,
  )
  scale = np.abs(want).max()
  # The activation and the result are each rounded once to 8 bits.
  np.testing.assert_allclose(
    np.asarray(got, np.float32), want, rtol=2**-8, atol=scale * 2**-8
  )


@pytest.mark.parametrize(
  'name,change',
  [
    ('x', dict(x=np.zeros((T, H, 1), np.float32))),
    ('x', dict(x=np.zeros((T, H), np.int32))),
    ('gate_up', dict(gate_up=np.zeros((E, 2 * I + 1, H), np.float32))),
    ('down', dict(down=np.zeros((E, H + 1, I), np.float32))),
    ('expert_ids', dict(expert_ids=np.zeros((T, K), np.float32))),
    ('expert_weights', dict(expert_weights=np.zeros((T, 1), np.float32))),
    ("implementation.*'reference'", dict(implementation='ragged')),
    ('shared', dict(shared=make_shared(3)[:2])),
    ('shared gate', dict(shared=(np.zeros((3, H + 1), np.float32),) * 3)),
    ('shared up', dict(shared=make_shared(3)[:1] + make_shared(4)[1:])),
    ('shared down', dict(shared=make_shared(3)[:2] + make_shared(4)[2:])),
    ('shared gate', dict(shared=[w.astype(np.int32) for w in make_shared(3)])),
  ],
)
def test_invalid_arguments_name_the_argument(name, change):
  names = ('x', 'gate_up', 'down', 'expert_ids', 'expert_weights')
  arguments = dict(zip(names, make_arrays(), strict=True))
  with pytest.raises(ValueError, match=f'^{name}'):
    api.expert_mlp(**(arguments | change))
