"""Quantised checkpoints: both fixtures, and every way to malform one."""

import copy
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtree_jax import api, generation
from kdtree_jax.decode import init_state
from kdtree_jax.decode.drivers import decode_calls
from kdtree_jax.errors import UserError
from kdtree_jax.io import huggingface as hf
from kdtree_jax.io.tensors import (
  CheckpointError,
  MappingSource,
  SafetensorsSource,
)
from pallas_kernels.quantized import QuantizedArray
from tests import support
from tests.io import fixtures, quantize
from tests.io.fixtures import DATA

INT4, FP8 = QUANTIZED = ('kimi_k25_int4', 'deepseek_v3_fp8')


def tensors_of(name):
  source = SafetensorsSource(DATA / name)
  return {n: source.read(n) for n in source.names()}


def load(name, tensors, config=None, **options):
  raw = config or json.loads((DATA / name / 'config.json').read_text())
  return hf.target_params(
    hf.model_config(raw, 'c.json'),
    MappingSource(tensors),
    options.pop('dtype', jnp.float32),
    source_name='the-file',
    quantization=hf.quantization(raw, 'c.json'),
    extras=hf.read_extras(raw, 'c.json'),
    **options,
  )


@pytest.mark.parametrize('name', QUANTIZED)
def test_expanded_is_what_transformers_computed(name):
  """As stored: tests/model; those and these are the same numbers."""
  target, wanted = api.load_target(DATA / name, weights='float32'), None
  wanted = support.expected(name)
  assert not any(isinstance(x, QuantizedArray) for x in leaves(target.params))
  logits = generation.forward_logits(target, wanted['input_ids'])
  assert support.relative_error(logits, wanted['logits']) < 5e-5
  stored = generation.forward_logits(support.fixture(name), wanted['input_ids'])
  assert support.relative_error(logits, stored) < 1e-6
  result = generation.generate(
    target, None, wanted['input_ids'], max_new_tokens=24, stop_ids=()
  )
  assert result.output_ids == wanted['greedy_ids'][-24:].tolist()


def leaves(params):
  return jax.tree.leaves(
    params, is_leaf=lambda x: isinstance(x, QuantizedArray)
  )


@pytest.mark.parametrize(
  ('name', 'drafter'),
  (
    (INT4, 'random'),
    (FP8, 'oracle'),
    pytest.param(INT4, 'oracle', marks=pytest.mark.slow),
    pytest.param(FP8, 'random', marks=pytest.mark.slow),
  ),
)
def test_every_method_gives_the_tokens_of_ar_with_weights_as_stored(
  name, drafter
):
  target, wanted = support.fixture(name), support.expected(name)
  prompt, golden = wanted['input_ids'], wanted['greedy_ids']
  loaded = api.load_drafter(drafter, target, 5)
  for policy, budget in (('chain', 4), ('best_first', 12)):
    result = generation.generate(
      target,
      loaded,
      prompt,
      max_new_tokens=16,
      tree_budget=budget,
      tree_policy=policy,
      stop_ids=(),
      golden_ids=golden,
    )
    assert result.output_ids == golden[len(prompt) :][:16].tolist()
    if drafter == 'oracle':
      assert result.acceptance_lengths == [5, 5, 5, 5]


def test_which_weights_stay_quantised():
  kimi = support.fixture(INT4).params
  stacks = kimi['layers_1']['mlp']['experts']
  assert stacks['gate_up_proj'].format == 'int4'
  assert stacks['gate_up_proj'].shape == (8, 128, 64)
  assert stacks['gate_up_proj'].scales.dtype == jnp.bfloat16
  assert stacks['down_proj'].block == (1, 32)
  assert sum(isinstance(x, QuantizedArray) for x in leaves(kimi)) == 4
  deepseek = support.fixture(FP8).params
  stacks = deepseek['layers_1']['mlp']['experts']
  assert stacks['gate_up_proj'].parts == 2
  assert stacks['gate_up_proj'].scales.shape == (4, 4, 2)
  attention = deepseek['layers_0']['self_attn']
  assert attention['q_b_proj']['weight'].format == 'fp8'
  # Blocks of scales do not end where heads do.
  assert attention['k_b_proj'].dtype == jnp.float32


