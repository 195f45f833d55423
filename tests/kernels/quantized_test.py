"""Quantised weights: what they stand for, and the experts' op on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense import matmul
from pallas_kernels.expert_mlp.api import expert_mlp
from pallas_kernels.quantized import QuantizedArray, dequantize
from tests.io import quantize


def weights(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(weight, form, parts=1):
  """A stack `[E, O, I]` of weights, each part quantised by itself."""
  values, scales, exact = [], [], []
  for expert in weight:
    for part in np.split(expert, parts):
      for into, one in zip(
        (values, scales, exact), getattr(quantize, form)(part), strict=True
      ):
        into.append(one)

  def stack(arrays):
    whole = np.concatenate(arrays)
    return whole.reshape(len(weight), -1, whole.shape[-1])

  block = (1, 32) if form == 'int4' else (128, 128)
  array = QuantizedArray(
    jnp.asarray(stack(values)), jnp.asarray(stack(scales)), form, block, parts
  )
  return array, stack(exact)


@pytest.mark.parametrize(
  ('form', 'shape', 'parts'),
  [
    ('int4', (1, 5, 64), 1),
    ('int4', (3, 6, 96), 2),
    ('fp8', (1, 128, 128), 1),
    ('fp8', (2, 130, 257), 1),
    ('fp8', (2, 272, 140), 2),
    ('fp8', (1, 3, 5), 1),
  ],
)
def test_values_times_scales_exactly(form, shape, parts):
  array, exact = quantized(weights(*shape), form, parts)
  array.check('w')
  assert array.shape == shape and array.ndim == 3
  for got in (array.dequantize(jnp.float32), dequantize(array, jnp.float32)):
    assert np.array_equal(got, exact)
  one = jax.jit(lambda a, i: a[i].dequantize(jnp.bfloat16))(array, shape[0] - 1)
  assert np.array_equal(one, jnp.asarray(exact[-1]).astype(jnp.bfloat16))


def test_nibbles_are_little_endian_and_offset_by_eight():
  word = np.uint32(0xFEDCBA98).view(np.int32).reshape(1, 1)
  array = QuantizedArray(
    jnp.asarray(word), jnp.full((1, 1), 0.5), 'int4', (1, 8)
  )
  wanted = np.arange(8) * 0.5
  assert np.array_equal(array.dequantize(jnp.float32)[0], wanted)


def test_every_float8_value_is_itself():
  codes = np.arange(256, dtype=np.uint8).view(quantize.FP8).reshape(2, 128)
  array = QuantizedArray(
    jnp.asarray(codes), jnp.ones((1, 1)), 'fp8', (128, 128)
  )
  got = np.asarray(array.dequantize(jnp.float32))
  wanted = codes.astype(np.float32)
  assert np.array_equal(got, wanted, equal_nan=True)
  assert np.nanmax(got) == 448 and np.isnan(got).sum() == 2


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('form', ['int4', 'fp8'])
def test_experts_on_quantised_weights(form, dtype):
  """The same bits as on the expanded weights: only when differs."""
  gate_up, gate_up_exact = quantized(weights(4, 2 * 64, 160), form, 2)
  down, down_exact = quantized(weights(4, 160, 64, seed=1), form)
  x = jnp.asarray(weights(5, 160, seed=2)).astype(dtype)
  ids = jnp.asarray([[0, 3], [1, 1], [4, 4], [2, 0], [3, 9]], jnp.int32)
  mix = jnp.asarray(weights(5, 2, seed=3))
  run = jax.jit(expert_mlp)
  got = run(x, gate_up, down, ids, mix)
  plain = [jnp.asarray(w).astype(dtype) for w in (gate_up_exact, down_exact)]
  assert got.dtype == dtype
  assert np.array_equal(got, run(x, *plain, ids, mix))
  mixed = run(x, gate_up, plain[1], ids, mix)
  assert np.array_equal(got, mixed)


def test_linear_maps_on_quantised_weights():
  array, exact = quantized(weights(1, 130, 257), 'fp8')
  x = jnp.asarray(weights(2, 3, 257))
  got = jax.jit(matmul)(x, array[0])
  assert np.array_equal(got, jax.jit(matmul)(x, jnp.asarray(exact[0])))


def test_a_loop_does_not_hold_the_expanded_weights():
  array, _ = quantized(weights(1, 256, 1024), 'fp8')

  def loop(x, w):
    return jax.lax.fori_loop(
      0, 9, lambda _, x: jnp.tanh(matmul(x, w)[:, :1].repeat(1024, 1)), x
    )

  x = jnp.ones((2, 1024))
  text = jax.jit(loop).lower(x, array[0]).compile().as_text()
  (carried,) = (line for line in text.splitlines() if ' while(' in line)
  assert 'f8e4m3fn[256,1024]' in carried
  assert 'f32[256,1024]' not in carried


BAD = {
  'format': ({'format': 'int3'}, "unknown format 'int3'"),
  'dtype': ({'values': jnp.zeros((4, 128, 20))}, 'int4 values as int32'),
  'scales': ({'scales': jnp.zeros((4, 128, 4))}, r'scales of shape \[4, 128'),
  'scale dtype': (
    {'scales': jnp.zeros((4, 128, 5), jnp.int32)},
    'scales of dtype int32',
  ),
  'parts': ({'parts': 3}, 'not 3 equal parts'),
}


@pytest.mark.parametrize('case', BAD)
def test_malformed_quantised_weights(case):
  change, match = BAD[case]
  gate_up, _ = quantized(weights(4, 2 * 64, 160), 'int4', 2)
  down, _ = quantized(weights(4, 160, 64), 'int4')
  fields = {k: getattr(gate_up, k) for k in gate_up.__dataclass_fields__}
  broken = QuantizedArray(**fields | change)
  ids, mix = jnp.zeros((5, 2), jnp.int32), jnp.zeros((5, 2))
  with pytest.raises(ValueError, match=f'gate_up: .*{match}'):
    expert_mlp(jnp.zeros((5, 160)), broken, down, ids, mix)
  with pytest.raises(ValueError, match=r'gate_up: expected shape \[4, 128'):
    expert_mlp(jnp.zeros((5, 96)), gate_up, weights(4, 96, 64), ids, mix)
  with pytest.raises(ValueError, match='mosaic_gpu'):
    expert_mlp(
      jnp.zeros((5, 160)), gate_up, down, ids, mix, implementation='mosaic_gpu'
    )
