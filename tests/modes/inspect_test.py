"""Descriptions of checkpoints and bundles."""

import json

import numpy as np
import pytest
import safetensors.numpy

from kdtree_jax.errors import UserError
from kdtree_jax.io.kdtr import write_bundle
from kdtree_jax.io.tensors import SafetensorsSource
from kdtree_jax.modes.inspect import describe
from tests.io import fixtures
from tests.io.fixtures import DATA, make_bundle, raw_config


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  monkeypatch.setenv('COLUMNS', '160')


@pytest.fixture
def no_reads(monkeypatch):
  def fail(self, name):
    raise AssertionError(name)

  monkeypatch.setattr(SafetensorsSource, 'read', fail)


def values(tensors):
  return sum(v.size for v in tensors.values())


@pytest.mark.parametrize('name', fixtures.TARGETS)
def test_a_target(name, no_reads):
  text = describe(DATA / name)
  tensors = fixtures.load(name)
  raw = raw_config(name)
  total = values(tensors)
  routed = values({k: v for k, v in tensors.items() if '.experts.' in k})
  idle = raw['n_routed_experts'] - raw['num_experts_per_tok']
  active = total - routed * idle // raw['n_routed_experts']
  assert f'parameters: {total:,} ({active:,} active per token)' in text
  assert f'bytes: F32 {4 * total:,}' in text
  assert 'stop ids: 1\n' in text
  assert 'skipped: none' in text
  experts = raw['n_routed_experts']
  row = f'model.layers.1.mlp.experts.{{0..{experts - 1}}}.gate_proj.weight'
  assert f'{row}  F32    {experts} x [24, 64]' in text
  assert all(len(line) <= 160 for line in text.splitlines())


def test_a_narrow_table_folds_names(monkeypatch):
  """At 80 columns nothing is cut: a name goes on in the next line."""
  monkeypatch.setenv('COLUMNS', '80')
  text = describe(DATA / 'kimi_k25_int4').split('\n\n')[1]
  lines = text.splitlines()
  assert lines[0].split() == ['tensor', 'dtype', 'shape', 'bytes']
  assert all(len(line) <= 80 for line in lines)
  names = ''.join(line.split()[0] for line in lines)
  assert '.mlp.experts.{0..7}.up_proj.weight_packed' in names
  assert '…' not in text


@pytest.mark.parametrize('name', fixtures.DRAFTERS)
def test_a_drafter(name, no_reads):
  text = describe(DATA / name / 'dflash')
  total = values(fixtures.load(f'{name}/dflash'))
  raw = raw_config(f'{name}/dflash')
  assert 'DFlash drafter' in text
  assert f'parameters: {total:,}\n' in text
  assert f'block: {raw["block_size"]} tokens, mask id' in text


def test_what_is_skipped(tmp_path, no_reads):
  raw = fixtures.load('moonlight')
  raw |= {
    f'model.layers.{layer}.{part}.weight': np.zeros(2)
    for layer in (2, 3)
    for part in ('eh_proj', 'enorm', 'hnorm')
  }
  raw['vision_tower.x'] = np.zeros(2)
  safetensors.numpy.save_file(raw, tmp_path / 'model.safetensors')
  config = {
    'model_type': 'kimi_k25',
    'text_config': raw_config('moonlight', num_nextn_predict_layers=2),
    'vision_config': {},
  }
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [5]}')
  text = describe(tmp_path)
  assert 'skipped: 6 (multi-token prediction)' in text
  assert "skipped: 1 (vision), 16 bytes, first 'vision_tower.x'" in text
  assert 'stop ids: 1, 5' in text
  assert 'eh_proj' not in text.split('tensor  ')[1]


def test_a_bundle(tmp_path):
  path = tmp_path / 'toy.kdtr'
  write_bundle(path, make_bundle())
  text = describe(path)
  assert "KDTR bundle 'toy'" in text
  assert 'stop ids: 1, 3' in text
  assert 'golden: ar_tokens [2], layer_0 [3, 2], prompt [3]' in text
  assert 'recipe seed: 7' in text
  assert 'drafter block: 4 tokens, mask id 10, taps after layers 0, 1' in text
  assert 'drafter bytes: BF16' in text
  assert 'model.layers.1.mlp.experts.{0..3}.up_proj.weight' in text
  bare = make_bundle(drafter=None, drafter_config=None, golden={})
  write_bundle(path, bare)
  text = describe(path)
  assert 'golden: none' in text
  assert 'drafter: none' in text


def test_layers_are_in_the_order_of_numbers(tmp_path):
  config = raw_config('moonlight', num_hidden_layers=11)
  raw = fixtures.load('moonlight')
  for name, value in list(raw.items()):
    if name.startswith('model.layers.1.'):
      for layer in range(2, 11):
        raw[name.replace('layers.1.', f'layers.{layer}.')] = value
  safetensors.numpy.save_file(raw, tmp_path / 'model.safetensors')
  (tmp_path / 'config.json').write_text(json.dumps(config))
  text = describe(tmp_path)
  assert text.index('model.layers.9.mlp') < text.index('model.layers.10.mlp')


def test_what_cannot_be_described(tmp_path):
  with pytest.raises(UserError, match='no such file'):
    describe(tmp_path / 'none.kdtr')
  with pytest.raises(UserError, match='config.json: no such file'):
    describe(tmp_path)
  with pytest.raises(UserError, match='neither a .kdtr bundle nor'):
    describe(DATA / 'moonlight' / 'model.safetensors')
  (tmp_path / 'x.kdtr').write_bytes(b'x')
  with pytest.raises(UserError, match='x.kdtr: not a complete safetensors'):
    describe(tmp_path / 'x.kdtr')
  raw = raw_config('moonlight', quantization_config={'quant_method': 'awq'})
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(UserError, match='says AWQ, unsupported'):
    describe(tmp_path)


@pytest.mark.parametrize(
  ('name', 'lines'),
  [
    (
      'kimi_k25_int4',
      [
        'parameters: 279,036 (156,156 active per token)',
        'quantisation: int4, a scale for 1 x 32',
        'skipped: 1 (vision), 64 bytes',
        'skipped: 1 (rotary buffer)',
        'experts.{0..7}.up_proj.weight_packed',
      ],
    ),
    (
      'deepseek_v3_fp8',
      [
        'quantisation: fp8, a scale for 128 x 128',
        'bytes: F32 ',
        ', F8_E4M3 ',
        'skipped: 4 (multi-token prediction), 267,520',
      ],
    ),
  ],
)
def test_a_quantised_checkpoint(name, lines):
  text = describe(DATA / name)
  for line in lines:
    assert line in text, text
  assert 'bytes by kind: attention ' in text
  for kind in ('dense', 'embedding and head', 'experts', 'norms', 'router'):
    assert f', {kind} ' in text, kind
  assert 'GiB as stored fit the ' in text


def test_what_does_not_fit(monkeypatch):
  monkeypatch.setattr('os.sysconf', lambda name: 8)
  assert 'as stored DO NOT FIT the' in describe(DATA / 'moonlight')
