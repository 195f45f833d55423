"""Mosaic draft attention: interpreted on the CPU, and lowered for Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.draft_attention import (
  api,
  bench_cases,
  mosaic_gpu,
  reference,
)
from tests.kernels import draft_attention_test as plain_test

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
LAYER, D = plain_test.LAYER, 128
STATIC = {
  'scale': D**-0.5,
  'causal': False,
  'window': None,
  'window_from_root': False,
}
NAMES = (*STATIC, 'splits')


def make_inputs(slots, heads, group, capacity, lengths, seed=0):
  """In bfloat16, with NaN wherever nothing may be read."""
  shape = (2, capacity, heads, group, D)
  *values, lengths = plain_test.make_arrays(slots, lengths, shape, seed)
  return (*(jnp.asarray(a, jnp.bfloat16) for a in values), jnp.asarray(lengths))


@functools.partial(jax.jit, static_argnames=NAMES)
def attend(*inputs, splits, **static):
  return mosaic_gpu.draft_attention(
    *inputs, layer=LAYER, splits=splits, interpret=INTERPRET, **static
  )


def interpreted(*inputs, splits=1, **static):
  out = jax.block_until_ready(attend(*inputs, splits=splits, **STATIC | static))
  assert not gpu_callbacks.get_races().races_found
  return out


def error(value, truth):
  value = np.asarray(value.astype(jnp.float32), np.float64)
  return np.linalg.norm(value - truth) / np.linalg.norm(truth)


def check(inputs, splits=1, **static):
  """Per sequence no further from the truth than twice the reference."""
  out = interpreted(*inputs, splits=splits, **static)
  plain = reference.draft_attention(*inputs, layer=LAYER, **STATIC | static)
  *values, lengths = inputs
  values = (np.asarray(a.astype(jnp.float32)) for a in values)
  truth = plain_test.expected(*values, lengths, **STATIC | static)
  for of_row, of_plain, of_truth in zip(out, plain, truth, strict=True):
    assert error(of_row, of_truth) <= 2 * error(of_plain, of_truth)
  return out


def test_the_published_drafters_block():
  """Four heads of 16 slots are a tile."""
  check(make_inputs(16, 1, 4, 72, [65]))


def test_lengths_about_a_tile_in_splits():
  """Some splits have no key."""
  check(make_inputs(1, 2, 1, 72, [0, 1, 63, 64, 65, 72]), splits=2)


def test_more_tiles_than_fit_at_once_and_a_full_context():
  check(make_inputs(1, 1, 2, 456, [456]))


def test_more_heads_than_a_tile_and_odd_slots():
  """Three heads of 20 slots, padded to 24, are two tiles."""
  check(make_inputs(20, 1, 3, 8, [7]))


@pytest.mark.parametrize(
  'masks',
  (
    {'causal': True, 'window': 70},
    {'window': 3, 'window_from_root': True},
    {'window': 1},
  ),
  ids=str,
)
def test_masks(masks):
  check(make_inputs(7, 1, 1, 200, [197]), **masks)


def test_very_low_scores_and_a_scale_below_zero():
  """All scores are about -1e4, and maxima rise from tile to tile."""
  query, context, rows, lengths = make_inputs(2, 1, 2, 256, [250])
  ramp = jnp.asarray(np.linspace(-200, -100, 250), jnp.bfloat16)
  query = query.at[..., -1].set(-64.0)
  context = context.at[LAYER, 0, :250, D - 1].set(ramp)
  rows = rows.at[..., D - 1].set(-99)
  check((query, context, rows, lengths), scale=-1.0)


def test_same_bits_twice_and_whatever_others_hold():
  inputs = make_inputs(2, 1, 1, 72, [3, 65])
  out = interpreted(*inputs)
  np.testing.assert_array_equal(interpreted(*inputs), out)
  query, context, rows, lengths = inputs
  query, context = query.at[1].set(jnp.nan), context.at[:, 0, 3:].set(7)
  changed = interpreted(query, context, rows, lengths)
  np.testing.assert_array_equal(changed[0], out[0])
  assert np.isnan(changed[1].astype(jnp.float32)).all()


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


def test_bench_cases_have_the_shapes_they_name():
  for case in bench_cases.cases():
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
