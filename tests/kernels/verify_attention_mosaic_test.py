"""Mosaic attention: interpreted on the CPU, and lowered for a Hopper GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import _bits, _combine, _hopper
from pallas_kernels.case import INTERPRET
from pallas_kernels.verify_attention import (
  api,
  block,
  cases,
  mosaic_gpu,
)
from tests.kernels import witness

R, LAYER = cases.SMALL_VALUE_DIM, cases.LAYER
SCALE = 192**-0.5


def visible(inputs):
  """Which new rows a node sees, `[B, N, N]`."""
  batch, n = inputs[0].shape[:2]
  if len(inputs) > 4:
    return np.asarray(_bits.unpack_bits(inputs[4], n))
  return np.tril(np.ones((batch, n, n), bool))


def exact(*inputs, scale=SCALE):
  """Softmax over exactly the visible rows, in float64."""
  mask = visible(inputs)
  query, cache, rows, lengths = (
    np.asarray(a).astype(np.float64) for a in inputs[:4]
  )
  out = np.zeros((*query.shape[:3], R))
  for b, i in np.ndindex(query.shape[:2]):
    prefix = cache[LAYER, b, : int(lengths[b])]
    keys = np.concatenate([prefix, rows[b, mask[b, i]]])
    if len(keys):
      scores = scale * query[b, i] @ keys.T
      weights = np.exp(scores - scores.max(axis=1, keepdims=True))
      weights /= weights.sum(axis=1, keepdims=True)
      out[b, i] = weights @ keys[:, :R]
  return out


@pytest.mark.filterwarnings('ignore:invalid value encountered in matmul')
@pytest.mark.parametrize(
  'case', cases.small_cases(), ids=lambda case: case.name
)
def test_case(case):
  scale = case.kernel.keywords['scale']
  witness.check_close(case, functools.partial(exact, scale=scale))


@pytest.mark.parametrize('splits', [1, 2, 7, 26, 132])
def test_splits_are_equal_and_as_equal_in_new_tiles(splits):
  for prefix, new in itertools.product(range(70), range(1, 9)):
    ends = np.arange(splits + 1, dtype=np.int32)
    starts = np.stack(block._starts(*np.int32((prefix, new)), ends, splits))
    assert not starts[:, 0].any() and starts[:, -1].tolist() == [prefix, new]
    counts = np.diff(starts)
    assert (counts >= 0).all() and np.ptp(counts.sum(axis=0)) <= 1
    assert new > prefix or np.ptp(counts[1]) <= 1


def interpreted(*inputs, **options):
  run = functools.partial(cases.attend_small, interpret=INTERPRET, **options)
  return witness.run(run, *inputs)


def check_reach(inputs, places, value, **options):
  """Poisons new rows `[(sequence, node, columns)]`, all at once.

  A node that sees one gets NaN, the others keep their bits.
  """
  want, mask = interpreted(*inputs, **options), visible(inputs)
  query, cache, rows, *rest = inputs
  reached = np.zeros(mask.shape[:2], bool)
  for b, node, columns in places:
    rows = rows.at[b, node, columns].set(value)
    reached[b] |= mask[b, :, node]
  got = interpreted(query, cache, rows, *rest, **options)
  np.testing.assert_array_equal(got[~reached], want[~reached])
  assert reached.any() and not reached.all()
  assert np.isnan(np.asarray(got, np.float32)[reached]).all()


ALL, LATENT, ROPE = slice(None), 7, R + 63


@pytest.mark.filterwarnings('ignore:invalid value encountered in matmul')
@pytest.mark.parametrize(
  ('value', 'columns'),
  [(jnp.nan, LATENT), (jnp.nan, ROPE), (jnp.inf, ALL), (-jnp.inf, ALL)],
)
@pytest.mark.parametrize('chain', [False, True])
def test_what_is_not_finite_reaches_only_those_that_see_it(
  value, columns, chain
):
  """After an odd prefix, in a batch whose last sequence has none."""
  inputs = cases.small_inputs(9, 2, 72, [65, 3, 0], chain, jax.random.key(5))
  check_reach(inputs, [(0, 5, columns), (2, 8, columns)], value)


def test_what_is_not_finite_in_tiles_of_a_chain():
  """On a block's own tile, on one of two heads, in splits."""
  inputs = cases.small_inputs(75, 2, 136, [63], True, jax.random.key(0))
  check_reach(inputs, [(0, 40, LATENT)], jnp.nan, splits=2)
  check_reach(inputs, [(0, 70, LATENT)], jnp.nan)


