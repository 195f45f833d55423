"""Checkpoints of Hugging Face: configs, names, shapes, and refusals."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from kdtree_jax import api
from kdtree_jax.config import DrafterConfig, ModelConfig, RopeScaling
from kdtree_jax.errors import UserError
from kdtree_jax.io import huggingface as hf
from kdtree_jax.io.checkpoint_extras import NO_EXTRAS
from kdtree_jax.io.finite import all_finite
from kdtree_jax.io.tensors import (
  CheckpointError,
  MappingSource,
  SafetensorsSource,
)
from kdtree_jax.model.rope import amplitude, inverse_frequencies
from kdtree_jax.model.transformer import abstract_params
from tests.io import fixtures
from tests.io.fixtures import DATA, raw_config

YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 128,
  'beta_fast': 8,
  'beta_slow': 1,
  'mscale': 1.0,
  'mscale_all_dim': 1.0,
}


def signature(tree):
  return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype).name), dict(tree))


def load_target(name, tensors, dtype=jnp.float32, extras=NO_EXTRAS, **changes):
  config = hf.model_config(raw_config(name, **changes))
  source = MappingSource(tensors)
  return hf.target_params(
    config, source, dtype, source_name='toy', extras=extras
  )


def equal(a, b):
  assert signature(a) == signature(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', fixtures.TARGETS)
def test_every_tensor_of_a_target_is_consumed(name, dtype):
  config = hf.model_config(hf.read_json(DATA / name / 'config.json'))
  source = SafetensorsSource(DATA / name)
  match = hf.match_target(config, source, source_name=name)
  assert set(match.names.values()) == set(source.names())
  assert not match.skipped
  assert {k: source.shape(k) for k in source.names()} == hf.tensor_shapes(
    config
  )
  params = hf.target_params(config, source, dtype, source_name=name)
  assert signature(params) == signature(abstract_params(config, dtype))


def test_values_arrive_where_they_belong():
  raw = fixtures.load('deepseek_v3')
  params = load_target('deepseek_v3', raw)
  layer, prefix = params['layers_1'], 'model.layers.1.'
  same = np.testing.assert_array_equal
  same(params['embed_tokens']['weight'], raw['model.embed_tokens.weight'])
  same(params['norm']['weight'], raw['model.norm.weight'])
  kv_b = raw[prefix + 'self_attn.kv_b_proj.weight']
  for head in range(4):
    rows = kv_b[head * 22 : (head + 1) * 22]
    same(layer['self_attn']['k_b_proj'][head], rows[:12].T)
    same(layer['self_attn']['v_b_proj'][head], rows[12:])
  for expert in (0, 15):
    one = f'{prefix}mlp.experts.{expert}.'
    gate_up = layer['mlp']['experts']['gate_up_proj'][expert]
    same(gate_up[:24], raw[one + 'gate_proj.weight'])
    same(gate_up[24:], raw[one + 'up_proj.weight'])
    down = layer['mlp']['experts']['down_proj'][expert]
    same(down, raw[one + 'down_proj.weight'])
  same(layer['mlp']['gate']['weight'], raw[prefix + 'mlp.gate.weight'])


def fuse(raw):
  """A fixture's tensors as transformers 5 holds them in memory."""
  fused = {k: v for k, v in raw.items() if '.mlp.experts.' not in k}
  layers = {k.split('.mlp.')[0] for k in raw if '.mlp.experts.' in k}
  for layer in layers:
    prefix = layer + '.mlp.experts.'
    count = sum(k.startswith(prefix) for k in raw) // 3

    def stack(name, prefix=prefix, count=count):
      names = [f'{prefix}{i}.{name}.weight' for i in range(count)]
      return np.stack([raw[n] for n in names])

    gate_up = np.concatenate([stack('gate_proj'), stack('up_proj')], axis=1)
    fused[prefix + 'gate_up_proj'] = gate_up
    fused[prefix + 'down_proj'] = stack('down_proj')
  return fused


@pytest.mark.parametrize('name', ['deepseek_v3', 'deepseek_v2_lite'])
def test_fused_experts_give_the_same_parameters(name):
  raw = fixtures.load(name)
  equal(load_target(name, fuse(raw)), load_target(name, raw))


@pytest.mark.parametrize(
  'rename',
  [
    lambda n: 'language_model.' + n,
    lambda n: n.replace('model.', 'model.language_model.', 1),
  ],
)
def test_prefixes_of_multimodal_exports(rename):
  raw = fixtures.load('moonlight')
  renamed = {rename(k): v for k, v in raw.items()}
  renamed['vision_tower.x'] = renamed['mm_projector.y'] = np.zeros(1)
  extras = hf.Extras(vision=True)
  equal(
    load_target('moonlight', renamed, extras=extras),
    load_target('moonlight', raw),
  )


def test_shards_with_an_index_give_the_same_parameters(tmp_path):
  raw = fixtures.load('glm4_moe_lite')
  names = sorted(raw)
  shards = {
    f'model-{i}-of-3.safetensors': {n: raw[n] for n in names[i::3]}
    for i in range(3)
  }
  fixtures.write_shards(tmp_path, shards)
  config = hf.model_config(raw_config('glm4_moe_lite'))
  source = SafetensorsSource(tmp_path)
  params = hf.target_params(config, source, jnp.float32, source_name='x')
  equal(params, load_target('glm4_moe_lite', raw))


