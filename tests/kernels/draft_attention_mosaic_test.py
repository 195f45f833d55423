"""Mosaic draft attention: interpreted on the CPU, and lowered for Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.case import INTERPRET
from pallas_kernels.draft_attention import (
  api,
  cases,
  mosaic_gpu,
)
from tests.kernels import draft_attention_test as plain_test
from tests.kernels import witness

LAYER, D = cases.LAYER, 128
STATIC = cases.SMALL_STATIC


def exact(*inputs, layer, implementation, **static):
  """The op in float64."""
  del layer, implementation
  *values, lengths = inputs
  values = (np.asarray(a).astype(np.float32) for a in values)
  return plain_test.expected(*values, lengths, **static)


@pytest.mark.parametrize(
  'case', cases.small_cases(), ids=lambda case: case.name
)
def test_case(case):
  truth = functools.partial(exact, **case.reference.keywords)
  witness.check_close(case, truth)


def interpreted(*inputs, **static):
  run = functools.partial(cases.attend_small, interpret=INTERPRET, **static)
  return witness.run(run, *inputs)


def poisoned(query, context, rows, row, column, value):
  """One value of a row of the first sequence, in its context or its block."""
  if row < 197:
    return query, context.at[LAYER, 0, row, column].set(value), rows
  return query, context, rows.at[0, row - 197, column].set(value)


@pytest.mark.filterwarnings('ignore:invalid value encountered in matmul')
@pytest.mark.parametrize(
  ('masks', 'splits'),
  (
    ({'causal': True, 'window': 70}, 1),
    ({'window': 3, 'window_from_root': True}, 1),
    ({'window': 3}, 2),
    ({}, 1),
  ),
  ids=str,
)
def test_what_is_not_finite_reaches_only_those_that_see_it(masks, splits):
  """One value of a row: of its key or of its value, of each of two heads.

  The row is in a tile that all slots see, or some, or none, or in the block;
  the second sequence stays, with infinities from its length on.
  """
  query, context, rows, lengths = cases.small_inputs(
    7, 2, 1, 200, [197, 66], jax.random.key(7)
  )
  context = context.at[LAYER, 1, 66:].set(jnp.inf)
  out = interpreted(query, context, rows, lengths, splits=splits, **masks)
  assert np.isfinite(np.float32(out)).all()
  for places in (
    ((5, 3, jnp.nan), (130, 3 * D + 7, -jnp.inf)),
    ((195, 2 * D + 127, jnp.nan), (197 + 5, D, jnp.nan)),
    ((197 + 4, 2 * D, jnp.nan),),
  ):
    changed = query, context, rows
    for row, column, value in places:
      changed = poisoned(*changed, row, column, value)
    got = np.asarray(
      interpreted(*changed, lengths, splits=splits, **masks), np.float32
    )
    # What the definition, in float64 on visible rows alone, makes of it.
    bad = (np.asarray(a).astype(np.float32) for a in changed)
    with np.errstate(invalid='ignore'):
      truth = plain_test.expected(*bad, lengths, **STATIC | masks)
    reached = ~np.isfinite(truth).all(axis=-1)
    np.testing.assert_array_equal(got[~reached], np.float32(out)[~reached])
    assert not np.isfinite(got[reached]).all(axis=-1).any()


def test_same_bits_twice_and_whatever_others_hold():
  inputs = cases.small_inputs(2, 1, 1, 72, [3, 65], jax.random.key(0))
  run = functools.partial(cases.attend_small, interpret=INTERPRET)
  interpreted = functools.partial(witness.run, run)
  out = interpreted(*inputs)
  np.testing.assert_array_equal(interpreted(*inputs), out)
  query, context, rows, lengths = inputs
  query, context = query.at[1].set(jnp.nan), context.at[:, 0, 3:].set(7)
  changed = interpreted(query, context, rows, lengths)
  np.testing.assert_array_equal(changed[0], out[0])
  assert np.isnan(np.float32(changed[1])).all()


H200 = AbstractDevice('NVIDIA H200', 132, 'gpu')


@pytest.mark.parametrize(
  ('batch', 'slots', 'heads', 'group', 'capacity', 'masks'),
  (
    (1, 16, 8, 4, 32832, {}),
    (3, 16, 4, 8, 4160, {'causal': True, 'window': 2048}),
    (1, 7, 1, 5, 8, {'window': 4, 'window_from_root': True}),
    (1, 64, 1, 1, 64, {'causal': True}),
  ),
)
def test_lowers_for_hopper(batch, slots, heads, group, capacity, masks):
  width = 2 * heads * D
  arrays = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for shape in (
      (batch, slots, heads, group, D),
      (2, batch, capacity, width),
      (batch, slots, width),
    )
  ]
  arrays.append(jax.ShapeDtypeStruct((batch,), jnp.int32))
  run = functools.partial(
    mosaic_gpu.draft_attention, layer=LAYER, **STATIC | masks
  )
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=H200)
  ):
    traced = jax.jit(run).trace(*arrays)
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert 'mosaic_gpu' in text


@pytest.mark.parametrize(
  ('row_tiles', 'key_tiles', 'splits'),
  ((8, 514, 16), (8, 66, 11), (1, 2, 1), (128, 514, 1)),
)
def test_splits_fill_the_multiprocessors(row_tiles, key_tiles, splits):
  assert mosaic_gpu._num_splits(row_tiles, key_tiles) == splits


def test_timed_cases_have_the_shapes_they_name():
  for case in filter(lambda case: case.timed, cases.cases()):
    query, context, *_ = jax.eval_shape(case.make_inputs, jax.random.key(0))
    assert case.name.startswith(f'{query.shape[1]} slots')
    assert mosaic_gpu.why_not(query, context) is None


@pytest.mark.parametrize(
  ('dtype', 'slots', 'dim', 'capacity', 'reason'),
  (
    ('float32', 16, 128, 64, 'bfloat16'),
    ('bfloat16', 16, 64, 64, 'heads of 128'),
    ('bfloat16', 65, 128, 64, 'slots'),
    ('bfloat16', 16, 128, 60, 'multiple of 8'),
    ('bfloat16', 16, 128, 0, 'multiple of 8'),
  ),
)
def test_what_it_does_not_take(dtype, slots, dim, capacity, reason):
  query = jnp.zeros((1, slots, 2, 3, dim), dtype)
  context = jnp.zeros((1, 1, capacity, 4 * dim), dtype)
  rows = jnp.zeros((1, slots, 4 * dim), dtype)
  arguments = (query, context, rows, jnp.zeros((1,), jnp.int32))
  with pytest.raises(ValueError, match=f'^implementation.*{reason}'):
    mosaic_gpu.draft_attention(*arguments, layer=0, **STATIC)
  with pytest.raises(ValueError, match='^implementation.*mosaic_gpu here'):
    api.draft_attention(
      *arguments, layer=0, **STATIC, implementation='mosaic_gpu'
    )
  run = functools.partial(api.draft_attention, layer=0, **STATIC)
  assert jax.eval_shape(run, *arguments).dtype == dtype
