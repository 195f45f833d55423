"""The Mosaic experts: interpreted on the CPU, and lowered for a Hopper GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dense
from pallas_kernels.case import INTERPRET
from pallas_kernels.expert_mlp import (
  api,
  cases,
  mosaic_dispatch,
  mosaic_gpu,
  tiles,
)
from pallas_kernels.expert_mlp import reference as plain
from tests.kernels import witness

H, I, E, K = cases.HIDDEN, cases.INNER, cases.EXPERTS, cases.CHOICES  # noqa: E741
DENSE, GROUPED, CLUSTER = cases.DENSE, cases.GROUPED, cases.CLUSTER


def make_inputs(rows, shared=0):
  inputs = cases.small_inputs(rows, None, shared, jax.random.key(0))
  return inputs if shared else inputs[:5]


def interpreted(config, *inputs):
  run = functools.partial(cases.run_small, config=config, interpret=INTERPRET)
  return witness.run(run, *inputs)


def silu(x):
  return x / (1 + np.exp(-x))


def exact(x, gate_up, down, ids, weights, shared=None):
  """The same in float64, the activation not rounded."""
  x, gate_up, down, weights, shared = jax.tree.map(
    lambda a: np.asarray(a).astype(np.float64),
    (x, gate_up, down, weights, shared),
  )
  out = np.zeros(x.shape)
  if shared:
    gate, up, back = shared
    out = (silu(x @ gate.T) * (x @ up.T)) @ back.T
  for t, k in np.ndindex(ids.shape):
    e = int(ids[t, k])
    if 0 <= e < len(down):
      gate, up = np.split(gate_up[e] @ x[t], 2)
      out[t] += weights[t, k] * (down[e] @ (silu(gate) * up))
  return out


@pytest.mark.parametrize(
  'case',
  [
    pytest.param(
      case,
      id=case.name,
      marks=[pytest.mark.slow] * case.name.startswith('slow'),
    )
    for case in cases.small_cases()
  ],
)
def test_case(case):
  witness.check_close(case, exact)


@pytest.mark.parametrize(('rows', 'taken'), [(1, 0), (127, 0), (128, 1)])
def test_who_computes_shared_experts(rows, taken):
  mesh = AbstractMesh(
    (), (), abstract_device=AbstractDevice('NVIDIA H200', 132, 'gpu')
  )
  with jax.sharding.use_abstract_mesh(mesh):
    assert tiles.tile_config(rows, 6, 64).takes_shared == bool(taken)


NOT_TAKEN = dataclasses.replace(GROUPED, takes_shared=False)


@pytest.mark.parametrize(
  ('config', 'lacks'), [(DENSE, 0), (NOT_TAKEN, 0), (GROUPED, 1)]
)
def test_shared_experts_that_are_left_to_xla(config, lacks):
  """Of few tokens, by the plan, or if they are no multiple of an expert."""
  *inputs, shared = make_inputs(3, shared=2)
  gate, up, down = shared
  width = 2 * I - lacks
  shared = gate[:width], up[:width], down[:, :width]
  mine = interpreted(config, *inputs, shared)
  routed = interpreted(config, *inputs)
  np.testing.assert_array_equal(
    mine, jax.jit(lambda x: routed + dense.swiglu(x, *shared))(inputs[0])
  )


def test_rows_that_xla_groups_have_the_same_bits(monkeypatch):
  """As the thousands of rows of a prefill; by a plan that is not compiled."""
  *inputs, _ = make_inputs(21, shared=1)
  wanted = interpreted(GROUPED, *inputs)
  monkeypatch.setattr(mosaic_dispatch, 'why_not', lambda *sizes: 'asked')
  found = interpreted(dataclasses.replace(GROUPED, stages=2), *inputs)
  np.testing.assert_array_equal(found, wanted)


def test_bits_do_not_depend_on_the_other_rows():
  """Alone, among few, among many, in either form; and a second time."""
  x, gate_up, down, ids, weights = make_inputs(24)
  few = [
    interpreted(config, x[:rows], gate_up, down, ids[:rows], weights[:rows])
    for config, rows in ((DENSE, 1), (DENSE, 8), (CLUSTER, 24))
  ]
  again = interpreted(CLUSTER, x, gate_up, down, ids, weights)
  np.testing.assert_array_equal(few[-1], again)
  for result in few[:-1]:
    np.testing.assert_array_equal(result, few[-1][: len(result)])


def test_bits_with_shared_experts_do_not_depend_on_the_other_rows():
  x, gate_up, down, ids, weights, shared = make_inputs(24, shared=2)
  few, many = (
    interpreted(config, x[:n], gate_up, down, ids[:n], weights[:n], shared)
    for config, n in ((GROUPED, 5), (CLUSTER, 24))
  )
  np.testing.assert_array_equal(few, many[:5])


@pytest.mark.parametrize(
  'config', [pytest.param(DENSE, marks=pytest.mark.slow), GROUPED]
)
def test_nan_stays_in_its_row(config):
  x, *rest = make_inputs(8, shared=1)
  clean = interpreted(config, x, *rest)
  spoilt = interpreted(config, x.at[2].set(jnp.nan), *rest)
  others = np.arange(8) != 2
  np.testing.assert_array_equal(clean[others], spoilt[others])


@pytest.mark.parametrize(
  'cut', [pytest.param(DENSE, marks=pytest.mark.slow), GROUPED]
)
def test_nan_in_an_expert_reaches_only_those_that_chose_it(cut):
  x, gate_up, down, ids, weights, shared = make_inputs(8, shared=1)
  others = (np.asarray(ids) != 1).all(axis=1)
  assert others.any() and not others.all()
  rest = ids, weights, shared
  clean = interpreted(cut, x, gate_up, down, *rest)
  spoilt = interpreted(cut, x, gate_up, down.at[1].set(jnp.nan), *rest)
  np.testing.assert_array_equal(clean[others], spoilt[others])
  assert np.isnan(np.asarray(spoilt, np.float32)[~others]).all()


def lower(function, *shapes):
  """Lowers for an H200, which this machine need not have."""
  device = AbstractDevice('NVIDIA H200', 132, 'gpu')
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=device)
  ):
    jax.jit(function).trace(*shapes).lower(lowering_platforms=('cuda',))


def shapes(rows, choices, experts, hidden, inner):
  struct = jax.ShapeDtypeStruct
  return (
    struct((rows, hidden), jnp.bfloat16),
    struct((experts, 2 * inner, hidden), jnp.bfloat16),
    struct((experts, hidden, inner), jnp.bfloat16),
    struct((rows, choices), jnp.int32),
    struct((rows, choices), jnp.float32),
  )


@pytest.mark.parametrize('rows', [1, 65, 2048])
@pytest.mark.parametrize('model', [(6, 64, 2048, 1408), (8, 256, 7168, 2048)])
def test_lowers_at_real_shapes(rows, model):
  lower(mosaic_gpu.expert_mlp, *shapes(rows, *model))


@pytest.mark.parametrize(
  ('rows', 'model'),
  [(n, (6, 64, 2048, 1408)) for n in (257, 1025)]
  + [(129, (8, 256, 7168, 2048))],
)
def test_lowers_with_shared_experts(rows, model):
  """Moonlight's two and DeepSeek-V3's one."""
  choices, _, hidden, inner = model
  width = inner * (2 if choices == 6 else 1)
  struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
  wide = struct((width, hidden))
  shared = wide, wide, struct((hidden, width))
  lower(mosaic_gpu.expert_mlp, *shapes(rows, *model), shared)


@pytest.mark.parametrize('rows', [5, 2000])
def test_lowers_at_odd_shapes(rows):
  """Odd numbers of tiles in both products, every word of the mask."""
  lower(
    mosaic_gpu.expert_mlp, *shapes(rows, 3, 384 if rows == 5 else 9, 320, 448)
  )


@pytest.mark.parametrize(
  ('change', 'reason'),
  [
    ({'dtype': jnp.float32}, 'bfloat16'),
    ({'hidden': 96}, 'multiples of 64'),
    ({'experts': 385}, '385 experts'),
    ({'choices': 9}, '9 a token'),
    ({'rows': 0}, 'nothing to multiply'),
  ],
)
def test_says_what_is_not_supported(change, reason):
  size = {'rows': 4, 'choices': 2, 'experts': 4, 'hidden': 64, 'inner': 64}
  dtype = change.pop('dtype', jnp.bfloat16)
  inputs = [
    jax.ShapeDtypeStruct(s.shape, dtype if s.dtype == jnp.bfloat16 else s.dtype)
    for s in shapes(**size | change)
  ]
  assert reason in mosaic_gpu.why_not(*inputs[:4])
  with pytest.raises(ValueError, match=reason):
    jax.eval_shape(mosaic_gpu.expert_mlp, *inputs)


def test_named_on_a_cpu_raises():
  with pytest.raises(ValueError, match='Hopper'):
    api.expert_mlp(*make_inputs(2), implementation='mosaic_gpu')


def test_derivative_is_the_references(monkeypatch):
  monkeypatch.setattr(
    mosaic_gpu, 'run', lambda *inputs: plain.expert_mlp(*inputs)
  )
  x, *rest = make_inputs(3, shared=1)

  def loss(mlp, x):
    return jnp.sum(mlp(x, *rest).astype(jnp.float32))

  mine = jax.grad(functools.partial(loss, mosaic_gpu.expert_mlp))(x)
  theirs = jax.grad(functools.partial(loss, plain.expert_mlp))(x)
  np.testing.assert_array_equal(mine, theirs)