MTP = ('eh_proj', 'enorm', 'hnorm', 'shared_head.norm', 'self_attn.o_proj')
INV_FREQ = 'self_attn.rotary_emb.inv_freq'
JUNK = {
  f'model.layers.0.{INV_FREQ}': 'rotary buffer',
  'vision_tower.a': 'vision',
} | {f'model.layers.2.{part}.weight': 'multi-token prediction' for part in MTP}
ALL_EXTRAS = hf.Extras(mtp_layers=1, vision=True)


def match_with(junk, extras, **changes):
  config = hf.model_config(raw_config('moonlight', **changes))
  tensors = fixtures.load('moonlight')
  source = MappingSource(tensors | dict.fromkeys(junk, np.zeros(3, np.int8)))
  return hf.match_target(config, source, source_name='x', extras=extras)


def test_skipped_tensors_are_named_with_a_reason():
  assert match_with(JUNK, ALL_EXTRAS).skipped == JUNK


UNJUSTIFIED = {
  'no vision': (
    JUNK,
    hf.Extras(mtp_layers=1),
    "'vision_tower.a' is not part .*: the config has no vision_config",
  ),
  'vision in the language model': (
    ['language_model.model.vision_tower.a'],
    ALL_EXTRAS,
    'vision_tower.a. is not part of this architecture$',
  ),
  'no MTP layer announced': (
    JUNK,
    hf.Extras(vision=True),
    r"'model.layers.2.eh_proj.weight' .*num_hidden_layers is 2, .*"
    r'\(num_nextn_predict_layers\).* \(and 4 more: .*enorm.*, \.\.\.\)',
  ),
  'more MTP layers than announced': (
    [*JUNK, *(name.replace('.2.', '.3.') for name in JUNK if '.2.' in name)],
    ALL_EXTRAS,
    "'model.layers.3.eh_proj.weight' is not part",
  ),
  'a layer without the projection of an MTP layer': (
    set(JUNK) - {'model.layers.2.eh_proj.weight'},
    ALL_EXTRAS,
    "'model.layers.2.enorm.weight' is not part",
  ),
  'an MTP layer with a part that none has': (
    [*JUNK, 'model.layers.2.odd.weight'],
    ALL_EXTRAS,
    "'model.layers.2.odd.weight' is not part",
  ),
  'a rotary buffer of a layer that is not there': (
    [f'model.layers.7.{INV_FREQ}'],
    ALL_EXTRAS,
    'inv_freq. is not part',
  ),
  'a rotary buffer outside of attention': (
    ['model.layers.0.mlp.rotary_emb.inv_freq'],
    ALL_EXTRAS,
    'inv_freq. is not part',
  ),
}


@pytest.mark.parametrize('case', UNJUSTIFIED)
def test_what_the_config_does_not_announce_is_not_skipped(case):
  junk, extras, match = UNJUSTIFIED[case]
  with pytest.raises(CheckpointError, match=match) as info:
    match_with(junk, extras)
  assert '\n' not in str(info.value)


def test_what_a_config_announces():
  def extras(name='moonlight', **changes):
    return hf.read_extras(raw_config(name, **changes), 'c.json')

  assert extras() == hf.Extras()
  assert extras('deepseek_v3_fp8') == hf.Extras(mtp_layers=1)
  assert extras('kimi_k25_int4') == hf.Extras(vision=True)
  assert extras('kimi_k25_int4', vision_config=None) == hf.Extras()
  # The family's own class says 1, but V2 has no such layers.
  assert extras(num_nextn_predict_layers=None).mtp_layers == 1
  v2 = extras('deepseek_v2_lite', num_nextn_predict_layers=None)
  assert v2.mtp_layers == 0
  # Only the wrapper of a multimodal model has vision.
  assert not extras(vision_config={'depth': 3}).vision
  with pytest.raises(CheckpointError, match=r"c\.json: num_nextn.* is '1'"):
    extras(num_nextn_predict_layers='1')


def test_layers_that_the_config_does_not_count_are_refused(tmp_path):
  """Nothing tells them from a truncated model: both are listed."""
  raw = raw_config('deepseek_v3', num_hidden_layers=2)
  raw['num_nextn_predict_layers'] = 1
  tensors = fixtures.load('deepseek_v3')
  tensors.pop('model.norm.weight')
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors')
  with pytest.raises(
    CheckpointError,
    match=r"'model.norm.weight' is missing, expected \[64\]; tensor "
    r"'model.layers.2.input_layernorm.weight' is not part.* num_hidden_layers "
    r'is 2, .* \(and 61 more: ',
  ):
    api.load_target(tmp_path)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding():
  raw = fixtures.load('moonlight')
  tied = {'tie_word_embeddings': True}
  with pytest.raises(
    CheckpointError,
    match="toy: tensor 'lm_head.weight' differs from 'model.embed_tokens"
    r".weight', .* set tie_word_embeddings to false",
  ):
    load_target('moonlight', raw, **tied)
  head = raw.pop('lm_head.weight')
  embedding = raw['model.embed_tokens.weight']
  wanted = load_target('moonlight', raw, **tied)
  assert 'lm_head' not in wanted
  with pytest.raises(CheckpointError, match="'lm_head.weight' is missing"):
    load_target('moonlight', raw)
  equal(
    load_target('moonlight', raw | {'lm_head.weight': embedding}, **tied),
    wanted,
  )
  with pytest.raises(
    CheckpointError, match=r"'lm_head.weight' has shape \[129"
  ):
    load_target('moonlight', raw | {'lm_head.weight': head[:-1]}, **tied)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('stored', [np.float32, ml_dtypes.bfloat16, np.float16])