def test_a_committed_row_that_is_not_finite():
  """All nodes of its sequence see it, in a full tile or in the last one."""
  inputs = cases.small_inputs(
    5, 2, 136, [129, 129, 70], False, jax.random.key(0)
  )
  want, (query, cache, *rest) = interpreted(*inputs), inputs
  cache = cache.at[LAYER, 0, 7, 3].set(jnp.nan)
  cache = cache.at[LAYER, 2, 69, 3].set(jnp.nan)
  got = interpreted(query, cache, *rest)
  np.testing.assert_array_equal(got[1], want[1])
  assert np.isnan(got[jnp.array([0, 2])].astype(jnp.float32)).all()


@pytest.mark.parametrize('splits', [2, 3, _combine.FEW_SPLITS, 9, 37])
@pytest.mark.parametrize('num_rows', [1, 7])
@pytest.mark.parametrize('multiprocessors', [1, 28])
def test_combine(splits, num_rows, multiprocessors, monkeypatch):
  """Rows by the handful in a warpgroup, or in parts of their columns.

  One is of a split that saw nothing; not all splits were written.
  """
  monkeypatch.setattr(_hopper, 'MULTIPROCESSORS', multiprocessors)
  rng = np.random.default_rng(splits)
  dim = R if splits <= _combine.FEW_SPLITS else 3 * R
  part = rng.normal(size=(splits, 2, num_rows, dim))
  lse = rng.normal(size=(splits, 2, num_rows)) * 8
  lse[0, 0, 0], lse[:, 1, 0], part[:, 1, 0] = -np.inf, -np.inf, 0
  used = np.int32([splits, rng.integers(1, splits)])
  part[used[1] :, 1] = lse[used[1] :, 1] = np.nan
  counts = np.arange(splits)[:, None, None] < used[:, None]
  known = np.where(counts, lse, -np.inf)
  with np.errstate(invalid='ignore'):
    weights = np.exp2(known - known.max(axis=0))
  weights = np.nan_to_num(weights / weights.sum(axis=0))[..., None]
  truth = (weights * np.where(counts[..., None], part, 0)).sum(axis=0)
  # The last row comes first.
  found = _combine.combine(
    jnp.asarray(part, jnp.float32),
    jnp.asarray(lse, jnp.float32),
    num_rows,
    INTERPRET,
    used=jnp.asarray(used),
    source=lambda row: num_rows - 1 - row,
    kernel_name='combine',
  )
  np.testing.assert_allclose(found, truth[:, ::-1], rtol=1e-5, atol=1e-5)
  assert not gpu_callbacks.get_races().races_found


def test_same_bits_twice_and_whatever_others_hold():
  key = jax.random.key(3)
  inputs = cases.small_inputs(9, 2, 72, [3, 65], False, key)
  query, _, rows, _, _ = inputs
  run = functools.partial(cases.attend_small, interpret=INTERPRET)
  interpreted = functools.partial(witness.run, run)
  out = interpreted(*inputs)
  np.testing.assert_array_equal(interpreted(*inputs), out)
  # A row large enough to move the maxima of those that see it, and a neighbour
  # in the batch that is NaN all over.
  rows, query = rows.at[0, 5].set(30), query.at[1].set(jnp.nan)
  changed = interpreted(query, inputs[1], rows, *inputs[3:])
  blind = ~visible(inputs)[0, :, 5]
  np.testing.assert_array_equal(out[0, blind], changed[0, blind])
  assert np.any(out[0, ~blind] != changed[0, ~blind])
  assert np.isnan(changed[1].astype(jnp.float32)).all()