@pytest.mark.parametrize('name', QUANTIZED)
def test_values_are_the_exact_products(name):
  """Against a decoder that shares nothing with the reader."""
  raw, params = tensors_of(name), load(name, tensors_of(name))
  prefix = 'language_model.' if name == INT4 else ''
  prefix += 'model.layers.1.mlp.experts.'
  experts = params['layers_1']['mlp']['experts']
  stack = experts['gate_up_proj'].dequantize(jnp.float32)
  for expert, projection, half in ((0, 'gate_proj', 0), (3, 'up_proj', 1)):
    got = np.split(np.asarray(stack[expert]), 2)[half]
    stem = f'{prefix}{expert}.{projection}.weight'
    assert np.array_equal(got, decode(raw, stem))
  down = experts['down_proj'][2].dequantize(jnp.float32)
  assert np.array_equal(down, decode(raw, f'{prefix}2.down_proj.weight'))


def decode(raw, stem):
  if stem in raw:
    scale = raw[stem + '_scale_inv']
    values = raw[stem].astype(np.float32)
    for (o, i), _ in np.ndenumerate(values):
      values[o, i] *= scale[o // 128, i // 128]
    return values
  # The other reading of the format: bytes, low nibble first.
  octets = raw[stem + '_packed'].view(np.uint8)
  nibbles = np.stack([octets & 15, octets >> 4], axis=-1)
  values = nibbles.reshape(len(octets), -1).astype(np.float32) - 8
  scale = raw[stem + '_scale'].astype(np.float32)
  return values * np.repeat(scale, 32, axis=1)


@pytest.mark.parametrize(
  ('name', 'stored', 'expanded'),
  [
    (INT4, 's32[8,128,8]', ('f32[8,128,64]', 'f32[8,64,64]')),
    (FP8, 'f8e4m3fn[4,272,160]', ('f32[4,272,160]', 'f32[4,160,136]')),
  ],
)
def test_the_loop_never_holds_all_experts_expanded(name, stored, expanded):
  target = support.fixture(name)
  options = generation.GenerateOptions(capacity=32, prefill_chunk=4)
  engine = generation.make_engine(target, None, 0, options)
  params = {'target': target.params, 'drafter': {}}
  state = init_state(engine, [[1]], [4], (), target.dtype)
  call = decode_calls(engine, params, state)[1]
  text = call.lower().compile().as_text()
  assert stored in text, 'the pattern is stale'
  assert not any(shape in text for shape in expanded)


def test_bfloat16_rounds_products_once():
  stored = load(FP8, tensors_of(FP8), dtype=jnp.bfloat16)
  plain = load(
    FP8, tensors_of(FP8), dtype=jnp.bfloat16, weights_dtype=jnp.bfloat16
  )
  rounded = load(FP8, tensors_of(FP8), weights_dtype=jnp.bfloat16)
  for path in (('o_proj', 'weight'), ('k_b_proj',)):
    a, b, c = (
      tree['layers_0']['self_attn'] for tree in (stored, plain, rounded)
    )
    for key in path:
      a, b, c = a[key], b[key], c[key]
    if isinstance(a, QuantizedArray):
      a = a.dequantize(jnp.bfloat16)
    assert a.dtype == b.dtype == jnp.bfloat16 and c.dtype == jnp.float32
    assert np.array_equal(a, b) and np.array_equal(b.astype(c.dtype), c)
  assert plain['layers_1']['mlp']['gate']['weight'].dtype == jnp.float32


def test_tensors_may_lie_in_any_shard(tmp_path):
  """A float8 weight in one shard, its scales in another."""
  raw = tensors_of(FP8)
  scales = {k: v for k, v in raw.items() if k.endswith('_scale_inv')}
  rest = {k: v for k, v in raw.items() if k not in scales}
  raw_shard(tmp_path / 'a.safetensors', rest)
  raw_shard(tmp_path / 'b.safetensors', scales)
  weight_map = dict.fromkeys(rest, 'a.safetensors')
  weight_map |= dict.fromkeys(scales, 'b.safetensors')
  index = tmp_path / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))
  config = (DATA / FP8 / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(config)
  target = api.load_target(tmp_path)
  jax.tree.map(
    np.testing.assert_array_equal, target.params, support.fixture(FP8).params
  )


def raw_shard(path, tensors):
  """Written by hand: safetensors takes no float8 from NumPy."""
  names = {'float8_e4m3fn': 'F8_E4M3', 'float32': 'F32', 'bfloat16': 'BF16'}
  header, offset = {}, 0
  for name, value in tensors.items():
    header[name] = {
      'dtype': names[value.dtype.name],
      'shape': list(value.shape),
      'data_offsets': [offset, offset + value.nbytes],
    }
    offset += value.nbytes
  text = json.dumps(header).encode()
  data = b''.join(value.tobytes() for value in tensors.values())
  path.write_bytes(len(text).to_bytes(8, 'little') + text + data)


def test_a_written_checkpoint_in_int4(tmp_path):
  """Our own writer, another group size, no weight_shape, no wrapper."""
  raw = fixtures.load('moonlight')
  config = fixtures.raw_config('moonlight')
  settings = settings_of(INT4)
  group = settings['config_groups']['group_0']['weights']
  group['group_size'] = 8
  config['quantization_config'] = settings
  exact = dict(raw)
  for name in list(raw):
    if '.experts.' in name and '.layers.1.' in name:
      packed, scale, exact[name] = quantize.int4(raw.pop(name), group=8)
      raw[name + '_packed'], raw[name + '_scale'] = packed, scale
  got = load('moonlight', raw, config, weights_dtype=jnp.float32)
  wanted = load('moonlight', exact)
  jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_progress_counts_every_byte_that_is_used():
  seen = []
  target = api.load_target(DATA / FP8, progress=seen.append)
  source = SafetensorsSource(DATA / FP8)
  raw = hf.read_json(DATA / FP8 / 'config.json')
  match = hf.match_target(
    target.config,
    source,
    source_name='x',
    quantization=hf.quantization(raw),
    extras=hf.read_extras(raw),
  )
  assert sum(seen) == sum(source.view(n).nbytes for n in match.names.values())
  assert all('layers.2' in name for name in match.skipped)


@pytest.mark.parametrize(
  ('weights', 'dtype', 'match'),
  [
    ('int4', 'float32', "weights='int4' is none of as_stored"),
    ('float32', 'bfloat16', 'finer than dtype=bfloat16'),
  ],
)
def test_weights_that_cannot_be(weights, dtype, match):
  with pytest.raises(UserError, match=match):
    api.load_target(DATA / FP8, dtype, weights)


# ------------------------------------------------------------------ faults

EXPERT = 'language_model.model.layers.1.mlp.experts.3.up_proj.weight'
ROUTER_BIAS = 'language_model.model.layers.1.mlp.gate.e_score_correction_bias'
LINEAR = 'model.layers.0.self_attn.o_proj.weight'
FAULTS = {
  'packed width': (
    INT4,
    lambda t: t.update({EXPERT + '_packed': t[EXPERT + '_packed'][:, :-1]}),
    r'up_proj.weight_packed. has shape \[64, 7\], the config asks for \[64, 8',
  ),
  'packed dtype': (
    INT4,
    lambda t: t.update(
      {EXPERT + '_packed': t[EXPERT + '_packed'].astype(np.int64)}
    ),
    'has dtype I64; supported: I32',
  ),
  'scale shape': (
    INT4,
    lambda t: t.update({EXPERT + '_scale': t[EXPERT + '_scale'].T}),
    r'weight_scale. has shape \[2, 64\], the config asks for \[64, 2\]',
  ),
  'scale missing': (
    INT4,
    lambda t: t.pop(EXPERT + '_scale'),
    'weight_scale. is missing',
  ),
  'packed missing': (
    INT4,
    lambda t: t.pop(EXPERT + '_packed'),
    r"experts\.3\.up_proj\.weight' is missing",
  ),
  'scale NaN': (
    INT4,
    lambda t: t[EXPERT + '_scale'].__setitem__((0, 0), np.nan),
    'up_proj.weight_scale. holds NaN or infinity',
  ),
  'scale too large': (
    INT4,
    lambda t: t[EXPERT + '_scale'].__setitem__((0, 0), 1e38),
    'up_proj.weight_scale. holds .* or products that are too large',
  ),
  'fp8 scale too large': (
    FP8,
    lambda t: t[LINEAR + '_scale_inv'].__setitem__((0, 0), -1e36),
    'o_proj.weight_scale_inv. holds .* or products that are too large',
  ),
  'bias NaN': (
    INT4,
    lambda t: t[ROUTER_BIAS].__setitem__(2, np.nan),
    'e_score_correction_bias. holds NaN',
  ),
  'stated shape': (
    INT4,
    lambda t: t[EXPERT + '_shape'].__setitem__(1, 63),
    r'weight_shape. is \[64, 63\], but the packed weight is \[64, 64\]',
  ),
  'zero point': (
    INT4,
    lambda t: t.update({EXPERT + '_zero_point': t[EXPERT + '_packed']}),
    'weight_zero_point. is not part of this architecture',
  ),
  'packed and plain': (
    INT4,
    lambda t: t.update({EXPERT: np.zeros((64, 64), np.float32)}),
    r"up_proj\.weight' is not part of this architecture",
  ),
  'one expert plain': (
    INT4,
    lambda t: (
      [t.pop(EXPERT + part) for part in ('_packed', '_scale', '_shape')]
      and t.update({EXPERT: np.zeros((64, 64), np.float32)})
    ),
    'not stored as the other experts',
  ),
  'one scale float32': (
    INT4,
    lambda t: t.update({EXPERT + '_scale': np.ones((64, 2), np.float32)}),
    'not stored as the other experts',
  ),
  'fp8 scale shape': (
    FP8,
    lambda t: t.update({LINEAR + '_scale_inv': np.ones((1, 1), np.float32)}),
    r'weight_scale_inv. has shape \[1, 1\], the config asks for \[2, 1\]',
  ),
  'fp8 scale missing': (
    FP8,
    lambda t: t.pop(LINEAR + '_scale_inv'),
    'o_proj.weight_scale_inv. is missing',
  ),
  'fp8 scale infinite': (
    FP8,
    lambda t: t[LINEAR + '_scale_inv'].__setitem__((1, 0), np.inf),
    'o_proj.weight_scale_inv. holds NaN or infinity',
  ),
  'fp8 NaN': (
    FP8,
    lambda t: t[LINEAR].view(np.uint8).__setitem__((3, 4), 0xFF),
    r"o_proj\.weight' holds NaN",
  ),
  'fp8 scale without weight': (
    FP8,
    lambda t: t.update({LINEAR: np.zeros((160, 40), np.float32)}),
    'weight_scale_inv. is not part',
  ),
  'fp8 head': (
    FP8,
    lambda t: t.update({'lm_head.weight': np.zeros((96, 160), quantize.FP8)}),
    'has dtype F8_E4M3; supported: F32, BF16, F16',
  ),
}


@pytest.mark.parametrize('case', FAULTS)
def test_tensors_that_are_refused(case):
  name, spoil, match = FAULTS[case]
  tensors = tensors_of(name)
  spoil(tensors)
  with pytest.raises(CheckpointError, match=f'the-file: .*{match}') as info:
    load(name, tensors)
  assert '\n' not in str(info.value)


def settings_of(name):
  raw = json.loads((DATA / name / 'config.json').read_text())
  raw = raw.get('text_config', raw)
  return copy.deepcopy(raw['quantization_config'])


def weights_key(**change):
  settings = settings_of(INT4)
  settings['config_groups']['group_0']['weights'] |= change
  return settings


SETTINGS = [
  ({'quant_method': 'awq', 'bits': 4}, 'is AWQ, unsupported; supported: com'),
  ({'quant_method': 'gptq'}, 'is GPTQ'),
  ({'quant_method': 'mxfp4'}, 'is MXFP4'),
  ({'quant_method': 'modelopt', 'quant_algo': 'NVFP4'}, "ModelOpt 'NVFP4'"),
  ({'quant_method': 'x'}, "is 'x'"),
  ({}, None),
  (settings_of(INT4) | {'format': 'nvfp4-pack-quantized'}, 'is NVFP4'),
  (settings_of(INT4) | {'format': 'mxfp4-pack-quantized'}, 'is MXFP4'),
  (settings_of(INT4) | {'format': 'odd'}, "is 'odd'"),
  (settings_of(INT4) | {'config_groups': {}}, 'not one group'),
  (settings_of(INT4) | {'kv_cache_scheme': {'num_bits': 8}}, 'kv_cache_scheme'),
  (settings_of(INT4) | {'sparsity_config': {'format': 'x'}}, 'sparsity_config'),
  (weights_key(symmetric=False), 'is asymmetric INT4'),
  (weights_key(num_bits=8), '8 bits'),
  (weights_key(type='float'), "4 bits of type 'float'"),
  (weights_key(strategy='channel'), "strategy is 'channel'; only 'group'"),
  (weights_key(actorder='group'), 'actorder'),
  (weights_key(dynamic=True), 'dynamic'),
  (weights_key(group_size=12), 'group_size is 12'),
  (weights_key(group_size=None), 'group_size is missing'),
  (weights_key(odd=1), 'odd'),
  (settings_of(FP8) | {'fmt': 'e5m2'}, "is 'e5m2'"),
  (settings_of(FP8) | {'activation_scheme': 'static'}, 'activation_scheme'),
  (settings_of(FP8) | {'weight_block_size': [128]}, 'no block'),
  (settings_of(FP8) | {'weight_block_size': [0, 128]}, 'no block'),
  (settings_of(FP8) | {'weight_block_size': None}, 'is missing'),
  ('odd', "quantization_config is 'odd', no object"),
]


@pytest.mark.parametrize(
  ('settings', 'match'), SETTINGS, ids=range(len(SETTINGS))
)
def test_settings_that_are_refused(settings, match):
  raw = fixtures.raw_config('moonlight', quantization_config=settings)
  if match is None:
    assert hf.quantization(raw) is None
    return
  for function in (hf.quantization, hf.model_config):
    with pytest.raises(CheckpointError, match=f'c.json: .*{match}') as info:
      function(raw, 'c.json')
    assert str(info.value).isprintable()


def test_settings_may_lie_in_the_wrapper_but_must_agree():
  raw = json.loads((DATA / INT4 / 'config.json').read_text())
  found = hf.quantization(raw)
  assert (found.format, found.block) == ('int4', (1, 32))
  moved = copy.deepcopy(raw)
  moved['quantization_config'] = moved['text_config'].pop('quantization_config')
  assert hf.quantization(moved) == found
  moved['text_config']['quantization_config'] = weights_key(group_size=64)
  with pytest.raises(CheckpointError, match='disagree'):
    hf.quantization(moved)


def test_a_config_that_contradicts_the_tensors():
  plain = json.loads((DATA / FP8 / 'config.json').read_text())
  del plain['quantization_config']
  with pytest.raises(CheckpointError, match='stored as fp8, but the config'):
    load(FP8, tensors_of(FP8), plain)
  plain['quantization_config'] = settings_of(INT4)
  with pytest.raises(CheckpointError, match='the config states int4'):
    load(FP8, tensors_of(FP8), plain)
  raw = fixtures.raw_config('moonlight', quantization_config=settings_of(FP8))
  with pytest.raises(CheckpointError, match='no tensor is stored so'):
    load('moonlight', fixtures.load('moonlight'), raw)
  kimi = json.loads((DATA / INT4 / 'config.json').read_text())
  kimi['text_config']['quantization_config'] = weights_key(group_size=48)
  with pytest.raises(CheckpointError, match='groups of 48 do not divide'):
    load(INT4, tensors_of(INT4), kimi)


def test_junk_of_the_fixtures_is_skipped_with_a_reason():
  for name, reasons in (
    (INT4, {'rotary buffer', 'vision'}),
    (FP8, {'multi-token prediction'}),
  ):
    raw = hf.read_json(DATA / name / 'config.json')
    match = hf.match_target(
      hf.model_config(raw),
      SafetensorsSource(DATA / name),
      source_name=name,
      quantization=hf.quantization(raw),
      extras=hf.read_extras(raw),
    )
    assert set(match.skipped.values()) == reasons


def test_float8_survives_a_mapping():
  """The header's offsets, the map and ml_dtypes: not safetensors' NumPy."""
  value = SafetensorsSource(DATA / FP8).view(LINEAR)
  assert value.dtype == ml_dtypes.float8_e4m3fn and not value.flags.writeable
  with pytest.raises((AttributeError, TypeError, safetensors.SafetensorError)):
    safetensors.numpy.load_file(DATA / FP8 / 'model.safetensors')