def test_plain_weights_that_are_not_finite_are_refused(value, stored):
  """Wherever they are: a norm, an expert, a router and its bias."""
  for name in (
    'model.norm.weight',
    'model.layers.1.mlp.experts.5.down_proj.weight',
    'model.layers.1.mlp.gate.weight',
    'model.layers.1.mlp.gate.e_score_correction_bias',
  ):
    tensors = fixtures.load('moonlight')
    tensors[name] = tensors[name].astype(stored)
    tensors[name].flat[-1] = value
    with pytest.raises(
      CheckpointError, match=f"toy: tensor '{name}' holds NaN or infinity"
    ):
      load_target('moonlight', tensors)


def test_a_weight_that_overflows_the_dtype_is_refused():
  tensors = fixtures.load('moonlight')
  tensors[NORM][3] = 3.4e38
  load_target('moonlight', tensors)
  with pytest.raises(CheckpointError, match=f"'{NORM}' .* large for bfloat16"):
    load_target('moonlight', tensors, jnp.bfloat16)


@pytest.mark.parametrize(
  'dtype',
  [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn],
)
def test_finite_is_what_numpy_calls_so(dtype):
  """Of patterns all over the range and of the last finite ones, times 16."""
  largest = ml_dtypes.finfo(dtype).max
  size, limit = np.dtype(dtype).itemsize, int(largest.view(bits_of(dtype)))
  edges = [limit - 1, limit, limit + 1, (1 << 8 * size - 1) - 1]
  step = max(1, (1 << 8 * size) // 1021)
  bits = np.r_[edges, np.arange(0, 1 << 8 * size, step)]
  bits = np.r_[bits, bits | 1 << 8 * size - 1].astype(bits_of(dtype))
  with np.errstate(all='ignore'):
    for value in bits.view(dtype)[:, None]:
      wide = value.astype(np.float64)[0]
      assert all_finite(value) == np.isfinite(wide)
      # To within the rounding of a sixteenth.
      product = abs(wide) * 16 / float(largest)
      assert not product < 1 or all_finite(value, 16)
      assert product <= 1 or not all_finite(value, 16)
  assert all_finite(value[:0]) and all_finite(np.zeros((2, 1, 3), dtype))


def bits_of(dtype):
  return f'u{np.dtype(dtype).itemsize}'


def test_attention_biases():
  config = dataclasses.replace(fixtures.CONFIG, attention_bias=True)
  tensors = fixtures.random_tensors(hf.tensor_shapes(config))
  source = MappingSource(tensors)
  params = hf.target_params(config, source, jnp.float32, source_name='x')
  assert signature(params) == signature(abstract_params(config, jnp.float32))
  assert params['layers_0']['self_attn']['o_proj']['bias'].shape == (16,)


@pytest.mark.parametrize('stored', [ml_dtypes.bfloat16, np.float16])
def test_stored_dtypes_are_cast_and_the_router_stays_float32(stored):
  raw = fixtures.load('moonlight')
  low = {k: v.astype(stored) for k, v in raw.items()}
  params = load_target('moonlight', low, jnp.bfloat16)
  gate = params['layers_1']['mlp']['gate']
  assert gate['weight'].dtype == jnp.float32
  stored_gate = low['model.layers.1.mlp.gate.weight'].astype(np.float32)
  np.testing.assert_array_equal(gate['weight'], stored_gate)
  norm = low['model.norm.weight'].astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(np.asarray(params['norm']['weight']), norm)


def test_parameters_do_not_share_the_memory_of_their_source():
  raw = fixtures.load('moonlight')
  params = load_target('moonlight', raw)
  raw['model.norm.weight'][:] = 7
  assert not (np.asarray(params['norm']['weight']) == 7).any()


GATE_UP = 'model.layers.1.mlp.experts.gate_up_proj'
NORM = 'model.norm.weight'
WEIGHT_FAULTS = {
  'missing': (lambda t: t.pop(NORM), "'model.norm.weight' is missing"),
  'missing expert': (
    lambda t: t.pop('model.layers.1.mlp.experts.5.up_proj.weight'),
    r"experts\.5\.up_proj\.weight' is missing, expected \[24, 64\]",
  ),
  'extra': (
    lambda t: t.update({'model.extra.weight': t[NORM]}),
    "'model.extra.weight' is not part of this architecture",
  ),
  'extra expert': (
    lambda t: t.update(
      {'model.layers.1.mlp.experts.6.up_proj.weight': t[NORM]}
    ),
    r"experts\.6\.up_proj\.weight' is not part",
  ),
  'bias': (
    lambda t: t.update({'model.layers.0.self_attn.o_proj.bias': t[NORM]}),
    "o_proj.bias' is not part",
  ),
  'inv_freq elsewhere': (
    lambda t: t.update({'rotary_emb.inv_freq': t[NORM]}),
    "'rotary_emb.inv_freq' is not part",
  ),
  'shape': (
    lambda t: t.update({NORM: t[NORM][:-1]}),
    r"'model.norm.weight' has shape \[63\], the config asks for \[64\]",
  ),
  'rank': (
    lambda t: t.update({NORM: t[NORM][None]}),
    r'has shape \[1, 64\]',
  ),
  'dtype': (
    lambda t: t.update({NORM: t[NORM].astype(np.int32)}),
    'has dtype I32; supported: F32, BF16, F16',
  ),
  'double': (
    lambda t: t.update({NORM: t[NORM].astype(np.float64)}),
    'has dtype F64; supported',
  ),
  'two names': (
    lambda t: t.update({'language_model.' + NORM: t[NORM]}),
    'are two names of one parameter',
  ),
  'fused and not': (
    lambda t: t.update(
      {
        GATE_UP: np.zeros((6, 48, 64), np.float32),
        GATE_UP.replace('gate_up', 'down'): np.zeros((6, 64, 24), np.float32),
      }
    ),
    r"experts\.0\.down_proj\.weight' is not part",
  ),
  'half fused': (
    lambda t: t.update({GATE_UP: np.zeros((6, 48, 64), np.float32)}),
    r"experts\.down_proj' is missing",
  ),
}


class Unread(MappingSource):
  """Fails if anything is read: faults must show in the headers."""

  def view(self, name):
    raise AssertionError(name)


@pytest.mark.parametrize('case', WEIGHT_FAULTS)
def test_weights_that_do_not_fit(case):
  spoil, match = WEIGHT_FAULTS[case]
  tensors = fixtures.load('moonlight')
  spoil(tensors)
  config = hf.model_config(raw_config('moonlight'))
  with pytest.raises(CheckpointError, match=f'the-file: .*{match}') as info:
    hf.target_params(
      config, Unread(tensors), jnp.float32, source_name='the-file'
    )
  assert '\n' not in str(info.value)


def test_more_experts_than_can_be_listed():
  config = dataclasses.replace(fixtures.CONFIG, n_routed_experts=10**9)
  with pytest.raises(CheckpointError, match='more than'):
    hf.tensor_shapes(config)


# ---------------------------------------------------------------- drafters


@pytest.mark.parametrize('name', fixtures.DRAFTERS)
def test_every_tensor_of_a_drafter_is_consumed(name):
  folder = DATA / name / 'dflash'
  config = hf.drafter_config(hf.read_json(folder / 'config.json'))
  source = SafetensorsSource(folder)
  assert {k: source.shape(k) for k in source.names()} == hf.drafter_shapes(
    config
  )
  params = hf.drafter_params(config, source, jnp.bfloat16, source_name=name)
  leaves = jax.tree.leaves(params)
  assert len(leaves) == 11 * config.num_hidden_layers + 3
  assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
  np.testing.assert_array_equal(
    params['layers_0']['self_attn']['k_norm']['weight'],
    source.read('layers.0.self_attn.k_norm.weight').astype(jnp.bfloat16),
  )


ALIASES = {
  'fc.': 'encoder.fc.',
  'hidden_norm.': 'encoder.output_norm_enc.',
  'layers.0.': 'midlayer.',
}


def drafter_source(spoil=lambda tensors: None):
  tensors = fixtures.load('moonlight/dflash')
  spoil(tensors)
  return MappingSource(tensors)


def load_drafter(source):
  config = hf.drafter_config(raw_config('moonlight/dflash'))
  return hf.drafter_params(config, source, jnp.float32, source_name='draft')


def test_prefix_and_aliases_of_a_drafter():
  raw = fixtures.load('moonlight/dflash')
  expected = load_drafter(MappingSource(raw))
  prefixed = {'model.' + k: v for k, v in raw.items()}
  prefixed['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.zeros(8)
  equal(load_drafter(MappingSource(prefixed)), expected)
  renamed = {}
  for name, value in raw.items():
    for ours, theirs in ALIASES.items():
      if name.startswith(ours):
        name = theirs + name.removeprefix(ours)
    renamed[name] = value
  assert set(renamed) & set(raw) == {'norm.weight'}
  equal(load_drafter(MappingSource(renamed)), expected)


DRAFTER_FAULTS = {
  'missing': (
    lambda t: t.pop('fc.weight'),
    r"'fc.weight' is missing, expected \[64, 64\]",
  ),
  'own head': (
    lambda t: t.update({'lm_head.weight': t['fc.weight']}),
    "'lm_head.weight' is not part",
  ),
  'twice': (
    lambda t: t.update({'model.fc.weight': t['fc.weight']}),
    'are two names of one parameter',
  ),
  'taps': (
    lambda t: t.update({'fc.weight': np.zeros((64, 128), np.float32)}),
    r'has shape \[64, 128\], the config asks for \[64, 64\]',
  ),
  'dtype': (
    lambda t: t.update({'fc.weight': t['fc.weight'].astype(np.int32)}),
    'dtype I32',
  ),
  'NaN': (
    lambda t: t['fc.weight'].__setitem__((1, 2), np.nan),
    "'fc.weight' holds NaN or infinity",
  ),
  'missing and unknown': (
    lambda t: t.update({'fc2.weight': t.pop('fc.weight')}),
    "'fc.weight' is missing, .*; tensor 'fc2.weight' is not part",
  ),
  'rotary buffer of no layer': (
    lambda t: t.update({f'layers.1.{INV_FREQ}': np.zeros(8)}),
    'inv_freq. is not part',
  ),
  'rotary buffer elsewhere': (
    lambda t: t.update({f'a.b.{INV_FREQ}': np.zeros(8)}),
    'inv_freq. is not part',
  ),
  'mask without a head': (
    lambda t: t.update({'t2d': np.ones(130, np.bool_)}),
    "'t2d' is not part",
  ),
}


@pytest.mark.parametrize('case', DRAFTER_FAULTS)
def test_drafter_weights_that_do_not_fit(case):
  spoil, match = DRAFTER_FAULTS[case]
  with pytest.raises(CheckpointError, match=f'draft: .*{match}'):
    load_drafter(drafter_source(spoil))


# ---------------------------------------------------------------- configs


def test_a_whole_config():
  assert hf.model_config(raw_config('deepseek_v3')) == ModelConfig(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=16,
    v_head_dim=10,
    intermediate_size=80,
    moe_intermediate_size=24,
    n_routed_experts=16,
    num_experts_per_tok=3,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    rope_scaling=RopeScaling(
      factor=4.0,
      original_max_position_embeddings=128,
      beta_fast=8.0,
      mscale=1.0,
      mscale_all_dim=1.0,
    ),
    max_position_embeddings=512,
    eos_token_id=(1,),
  )


def test_defaults_differ_by_model_type():
  v2 = hf.model_config(raw_config('deepseek_v2_lite', topk_method=None))
  assert (v2.scoring_func, v2.topk_method) == ('softmax', 'greedy')
  glm = hf.model_config(raw_config('glm4_moe_lite', mlp_layer_types=None))
  assert (glm.scoring_func, glm.topk_method) == ('sigmoid', 'noaux_tc')
  assert [glm.is_moe_layer(i) for i in range(3)] == [False, True, True]
  listed = raw_config('glm4_moe_lite', mlp_layer_types=['sparse'] * 3)
  assert hf.model_config(listed).is_moe_layer(0)
  kimi = hf.model_config(raw_config('moonlight', model_type='kimi_k2'))
  assert kimi == hf.model_config(raw_config('moonlight'))


def test_latent_norms_have_their_own_eps():
  config = hf.model_config(raw_config('moonlight'))
  assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
  config = hf.model_config(raw_config('moonlight', latent_norm_eps=1e-5))
  assert config.latent_norm_eps == 1e-5


def test_deepseek_v2_does_not_normalise():
  """Implementations disagree about what the key does there."""
  raw = raw_config('deepseek_v2_lite', norm_topk_prob=True)
  with pytest.raises(CheckpointError, match='norm_topk_prob is True, which'):
    hf.model_config(raw)
  for value in (None, False):
    raw = raw_config('deepseek_v2_lite', norm_topk_prob=value)
    assert not hf.model_config(raw).norm_topk_prob
  raw = raw_config('moonlight', norm_topk_prob=False)
  assert not hf.model_config(raw).norm_topk_prob


def test_rope_interleave_is_on_unless_it_is_off():
  assert hf.model_config(
    raw_config('moonlight', rope_interleave=None)
  ).rope_interleave
  raw = raw_config('moonlight', rope_interleave=False)
  assert not hf.model_config(raw).rope_interleave


def old_spelling(name):
  """A fixture's config in the spelling of transformers 4."""
  raw = raw_config(name)
  rope = dict(raw.pop('rope_parameters'))
  raw['rope_theta'] = rope.pop('rope_theta')
  kind = rope.pop('rope_type')
  raw['rope_scaling'] = None if kind == 'default' else {'type': kind, **rope}
  raw['torch_dtype'] = raw.pop('dtype')
  return raw


@pytest.mark.parametrize(
  'name', ['deepseek_v3', 'deepseek_v2_lite', 'glm4_moe_lite']
)
def test_both_spellings_mean_the_same(name):
  new, old = raw_config(name), old_spelling(name)
  assert hf.model_config(old) == hf.model_config(new)
  both = old | new
  assert hf.model_config(both) == hf.model_config(new)
  old['rope_scaling'] = (old['rope_scaling'] or {}) | {'rope_theta': 5.0}
  with pytest.raises(CheckpointError, match='rope_theta has several values'):
    hf.model_config(old)


def test_a_multimodal_wrapper_is_unwrapped():
  text = raw_config('moonlight', model_type='kimi_k2')
  raw = {
    'model_type': 'kimi_k25',
    'architectures': ['KimiK25ForConditionalGeneration'],
    'text_config': text,
    'vision_config': {'depth': 3},
    'torch_dtype': 'bfloat16',
    'tie_word_embeddings': False,
  }
  assert hf.model_config(raw) == hf.model_config(text)
  for change, match in (
    ({'text_config': None}, 'text_config is missing'),
    ({'text_config': 3}, 'text_config: 3 is not a JSON object'),
    ({'text_config': raw}, "text_config: model_type is 'kimi_k25'"),
    ({'tie_word_embeddings': True}, 'tie_word_embeddings is True; only False'),
    (
      {'text_config': text | {'tie_word_embeddings': True}},
      'tie_word_embeddings is False; only True',
    ),
    (
      {'text_config': text | {'quantization_config': {'quant_method': 'x'}}},
      "text_config: quantization_config: quant_method is 'x'",
    ),
  ):
    with pytest.raises(CheckpointError, match=match):
      hf.model_config(raw | change)


def test_known_real_configs_with_their_extra_keys():
  raw = raw_config(
    'moonlight',
    aux_loss_alpha=0.001,
    auto_map={'AutoConfig': 'x'},
    ep_size=1,
    partial_rotary_factor=1.0,
    seq_aux=True,
    some_switch_that_is_off=False,
    another=[],
    num_nextn_predict_layers=1,
    eos_token_id=[3, 5, 3],
  )
  assert hf.model_config(raw).eos_token_id == (3, 5)


RAISES = {
  'model_type': [
    ('llama', 'supported: deepseek_v2, deepseek_v3, kimi_k2, glm4_moe_lite'),
    (None, 'model_type is None'),
    (['deepseek_v3'], 'model_type'),
    ({}, 'model_type'),
  ],
  'architectures': [
    (['DeepseekV2ForCausalLM'], 'holds DeepseekV2ForCausalLM, but model_type'),
    (['X', 'Glm4MoeLiteForCausalLM'], 'but model_type is deepseek_v3'),
  ],
  'hidden_act': [('gelu', "hidden_act is 'gelu'; only 'silu'")],
  'hidden_size': [
    ('64', "hidden_size is '64', not an integer"),
    (True, 'hidden_size is True, not an integer'),
    (64.0, 'hidden_size'),
    (0, 'hidden_size'),
    (-1, 'hidden_size'),
    (10**12, 'hidden_size'),
    (None, 'hidden_size is missing'),
  ],
  'num_hidden_layers': [(10**6, 'num_hidden_layers'), (None, 'missing')],
  'q_lora_rank': [(0, 'q_lora_rank'), (1.5, 'q_lora_rank')],
  'qk_head_dim': [(29, 'qk_head_dim is 29; only 28')],
  'qk_rope_head_dim': [(15, 'qk_head_dim|qk_rope_head_dim')],
  'num_key_value_heads': [(2, 'num_key_value_heads is 2; only 4')],
  'attention_bias': [(1, 'attention_bias is 1, not true or false')],
  'mlp_bias': [(True, 'mlp_bias .* is not known to this engine')],
  'norm_topk_prob': [(None, 'norm_topk_prob is missing'), (1, 'norm_topk')],
  'routed_scaling_factor': [
    (None, 'routed_scaling_factor is missing'),
    ('2', 'routed_scaling_factor'),
    (math.inf, 'routed_scaling_factor'),
    (math.nan, 'routed_scaling_factor'),
    (True, 'routed_scaling_factor'),
  ],
  'max_position_embeddings': [(None, 'missing'), (0, 'max_position')],
  'rms_norm_eps': [(None, 'missing'), (0, 'rms_norm_eps'), (-1, 'rms_norm')],
  'n_group': [(None, 'n_group is missing'), (3, 'n_group=3'), (0, 'n_group')],
  'topk_group': [(5, 'topk_group=5')],
  'num_experts_per_tok': [(9, 'num_experts_per_tok=9'), (0, 'num_experts')],
  'scoring_func': [('tanh', 'scoring_func'), (1, 'scoring_func is 1')],
  'topk_method': [('best', "topk_method='best'")],
  'mlp_layer_types': [
    (['dense'], 'mlp_layer_types'),
    (['dense', 'sparse', 'odd'], 'mlp_layer_types'),
    (['dense', 'sparse', {}], 'mlp_layer_types is .* holds {}, which'),
    ('dense', 'mlp_layer_types'),
  ],
  'eos_token_id': [
    (96, 'eos_token_id 96 is outside'),
    (-1, 'eos_token_id'),
    ([1, -1], 'negative'),
    ([1, '2'], "eos_token_id is .* holds '2', which is not an int"),
    ([True], 'eos_token_id is .* holds True, which is not an int'),
    ('1', 'eos_token_id'),
  ],
  'partial_rotary_factor': [(0.5, 'partial_rotary_factor is 0.5; only 1')],
  'index_topk': [(2048, r'index_topk \(2048\) is not known')],
  'rope_parameters': [
    (None, 'rope_theta is missing'),
    ('yarn', "rope_parameters: 'yarn' is not a JSON object"),
    ({'rope_type': 'yarn', 'rope_theta': 1e4}, 'factor is missing'),
    ({'rope_type': 'llama3', 'rope_theta': 1e4}, "rope_type is 'llama3'"),
    ({'rope_type': 'linear', 'factor': 2.0}, "rope_type is 'linear'"),
    ({'rope_type': 3}, 'rope_type is 3'),
    ({'rope_theta': 1e4, 'factor': 2.0}, 'factor .* is not known'),
    ({**YARN, 'rope_theta': 1}, 'rope_theta is 1, not above 1'),
    ({**YARN, 'rope_theta': 1e4, 'type': 'default'}, 'but type is'),
    ({**YARN, 'rope_theta': 1e4, 'factor': 0.5}, 'factor is 0.5, below 1'),
    ({**YARN, 'rope_theta': 1e4, 'beta_fast': 0}, 'beta_fast is 0'),
    ({**YARN, 'rope_theta': 1e4, 'mscale': '1'}, "mscale is '1'"),
    ({**YARN, 'rope_theta': 1e4, 'truncate': False}, 'truncate is False'),
    ({**YARN, 'rope_theta': 1e4, 'odd': 1}, 'odd .* is not known'),
    ({**YARN, 'rope_theta': 1e4, 'partial_rotary_factor': 0.5}, 'partial'),
  ],
  'rope_scaling': [({**YARN, 'factor': 8.0}, 'rope_parameters disagree')],
}
CASES = [(k, v, m) for k, values in RAISES.items() for v, m in values]


@pytest.mark.parametrize(('key', 'value', 'match'), CASES)
def test_configs_that_are_refused(key, value, match):
  raw = raw_config('deepseek_v3', **{key: value})
  with pytest.raises(CheckpointError, match=f'a/config.json: .*{match}') as e:
    hf.model_config(raw, 'a/config.json')
  assert '\n' not in str(e.value)


@pytest.mark.parametrize('raw', [None, 3, [], 'x'])
def test_a_config_that_is_no_object(raw):
  for function in (hf.model_config, hf.drafter_config):
    with pytest.raises(CheckpointError, match='not a JSON object'):
      function(raw)


def test_deepseek_yarn_has_amplitude_one():
  rope = {**YARN, 'rope_type': 'deepseek_yarn', 'rope_theta': 1e4}
  for function, name in (
    (hf.model_config, 'deepseek_v3'),
    (hf.drafter_config, 'deepseek_v3/dflash'),
  ):
    raw = raw_config(name, rope_parameters=rope, rope_theta=None)
    scaling = function(raw).rope_scaling
    assert scaling.attention_factor == 1.0
    assert scaling.factor == 4.0
    plain = function(raw | {'rope_parameters': {**rope, 'rope_type': 'yarn'}})
    assert plain.rope_scaling.attention_factor is None


def drafter_raw(**changes):
  return raw_config('deepseek_v3/dflash', **changes)


def test_a_whole_drafter_config():
  assert hf.drafter_config(drafter_raw()) == DrafterConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=56,
    vocab_size=96,
    block_size=8,
    mask_token_id=95,
    target_layer_ids=(0, 1),
    num_target_layers=3,
    max_position_embeddings=512,
  )


def test_drafter_keys_at_either_level():
  plain = hf.drafter_config(drafter_raw())
  inner = {
    'mask_token_id': 95,
    'target_layer_ids': [0, 1],
    'block_size': 8,
    'num_target_layers': 3,
    'causal': False,
    'final_logit_softcapping': None,
  }
  nested = drafter_raw(
    block_size=None, num_target_layers=None, dflash_config=inner
  )
  plain = dataclasses.replace(plain, causal=False)
  assert hf.drafter_config(nested) == plain
  flat = drafter_raw(dflash_config=None) | inner
  assert hf.drafter_config(flat) == plain


def test_drafter_defaults():
  raw = drafter_raw(
    rope_scaling=None,
    num_target_layers=61,
    num_hidden_layers=6,
    dflash_config={'mask_token_id': 95},
    layer_types=['full_attention'] * 6,
    sliding_window=4096,
    use_sliding_window=False,
    output_multiplier=1.0,
    target_hidden_size=64,
  )
  config = hf.drafter_config(raw)
  assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
  assert config.rope_scaling is None


def dflash(**changes):
  return {'mask_token_id': 95, 'target_layer_ids': [0, 1]} | changes


DRAFTER_RAISES = [
  ({'architectures': ['DFlash2DraftModel']}, 'supported: DFlashDraftModel'),
  ({'architectures': None}, 'architectures is None'),
  ({'dflash_config': [1]}, r'dflash_config: \[1\] is not a JSON object'),
  ({'dflash_config': dflash(block_size=4)}, 'block_size is 8, but 4 in'),
  ({'dflash_config': dflash(mask_token_id=None)}, 'mask_token_id is missing'),
  ({'dflash_config': dflash(mask_token_id=96)}, 'mask_token_id=96 is outside'),
  ({'dflash_config': dflash(target_layer_ids=[3])}, 'target_layer_ids holds 3'),
  ({'dflash_config': dflash(target_layer_ids=[-1])}, 'holds -1'),
  ({'dflash_config': dflash(target_layer_ids=[])}, 'target_layer_ids is empty'),
  ({'dflash_config': dflash(target_layer_ids=['0'])}, "holds '0'"),
  ({'use_sliding_window': True}, 'sliding_window=None must be positive'),
  (
    {'layer_types': ['full_attention', 'sliding_attention']},
    'sliding_window=None must be positive',
  ),
  (
    {
      'layer_types': ['full_attention', 'sliding_attention'],
      'sliding_window': 4,
      'use_sliding_window': False,
    },
    'but use_sliding_window is false',
  ),
  ({'layer_types': ['full_attention', 'odd']}, "holds 'odd', none of"),
  ({'dflash_config': dflash(use_swa=True)}, 'swa_window_size is missing'),
  (
    {
      'layer_types': ['full_attention', 'sliding_attention'],
      'sliding_window': 4,
      'dflash_config': dflash(use_swa=True, swa_window_size=5),
    },
    'swa_window_size is 5, but sliding_window is 4',
  ),
  ({'is_causal': True, 'causal': False}, 'causal and is_causal or'),
  ({'layer_types': ['full_attention']}, 'layer_types has 1 entries for 2'),
  ({'quantization_config': {'quant_method': 'x'}}, 'may not be quantised'),
  ({'hidden_act': 'gelu'}, 'hidden_act'),
  ({'num_target_layers': None}, 'num_target_layers is missing'),
  ({'num_key_value_heads': 3}, 'num_key_value_heads=3 does not divide'),
  ({'head_dim': None}, 'head_dim is missing'),
  ({'head_dim': 15}, 'head_dim=15 must be even'),
  ({'block_size': 0}, 'block_size'),
  # No shape is a witness of these, and engines fill in different numbers.
  ({'block_size': None}, 'block_size is missing'),
  ({'rope_theta': None}, 'rope_theta is missing'),
  ({'rms_norm_eps': None}, 'rms_norm_eps is missing'),
  ({'max_position_embeddings': None}, 'max_position_embeddings is missing'),
  (
    {'use_sliding_window': True, 'sliding_window': 4},
    'max_window_layers is missing',
  ),
  ({'target_hidden_size': 32}, 'target_hidden_size is 32; only 64'),
  ({'output_multiplier': 2.0}, 'output_multiplier is 2.0; only 1'),
  ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "is 'dynamic'"),
] + [
  (change, f'{key} .* is not known')
  for key, value in {
    'sample_from_anchor': True,
    'projector_type': 'domino',
    'attention_mode': 'mla',
    'attention_sink_bias': True,
    'conv_kernel_size': 3,
    'selector_rank': 8,
    'draft_shift': True,
    'final_logit_softcapping': 30.0,
  }.items()
  for change in ({key: value}, {'dflash_config': dflash(**{key: value})})
]


