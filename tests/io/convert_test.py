"""Bundles to folders and back: nothing is lost, nothing is half written."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io import export
from kdtree_jax.io.convert import read_checkpoint
from kdtree_jax.io.huggingface import model_config
from kdtree_jax.io.kdtr import read_bundle, write_bundle
from kdtree_jax.io.tensors import SafetensorsSource
from kdtree_jax.modes import convert
from kdtree_jax.named_configs import config_names, load_config
from tests import support
from tests.command_line import mode_flags
from tests.io import fixtures
from tests.io.huggingface_test import fuse


def run(source, output, **flags):
  config = mode_flags(
    mode='convert', target=str(source), output=str(output), **flags
  )
  return convert.run(config)


def test_a_bundle_comes_back_byte_for_byte(tmp_path):
  """Drafter, golden answers, name and recipe included."""
  first, folder = tmp_path / 'a.kdtr', tmp_path / 'folder'
  write_bundle(first, fixtures.make_bundle())
  assert run(first, folder) == 0
  assert run(folder, tmp_path / 'b.kdtr') == 0
  assert (tmp_path / 'b.kdtr').read_bytes() == first.read_bytes()
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    'a.kdtr',
    'b.kdtr',
    'folder',
  ]


@pytest.mark.parametrize('name', fixtures.TARGETS)
def test_a_checkpoint_comes_back_bit_for_bit(name, tmp_path):
  bundle, folder = tmp_path / 'x.kdtr', tmp_path / 'back'
  run(support.DATA / name, bundle)
  run(bundle, folder)
  pairs = [(support.DATA / name, folder)]
  if name in fixtures.DRAFTERS:
    pairs.append((support.DATA / name / 'dflash', folder / 'dflash'))
  for before, after in pairs:
    ours, theirs = SafetensorsSource(after), SafetensorsSource(before)
    assert ours.names() == theirs.names()
    for tensor in ours.names():
      a, b = ours.read(tensor), theirs.read(tensor)
      assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), tensor
  target = api.load_target(folder)
  assert target.config == support.fixture(name).config
  assert read_bundle(bundle).name == name


def test_fused_experts_are_taken_apart(tmp_path):
  raw = fixtures.load('deepseek_v3')
  safetensors.numpy.save_file(fuse(raw), tmp_path / 'model.safetensors')
  config = (support.DATA / 'deepseek_v3' / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(config)
  bundle = read_checkpoint(tmp_path)
  assert set(bundle.target) == set(raw)
  for name, value in raw.items():
    assert np.array_equal(bundle.target[name], value), name


@pytest.mark.parametrize('name', ['kimi_k25_int4', 'deepseek_v3_fp8'])
def test_quantised_checkpoints_are_expanded(name, tmp_path):
  with pytest.raises(UserError, match='give --weights=bfloat16 or'):
    run(support.DATA / name, tmp_path / 'x.kdtr')
  run(support.DATA / name, tmp_path / 'x.kdtr', weights='float32')
  wanted = api.load_target(support.DATA / name, weights='float32')
  got = api.load_target(tmp_path / 'x.kdtr')
  jax.tree.map(np.testing.assert_array_equal, got.params, wanted.params)
  run(support.DATA / name, tmp_path / 'y.kdtr', weights='bfloat16')
  tensors = read_bundle(tmp_path / 'y.kdtr').target
  dtypes = {t.dtype for n, t in tensors.items() if '.mlp.gate.' not in n}
  assert dtypes == {np.dtype(ml_dtypes.bfloat16)}


def test_shards(tmp_path):
  bundle = fixtures.make_bundle()
  export.write_checkpoint(tmp_path / 'x', bundle, shard_bytes=2000)
  shards = list((tmp_path / 'x').glob('model-*-of-*.safetensors'))
  assert len(shards) > 3
  back = read_checkpoint(tmp_path / 'x')
  for name, value in bundle.target.items():
    assert np.array_equal(back.target[name], value)


@pytest.mark.parametrize('name', config_names())
def test_every_variant_can_be_said(name):
  for config in (load_config(name), load_config(name).reduced()):
    raw = json.loads(json.dumps(export.target_json(config, 'BF16')))
    assert model_config(raw) == config


def test_what_cannot_be_said():
  config = dataclasses.replace(load_config('softmax_yarn'), norm_topk_prob=True)
  with pytest.raises(UserError, match='norm_topk_prob is True, which'):
    export.target_json(config)
  drafter = dataclasses.replace(fixtures.DRAFTER_CONFIG, own_embedding=True)
  with pytest.raises(UserError, match='own_embedding=True cannot be said'):
    export.drafter_json(drafter)
  sliding = dataclasses.replace(
    fixtures.DRAFTER_CONFIG,
    layer_types=('sliding_attention',),
    sliding_window=3,
    causal=False,
  )
  assert export.drafter_json(sliding)['is_causal'] is False


def test_a_crash_leaves_nothing(tmp_path, monkeypatch):
  def crash(*args, **kwargs):
    raise KeyboardInterrupt

  write_bundle(tmp_path / 'a.kdtr', fixtures.make_bundle())
  monkeypatch.setattr(export, 'canonical_json', crash)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / 'a.kdtr', tmp_path / 'folder')
  assert [p.name for p in tmp_path.iterdir()] == ['a.kdtr']


@pytest.mark.parametrize(
  ('source', 'output', 'flags', 'match'),
  [
    ('none', 'x.kdtr', {}, 'no such file'),
    ('a.kdtr', 'b.kdtr', {}, 'is converted to a folder'),
    ('a.kdtr', 'full', {}, 'exists; convert writes to a new folder'),
    ('a.kdtr', 'x/y/z', {}, 'cannot be written'),
    ('a.kdtr', 'x', {'weights': 'float32'}, '--weights is not used'),
    ('full', 'x', {}, 'a bundle is a .kdtr file'),
    ('full', 'x.kdtr', {}, 'config.json: no such file'),
    ('a.kdtr', '/', {}, '/: exists; convert'),
  ],
)
def test_conversions_that_are_refused(tmp_path, source, output, flags, match):
  write_bundle(tmp_path / 'a.kdtr', fixtures.make_bundle())
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'file').write_text('x')
  with pytest.raises(UserError, match=match):
    run(tmp_path / source, tmp_path / output, **flags)
  assert not list(tmp_path.glob('.*tmp'))


def copy_moonlight(folder, **changes):
  folder.mkdir()
  data = (support.DATA / 'moonlight' / 'model.safetensors').read_bytes()
  (folder / 'model.safetensors').write_bytes(data)
  raw = fixtures.raw_config('moonlight', **changes)
  (folder / 'config.json').write_text(json.dumps(raw))
  return folder


@pytest.mark.parametrize('wrapped', [False, True])
def test_stop_ids_survive_conversions(tmp_path, wrapped):
  """Of generation_config.json and of a wrapper too."""
  source = copy_moonlight(tmp_path / 'a', eos_token_id=[5, 1])
  wanted = (5, 1, 7, 3)
  if wrapped:
    text = json.loads((source / 'config.json').read_text())
    raw = {'model_type': 'kimi_k25', 'text_config': text, 'eos_token_id': 9}
    (source / 'config.json').write_text(json.dumps(raw))
    wanted = (9, *wanted)
  generation = {'eos_token_id': [7, 5, 3]}
  (source / 'generation_config.json').write_text(json.dumps(generation))
  assert api.load_target(source).stop_ids == wanted
  for number in range(2):
    bundle, folder = tmp_path / f'{number}.kdtr', tmp_path / f'{number}'
    run(source, bundle)
    run(bundle, folder)
    assert api.load_target(bundle).stop_ids == wanted
    assert api.load_target(folder).stop_ids == wanted
    source = folder


def test_what_a_bundle_has_no_place_for_is_said(tmp_path, capsys):
  source = copy_moonlight(tmp_path / 'a')
  generation = {'eos_token_id': 1, 'temperature': 0.6, 'top_p': 0.9}
  (source / 'generation_config.json').write_text(json.dumps(generation))
  run(source, tmp_path / 'x.kdtr')
  assert capsys.readouterr().out.splitlines() == [
    f'wrote {tmp_path / "x.kdtr"}',
    f'not carried over: {source / "generation_config.json"}: '
    'temperature, top_p',
  ]
  (source / 'generation_config.json').write_text('{"eos_token_id": 1}')
  run(source, tmp_path / 'x.kdtr')
  run(tmp_path / 'x.kdtr', tmp_path / 'b')
  assert 'generation_config' not in capsys.readouterr().out


EXTRAS = {
  'no metadata': ({}, None, 'kdtr_bundle is not JSON'),
  'not JSON': ({}, '{', 'kdtr_bundle is not JSON'),
  'deep': ({}, '[' * 50_000, 'nested too deeply'),
  'nan': ({}, '{"name": NaN}', 'NaN is not JSON'),
  'a list': ({}, '[]', 'does not hold name and recipe'),
  'a key': ({}, '{"name": "x"}', 'does not hold name and recipe'),
  'name': ({}, '{"name": 3, "recipe": {}}', 'kdtr_bundle: name is 3'),
  'recipe': ({}, '{"name": "x", "recipe": []}', r'recipe is \[\]'),
  'F8': (
    {'x': np.zeros(2, ml_dtypes.float8_e4m3fn)},
    '{"name": "x", "recipe": {}}',
    "'golden/x' has the unsupported dtype F8_E4M3",
  ),
  'other F8': (
    {'x': np.zeros(2, ml_dtypes.float8_e5m2)},
    '{"name": "x", "recipe": {}}',
    "golden.safetensors: tensor 'x' of dtype F8_E5M2 cannot be read",
  ),
}


@pytest.mark.parametrize('case', EXTRAS)
def test_broken_golden_answers(tmp_path, case):
  tensors, text, match = EXTRAS[case]
  source = copy_moonlight(tmp_path / 'a')
  metadata = None if text is None else {'kdtr_bundle': text}
  path = source / 'golden.safetensors'
  safetensors.numpy.save_file(tensors, path, metadata=metadata)
  with pytest.raises(UserError, match=match) as info:
    run(source, tmp_path / 'x.kdtr')
  assert '\n' not in str(info.value)


@pytest.mark.parametrize('name', ['.', '', '../here/'])
def test_folders_without_a_name_of_their_own(tmp_path, monkeypatch, name):
  folder = tmp_path / 'here'
  folder.mkdir()
  monkeypatch.chdir(folder)
  export.write_checkpoint(name, fixtures.make_bundle())
  read_checkpoint(folder)
  with pytest.raises(UserError, match='exists; convert writes'):
    export.write_checkpoint('..', fixtures.make_bundle())
  assert [p.name for p in tmp_path.iterdir()] == ['here']


def test_a_failure_of_safetensors_leaves_nothing(tmp_path, monkeypatch):
  def fail(*args, **kwargs):
    raise safetensors.SafetensorError('Error\nNo space left on device')

  monkeypatch.setattr(safetensors.numpy, 'save_file', fail)
  with pytest.raises(UserError, match='x: cannot be written: Error No space'):
    export.write_checkpoint(tmp_path / 'x', fixtures.make_bundle())
  assert not list(tmp_path.iterdir())


def test_a_folder_reaches_the_disk_with_its_names(tmp_path, monkeypatch):
  synced = []
  monkeypatch.setattr(export, 'sync_folder', synced.append)
  export.write_checkpoint(tmp_path / 'x', fixtures.make_bundle())
  inner, temporary, parent = synced
  assert (inner.name, inner.parent) == ('dflash', temporary)
  assert temporary.parent == parent == tmp_path


def test_a_stored_head_that_is_tied_must_be_the_embedding(tmp_path):
  """A bundle has no place for it, so nothing else would notice."""
  raw = fixtures.raw_config('moonlight', tie_word_embeddings=True)
  tensors = fixtures.load('moonlight')
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  path = tmp_path / 'model.safetensors'
  safetensors.numpy.save_file(tensors, path)
  with pytest.raises(UserError, match="'lm_head.weight' differs from"):
    read_checkpoint(tmp_path)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
  safetensors.numpy.save_file(tensors, path)
  assert 'lm_head.weight' not in read_checkpoint(tmp_path).target