H200 = AbstractDevice('NVIDIA H200', 132, 'gpu')


def lower(batch, n, heads, capacity, chain=False, value_dim=512):
  """Lowers for CUDA; returns the program's text."""
  width = value_dim + 64
  arrays = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for shape in (
      (batch, n, heads, width),
      (2, batch, capacity, width),
      (batch, n, width),
    )
  ]
  arrays.append(jax.ShapeDtypeStruct((batch,), jnp.int32))
  if not chain:
    arrays.append(jax.ShapeDtypeStruct((batch, n, -(-n // 32)), jnp.uint32))

  def run(query, cache, rows, lengths, ancestors=None):
    return mosaic_gpu.verify_attention(
      query,
      cache,
      rows,
      lengths,
      layer=LAYER,
      value_dim=value_dim,
      scale=SCALE,
      ancestors=ancestors,
    )

  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=H200)
  ):
    traced = jax.jit(run).trace(*arrays)
    return traced.lower(lowering_platforms=('cuda',)).as_text()


@pytest.mark.parametrize(
  ('batch', 'n', 'heads', 'capacity', 'chain', 'value_dim'),
  [
    pytest.param(1, 64, 64, 32768, False, 512, marks=pytest.mark.slow),
    (1, 17, 16, 4096, False, 512),
    (1, 1, 64, 32768, False, 512),
    (1, 1025, 128, 8192, False, 512),
    pytest.param(1, 2048, 16, 4096, True, 512, marks=pytest.mark.slow),
    (3, 1, 1, 8, True, 384),
    (2, 5, 20, 1000, False, 128),
  ],
)
def test_lowers_for_hopper(batch, n, heads, capacity, chain, value_dim):
  text = lower(batch, n, heads, capacity, chain, value_dim)
  assert 'mosaic_gpu' in text


@pytest.mark.parametrize(
  ('row_tiles', 'key_tiles', 'splits'),
  [(64, 513, 2), (16, 513, 8), (5, 65, 22), (1, 513, 129), (2050, 140, 1)],
)
def test_splits_fill_the_multiprocessors(row_tiles, key_tiles, splits):
  assert mosaic_gpu._num_splits(1, row_tiles, key_tiles, 512) == splits


def test_timed_cases_have_the_shapes_they_name():
  for case in filter(lambda case: case.timed, cases.cases()):
    shapes = jax.eval_shape(case.make_inputs, jax.random.key(0))
    query, cache, *_ = shapes
    heads, nodes = query.shape[2], query.shape[1]
    assert case.name.startswith(f'{heads} heads')
    assert str(nodes) in case.name
    assert mosaic_gpu.why_not(query, cache, value_dim=512) is None
    assert case.flops > 0 and case.bytes > 0


@pytest.mark.parametrize(
  ('dtype', 'width', 'value_dim', 'capacity', 'reason'),
  [
    ('float32', 576, 512, 64, 'bfloat16'),
    ('bfloat16', 160, 128, 64, 'rope'),
    ('bfloat16', 160, 96, 64, 'value_dim'),
    ('bfloat16', 704, 640, 64, 'value_dim'),
    ('bfloat16', 192, 128, 60, 'multiple of 8'),
    ('bfloat16', 192, 128, 0, 'multiple of 8'),
  ],
)
def test_what_it_does_not_take(dtype, width, value_dim, capacity, reason):
  query = jnp.zeros((1, 2, 3, width), dtype)
  cache = jnp.zeros((1, 1, capacity, width), dtype)
  arguments = (query, cache, query[:, :, 0], jnp.zeros((1,), jnp.int32))
  options = dict(layer=0, value_dim=value_dim, scale=1.0, ancestors=None)
  with pytest.raises(ValueError, match=f'^implementation.*{reason}'):
    mosaic_gpu.verify_attention(*arguments, **options)
  with pytest.raises(ValueError, match='^implementation.*mosaic_gpu here'):
    api.verify_attention(*arguments, **options, implementation='mosaic_gpu')
  assert api.verify_attention(*arguments, **options).dtype == dtype