@pytest.mark.parametrize(('change', 'match'), DRAFTER_RAISES)
def test_drafter_configs_that_are_refused(change, match):
  with pytest.raises(CheckpointError, match=f'd.json: .*{match}'):
    hf.drafter_config(drafter_raw(**change), 'd.json')


def test_kinds_are_told_apart():
  assert hf.is_drafter(drafter_raw())
  assert not hf.is_drafter(raw_config('deepseek_v3'))


# ---------------------------------------------------------------- stop ids


def test_stop_ids_are_the_union(tmp_path):
  raw = raw_config('moonlight', eos_token_id=7)
  assert hf.stop_ids(tmp_path, raw) == (7,)
  generation = tmp_path / 'generation_config.json'
  generation.write_text('{"eos_token_id": [9, 7], "temperature": 0.6}')
  assert hf.stop_ids(tmp_path, raw) == (7, 9)
  assert hf.stop_ids(tmp_path, raw_config('moonlight', eos_token_id=None)) == (
    9,
    7,
  )
  wrapped = {'model_type': 'kimi_k25', 'text_config': raw, 'eos_token_id': 3}
  assert hf.stop_ids(tmp_path, wrapped) == (3, 7, 9)
  for text in ('{"eos_token_id": "x"}', '{"eos_token_id": 130}', '[]', '{'):
    generation.write_text(text)
    with pytest.raises(UserError, match='generation_config.json: '):
      hf.stop_ids(tmp_path, raw)


