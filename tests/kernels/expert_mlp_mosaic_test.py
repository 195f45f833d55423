"""The Mosaic experts: interpreted on the CPU, and lowered for a Hopper GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dense
from pallas_kernels.expert_mlp import (
  api,
  bench_cases,
  mosaic_dispatch,
  mosaic_gpu,
  tiles,
)
from pallas_kernels.expert_mlp import reference as plain

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
H, I, E, K = 192, 64, 5, 2  # noqa: E741  (three and one tiles of 64)
TileConfig = functools.partial(
  tiles.TileConfig, blocks=2, stages=3, groups=2, takes_shared=True
)
DENSE = TileConfig(dense=True, columns=16, consumers=1)
GROUPED = TileConfig(dense=False, columns=16, consumers=1)
WIDE = TileConfig(dense=False, columns=16, consumers=2)
CLUSTER = dataclasses.replace(WIDE, cluster=2)


def make_inputs(rows, ids=None, seed=0, shared=0):
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  x, gate_up, down = draw(rows, H), draw(E, 2 * I, H), draw(E, H, I)
  if ids is None:
    ids = rng.integers(-1, E + 2, (rows, K))
  weights = jnp.asarray(rng.uniform(0.5, 1.5, (rows, K)), jnp.float32)
  inputs = x, gate_up, down, jnp.asarray(ids, jnp.int32), weights
  if not shared:
    return inputs
  width = shared * I
  return *inputs, (draw(width, H), draw(width, H), draw(H, width))


@functools.partial(jax.jit, static_argnums=0)
def interpreted(config, *inputs):
  return mosaic_gpu.run(*inputs, config=config, interpret=INTERPRET)


def silu(x):
  return x / (1 + np.exp(-x))


def exact(x, gate_up, down, ids, weights, shared=None):
  """The same in float64, the activation not rounded."""
  x, gate_up, down, weights, shared = jax.tree.map(
    lambda a: np.asarray(a.astype(jnp.float32), np.float64),
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


def error(value, truth):
  value = np.asarray(value.astype(jnp.float32), np.float64)
  return np.linalg.norm(value - truth) / np.linalg.norm(truth)


def check_against_float64(config, inputs):
  truth = exact(*inputs)
  mine = error(interpreted(config, *inputs), truth)
  assert mine <= 2 * error(plain.expert_mlp(*inputs), truth)


@pytest.mark.parametrize(
  ('config', 'rows'),
  [
    pytest.param(DENSE, 1, marks=pytest.mark.slow),
    (DENSE, 11),
    (GROUPED, 21),
    pytest.param(WIDE, 45, marks=pytest.mark.slow),
    (CLUSTER, 45),
  ],
)
def test_error_is_that_of_plain_bfloat16(config, rows):
  """Ids at random: repeats, experts without rows, ids of no expert."""
  check_against_float64(config, make_inputs(rows))


SPLITS = {
  'all rows on one expert': np.tile([3, E], (40, 1)),
  'one row each': np.stack([np.arange(40) % E, np.full(40, -1)], 1),
  'the same expert twice': np.full((40, 2), 2),
}


@pytest.mark.parametrize(
  'split',
  [
    pytest.param(name, marks=[pytest.mark.slow] * name.endswith('twice'))
    for name in SPLITS
  ],
)
def test_any_split_of_rows_over_experts(split):
  check_against_float64(WIDE, make_inputs(40, SPLITS[split]))


@pytest.mark.parametrize(
  'config', [DENSE, pytest.param(GROUPED, marks=pytest.mark.slow)]
)
def test_rows_of_no_expert_are_zero(config):
  inputs = make_inputs(4, np.full((4, K), E))
  assert not np.any(interpreted(config, *inputs))


@pytest.mark.parametrize(
  ('config', 'rows', 'shared'),
  [
    (GROUPED, 21, 2),
    pytest.param(WIDE, 45, 1, marks=pytest.mark.slow),
    (CLUSTER, 45, 2),
  ],
)
def test_shared_experts_are_added(config, rows, shared):
  check_against_float64(config, make_inputs(rows, shared=shared))


def test_rows_of_no_expert_have_the_shared_ones():
  inputs = make_inputs(4, np.full((4, K), E), shared=2)
  check_against_float64(GROUPED, inputs)


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


def test_bench_cases_are_distinct_and_traceable():
  cases = bench_cases.cases()
  assert len({case.name for case in cases}) == len(cases)
  for case in cases:
    inputs = jax.eval_shape(case.make_inputs, jax.random.key(0))
    assert jax.eval_shape(case.reference, *inputs).shape == inputs[0].shape
    assert dataclasses.astuple(case)[-2:] > (0, 0)