# -------------------------------------------------------------------- fuzz

JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.integers(-2, 70)
  | st.floats()
  | st.sampled_from([10**9, 10**400, 1e308, 2**31, 0, '', 'yarn', 'default'])
  | st.text(max_size=4),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    | st.dictionaries(st.sampled_from(sorted(YARN)), inner, max_size=7)
  ),
  max_leaves=6,
)


def one_line_error_or(kind, function, raw):
  try:
    config = function(raw, 'x.json')
  except UserError as e:
    assert str(e).startswith('x.json: ')
    assert str(e).isprintable()
    return None
  assert isinstance(config, kind)
  assert kind.from_dict(json.loads(json.dumps(config.to_dict()))) == config
  return config


def changes(name, *extra):
  keys = sorted({*raw_config(name), *YARN, 'rope_scaling', *extra})
  keys = st.sampled_from(keys) | st.text(max_size=5)
  return st.dictionaries(keys, JSON, min_size=1, max_size=3)


@fixtures.deterministic
@given(
  changes('deepseek_v3', 'mlp_layer_types', 'topk_method', 'text_config'),
  st.sampled_from(fixtures.TARGETS),
)
def test_any_json_in_a_target_config(change, name):
  raw = raw_config(name) | change
  config = one_line_error_or(ModelConfig, hf.model_config, raw)
  if config is not None:
    assert math.isfinite(config.softmax_scale)
    assert math.isfinite(amplitude(config.rope_scaling))
    frequencies = inverse_frequencies(
      16, config.rope_theta, config.rope_scaling
    )
    assert np.isfinite(frequencies).all()


@fixtures.deterministic
@given(
  changes('deepseek_v3/dflash', 'layer_types', 'causal'),
  changes('deepseek_v3/dflash', 'mask_token_id', 'target_layer_ids'),
)
def test_any_json_in_a_drafter_config(outer, inner):
  raw = drafter_raw() | outer
  if isinstance(raw['dflash_config'], dict):
    raw['dflash_config'] = raw['dflash_config'] | inner
  one_line_error_or(DrafterConfig, hf.drafter_config, raw)


@fixtures.deterministic
@given(JSON)
def test_any_json_as_a_config(raw):
  for function in (hf.model_config, hf.drafter_config):
    with pytest.raises(UserError):
      function(raw)


def test_corrupt_weights_do_not_pass_for_a_checkpoint(tmp_path):
  safetensors.numpy.save_file(
    fixtures.load('moonlight'), tmp_path / 'model.safetensors'
  )
  path = tmp_path / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(CheckpointError, match='not a complete safetensors file'):
    SafetensorsSource(tmp_path)
