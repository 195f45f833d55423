"""KDTR bundles: exact round trips, and no damage that goes unseen."""

import dataclasses
import json
import os
import pathlib
import random
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdtree_jax.config import ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io import files
from kdtree_jax.io.huggingface import (
  drafter_params,
  target_params,
  tensor_shapes,
)
from kdtree_jax.io.kdtr import BundleError, read_bundle, write_bundle
from kdtree_jax.io.tensors import MappingSource, SafetensorsSource
from tests.io import fixtures
from tests.io.fixtures import (
  CONFIG,
  DRAFTER_CONFIG,
  compact,
  forge,
  make_bundle,
  random_tensors,
  seal,
  table,
  unpack,
)


@pytest.fixture
def path(tmp_path):
  write_bundle(tmp_path / 'toy.kdtr', make_bundle())
  return tmp_path / 'toy.kdtr'


@pytest.fixture(scope='module')
def scratch(tmp_path_factory):
  """A path that hypothesis may overwrite from example to example."""
  return tmp_path_factory.mktemp('kdtr') / 'x.kdtr'


@pytest.fixture(scope='module')
def valid(scratch):
  write_bundle(scratch, make_bundle())
  return scratch.read_bytes()


def check_equal(a, b):
  assert (a.name, a.config, a.drafter_config) == (
    b.name,
    b.config,
    b.drafter_config,
  )
  assert a.recipe == b.recipe
  for section in ('target', 'drafter', 'golden'):
    ours, theirs = getattr(a, section), getattr(b, section)
    assert (ours is None) == (theirs is None)
    assert set(ours or ()) == set(theirs or ())
    for name, value in (ours or {}).items():
      other = theirs[name]
      assert (value.dtype, value.shape) == (other.dtype, other.shape)
      assert value.tobytes() == other.tobytes()


def refused(path, match='.'):
  with pytest.raises(BundleError, match=match) as info:
    read_bundle(path)
  check_message(path, str(info.value))


def check_message(path, text):
  assert text.startswith(f'{path}: ')
  assert text.isprintable()


def refused_or_equal(path):
  """Whether it was refused; if not, no damage is in what was read."""
  try:
    bundle = read_bundle(path)
  except BundleError as e:
    check_message(path, str(e))
    return True
  check_equal(bundle, make_bundle())
  return False


# ------------------------------------------------------------- round trips


def test_round_trip_with_everything(path):
  check_equal(read_bundle(path), make_bundle())
  assert [p.name for p in path.parent.iterdir()] == ['toy.kdtr']


def test_round_trip_without_drafter_and_golden(tmp_path):
  bundle = make_bundle(drafter=None, drafter_config=None, golden={}, recipe={})
  write_bundle(tmp_path / 'x', bundle)
  check_equal(read_bundle(tmp_path / 'x'), bundle)


def test_what_is_read_can_be_written_again_to_the_same_bytes(path):
  data = path.read_bytes()
  bundle = read_bundle(path)
  other = path.with_name('other')
  reordered = dataclasses.replace(
    bundle,
    target=dict(reversed(bundle.target.items())),
    recipe=dict(reversed(bundle.recipe.items())),
  )
  for same in (bundle, reordered, make_bundle()):
    write_bundle(other, same)
    assert other.read_bytes() == data


def test_memory_layout_and_jax_arrays_do_not_matter(path):
  data = path.read_bytes()
  bundle = make_bundle()
  target = {k: np.asfortranarray(v) for k, v in bundle.target.items()}
  drafter = {k: jnp.asarray(v) for k, v in bundle.drafter.items()}
  write_bundle(path, make_bundle(target=target, drafter=drafter))
  assert path.read_bytes() == data


def test_any_safetensors_tool_opens_it(path):
  tensors = safetensors.numpy.load_file(path)
  assert 'target/model.norm.weight' in tensors
  assert 'drafter/fc.weight' in tensors
  np.testing.assert_array_equal(tensors['golden/prompt'], [2, 5, 7])


def test_the_file_is_the_one_that_safetensors_writes(path):
  golden = {
    'a"é\\\x01\n漢🎉': np.array(3, np.float32),
    '\uffff': np.zeros((0, 3), np.int64),
    '𐀀': np.ones(3, ml_dtypes.bfloat16),
    'half': np.ones(3, np.float16),
    'odd': np.ones(5, np.int32),
  }
  write_bundle(path, make_bundle(golden=golden))
  tensors, manifest = unpack(path)
  metadata = {'kdtr': compact(manifest)}
  assert path.read_bytes() == safetensors.numpy.save(tensors, metadata)
  check_equal(read_bundle(path), make_bundle(golden=golden))


def test_a_name_that_is_no_text(path):
  with pytest.raises(BundleError, match='toy.kdtr: .*surrogates not allowed'):
    write_bundle(path, make_bundle(golden={'\ud800': np.zeros(1, np.int32)}))


def peak(function, *args):
  """Bytes that Python and NumPy held at most during a call."""
  tracemalloc.start()
  try:
    function(*args)
    return tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


def test_data_is_held_once(path):
  """Nothing of it while writing, the result while reading."""
  size = 2**25
  big = np.ones(size // 4, np.int32)
  bundle = make_bundle(golden={f'x{i}': big for i in range(4)})
  assert peak(write_bundle, path, bundle) < size / 2
  assert peak(read_bundle, path) < 4.5 * size


def test_parameters_of_a_bundle(path):
  bundle = read_bundle(path)
  params = target_params(
    bundle.config, MappingSource(bundle.target), jnp.float32, source_name='x'
  )
  assert params['layers_1']['mlp']['experts']['down_proj'].shape == (4, 16, 5)
  params = drafter_params(
    bundle.drafter_config,
    MappingSource(bundle.drafter),
    jnp.bfloat16,
    source_name='x',
  )
  assert len(jax.tree.leaves(params)) == 14


DTYPES = st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16])


@fixtures.deterministic
@given(
  st.integers(0, 2**32 - 1),
  DTYPES,
  hnp.arrays(np.int32, st.integers(0, 5), elements=st.integers(0, 10)),
  hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
  ),
  st.dictionaries(
    st.text(max_size=5), st.floats(-1, 1) | st.text(), max_size=3
  ),
)
def test_random_tensors_come_back_bit_for_bit(
  scratch, seed, dtype, ids, check, recipe
):
  bundle = make_bundle(
    target=random_tensors(tensor_shapes(CONFIG), seed, dtype),
    golden={'prompt': ids, 'ar_tokens': ids[::-1], 'check': check},
    recipe=recipe,
  )
  write_bundle(scratch, bundle)
  check_equal(read_bundle(scratch), bundle)


# ------------------------------------------------------------------ damage


def test_truncations(path, valid):
  rng = random.Random(1)
  header = int.from_bytes(valid[:8], 'little') + 8
  sizes = {*range(12), *(header + i for i in (-1, 0, 1)), len(valid) - 1}
  sizes |= {rng.randrange(len(valid)) for _ in range(60)}
  for size in sorted(sizes):
    path.write_bytes(valid[:size])
    refused(path)
  path.write_bytes(valid + b'\0')
  refused(path)


def test_single_flipped_bits_and_bytes(path, valid):
  rng = random.Random(2)
  header = int.from_bytes(valid[:8], 'little') + 8
  offsets = [*range(16), *range(header - 8, header + 4), len(valid) - 1]
  offsets += [rng.randrange(header) for _ in range(75)]
  offsets += [rng.randrange(header, len(valid)) for _ in range(75)]
  kept = 0
  for offset in offsets:
    for mask in (1 << rng.randrange(8), 0x20, rng.randrange(1, 256)):
      damaged = bytearray(valid)
      damaged[offset] ^= mask
      path.write_bytes(damaged)
      found = refused_or_equal(path)
      assert found or offset < header
      kept += not found
  # White space that pads the header may become other white space.
  assert kept < 10


@fixtures.deterministic
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(scratch, data, as_header):
  prefix = len(data).to_bytes(8, 'little') if as_header else b''
  scratch.write_bytes(prefix + data)
  refused(scratch)


@fixtures.deterministic
@given(st.data())
def test_random_splices(scratch, valid, data):
  start = data.draw(st.integers(0, len(valid)))
  end = data.draw(st.integers(start, min(start + 20, len(valid))))
  patch = data.draw(st.binary(max_size=20))
  spliced = valid[:start] + patch + valid[end:]
  scratch.write_bytes(spliced)
  assert refused_or_equal(scratch) != (spliced == valid)


def test_places_that_hold_no_bundle(tmp_path):
  refused(tmp_path / 'none.kdtr', 'no such file')
  refused(tmp_path, 'is a folder')
  tensors = {'a': np.zeros(1, np.float32)}
  safetensors.numpy.save_file(tensors, tmp_path / 'a')
  refused(tmp_path / 'a', 'not a KDTR bundle')
  safetensors.numpy.save_file(tensors, tmp_path / 'a', {'kdtr ': '{}'})
  refused(tmp_path / 'a', 'not a KDTR bundle')
  safetensors.numpy.save_file({}, tmp_path / 'a')
  refused(tmp_path / 'a', 'not a KDTR bundle')


def test_further_metadata_is_refused(path):
  tensors, manifest = unpack(path)
  metadata = {'kdtr': compact(manifest), 'format': 'pt'}
  safetensors.numpy.save_file(tensors, path, metadata)
  refused(path, 'not a KDTR bundle')


# ------------------------------------- manifests that are sealed, but wrong


def test_the_forger_of_these_tests_makes_valid_bundles(path):
  tensors, manifest = unpack(path)
  forge(path, tensors, seal(manifest | {'tensors': table(tensors)}))
  check_equal(read_bundle(path), make_bundle())


TEXTS = {
  'empty': ('', 'manifest is not JSON'),
  'not JSON': ('{', 'manifest is not JSON'),
  'no object': ('[]', 'not a JSON object'),
  'deep': ('[' * 50_000, 'manifest is not JSON'),
  'nan': ('{"version":NaN}', 'NaN is not JSON'),
  'twice': ('{"version":1,"version":1}', "'version' occurs twice"),
  'no version': ('{}', 'version None; supported: 1'),
  'no keys': ('{"version":1}', 'name is missing'),
}


@pytest.mark.parametrize('case', TEXTS)
def test_manifests_that_are_no_manifests(path, case):
  text, match = TEXTS[case]
  forge(path, unpack(path)[0], text)
  refused(path, match)


def test_a_manifest_whose_seal_is_broken(path):
  tensors, manifest = unpack(path)
  for key, value in (('name', 'tox'), ('sha256', '0' * 64)):
    forge(path, tensors, manifest | {key: value})
    refused(path, 'manifest does not match its digest')


CONFIG_DICT = json.loads(json.dumps(CONFIG.to_dict()))
DRAFTER_DICT = json.loads(json.dumps(DRAFTER_CONFIG.to_dict()))
MANIFESTS = {
  'version 2': ({'version': 2}, 'version 2; supported: 1'),
  'version true': ({'version': True}, 'version True'),
  'version float': ({'version': 1.0}, 'version 1.0'),
  'extra key': ({'odd': 1}, "Manifest: unknown field 'odd'"),
  'name': ({'name': 3}, 'name=3 is not a string'),
  'no name': ({'name': ''}, 'name is empty'),
  'recipe': ({'recipe': []}, r'recipe=\[\] is not a JSON object'),
  'config type': ({'config': 1}, 'config=1 is not a JSON object'),
  'config unknown': (
    {'config': CONFIG_DICT | {'odd': 1}},
    "ModelConfig: unknown field 'odd'",
  ),
  'config missing': (
    {'config': {k: v for k, v in CONFIG_DICT.items() if k != 'vocab_size'}},
    'ModelConfig: vocab_size is missing',
  ),
  'config bool': (
    {'config': CONFIG_DICT | {'hidden_size': True}},
    'hidden_size=True is not an integer',
  ),
  'config int': (
    {'config': CONFIG_DICT | {'norm_topk_prob': 1}},
    'norm_topk_prob=1 is not true or false',
  ),
  'config value': ({'config': CONFIG_DICT | {'n_group': 3}}, 'n_group=3'),
  'config theta': ({'config': CONFIG_DICT | {'rope_theta': 1.0}}, 'rope_theta'),
  'config yarn': (
    {
      'config': CONFIG_DICT
      | {'rope_scaling': CONFIG_DICT['rope_scaling'] | {'beta_fast': 0.0}}
    },
    'beta_fast',
  ),
  'config amplitude': (
    {
      'config': CONFIG_DICT
      | {'rope_scaling': CONFIG_DICT['rope_scaling'] | {'attention_factor': 0}}
    },
    'attention_factor is 0',
  ),
  'config huge': (
    {'config': CONFIG_DICT | {'vocab_size': 10**400}},
    'vocab_size=1000.* is not in -',
  ),
  'config deep': (
    {
      'config': CONFIG_DICT
      | {'num_hidden_layers': 10**9, 'n_routed_experts': 0}
    },
    'num_hidden_layers is 1000000000',
  ),
  'config experts': (
    {'config': CONFIG_DICT | {'n_routed_experts': 10**9}},
    'more than',
  ),
  'config shape': (
    {'config': CONFIG_DICT | {'hidden_size': 17}},
    r'has shape .*, the config asks for',
  ),
  'config layers': (
    {'config': CONFIG_DICT | {'num_hidden_layers': 3}},
    'is missing',
  ),
  'drafter gone': (
    {'drafter_config': None},
    "'drafter/.*' belongs to no section",
  ),
  'drafter type': (
    {'drafter_config': 3},
    'drafter_config=3 is not a JSON object',
  ),
  'drafter value': (
    {'drafter_config': DRAFTER_DICT | {'mask_token_id': 11}},
    'mask_token_id=11 is outside',
  ),
  'drafter taps': (
    {'drafter_config': DRAFTER_DICT | {'target_layer_ids': [0]}},
    'has shape',
  ),
  'drafter vocabulary': (
    {'drafter_config': DRAFTER_DICT | {'vocab_size': 12}},
    "vocab_size is 12, but the target's is 11",
  ),
  'drafter target': (
    {'drafter_config': DRAFTER_DICT | {'num_target_layers': 4}},
    "num_target_layers is 4, but the target's is 2",
  ),
  'table type': ({'tensors': []}, r'tensors=\[\] is not a JSON object'),
  'table empty': ({'tensors': {}}, 'is only in the header'),
}


@pytest.mark.parametrize('case', MANIFESTS)
def test_sealed_manifests_that_are_wrong(path, case):
  change, match = MANIFESTS[case]
  tensors, manifest = unpack(path)
  forge(path, tensors, seal(manifest | change))
  refused(path, match)


NORM = 'target/model.norm.weight'
ENTRIES = {
  'gone': (lambda t: t.pop(NORM), 'is only in the header'),
  'extra': (lambda t: t.update(x=t[NORM]), "'x' is only in the manifest"),
  'dtype': (lambda t: t[NORM].update(dtype='I32'), 'in the manifest'),
  'shape': (lambda t: t[NORM].update(shape=[4, 4]), 'in the manifest'),
  'digest': (lambda t: t[NORM].update(sha256='0' * 64), 'match its digest'),
  'digest type': (lambda t: t[NORM].update(sha256=None), 'match its digest'),
  'key': (lambda t: t[NORM].update(odd=1), 'in the manifest'),
  'no entry': (lambda t: t.update({NORM: 'F32'}), 'in the manifest'),
}


@pytest.mark.parametrize('case', ENTRIES)
def test_tables_that_are_wrong(path, case):
  spoil, match = ENTRIES[case]
  tensors, manifest = unpack(path)
  spoil(manifest['tensors'])
  forge(path, tensors, seal(manifest))
  refused(path, match)


def spoiled(value, number):
  value = value.copy()
  value.flat[0] = number
  return value


FLOATS = np.zeros(16, np.float32)
CONTENTS = {
  'missing': (lambda t: t.pop(NORM), f"'{NORM}' is missing"),
  'extra': (
    lambda t: t.update({'target/model.odd.weight': FLOATS}),
    "'target/model.odd.weight' is unexpected",
  ),
  'missing and extra': (
    lambda t: t.update({'target/x': t.pop(NORM), 'target/y': FLOATS}),
    f"'{NORM}' is missing; tensor 'target/x' is unexpected .and 1 more: "
    "'target/y'.",
  ),
  'no section': (lambda t: t.update(odd=FLOATS), 'belongs to no section'),
  'other section': (
    lambda t: t.update({'targets/x': FLOATS}),
    "'targets/x' belongs to no section",
  ),
  'section only': (lambda t: t.update(target=FLOATS), 'belongs to no section'),
  'drafter missing': (
    lambda t: t.pop('drafter/fc.weight'),
    "'drafter/fc.weight' is missing",
  ),
  'shape': (lambda t: t.update({NORM: FLOATS[:-1]}), r'shape \[15\]'),
  'dtype': (lambda t: t.update({NORM: np.zeros(16, np.int32)}), 'dtype int32'),
  'double': (
    lambda t: t.update({NORM: np.zeros(16, np.float64)}),
    'float64',
  ),
  'nan': (
    lambda t: t.update({NORM: spoiled(t[NORM], np.nan)}),
    f"'{NORM}' holds NaN or infinity",
  ),
  'infinity in bfloat16': (
    lambda t: t.update(
      {'drafter/fc.weight': spoiled(t['drafter/fc.weight'], -np.inf)}
    ),
    'holds NaN or infinity',
  ),
  'prompt alone': (lambda t: t.pop('golden/ar_tokens'), 'without ar_tokens'),
  'tokens alone': (lambda t: t.pop('golden/prompt'), 'without prompt'),
  'prompt long': (
    lambda t: t.update({'golden/prompt': np.zeros(3, np.int64)}),
    'not a row of I32',
  ),
  'prompt rank': (
    lambda t: t.update({'golden/prompt': np.zeros((1, 3), np.int32)}),
    r"'golden/prompt' is I32 \[1, 3\]",
  ),
  'prompt id': (
    lambda t: t.update({'golden/prompt': np.array([11], np.int32)}),
    "'golden/prompt' holds ids outside the vocabulary of 11",
  ),
  'token id': (
    lambda t: t.update({'golden/ar_tokens': np.array([-1], np.int32)}),
    'outside the vocabulary',
  ),
  'golden nan': (
    lambda t: t.update({'golden/layer_0': np.full(2, np.nan, np.float32)}),
    'holds NaN',
  ),
  'golden dtype': (
    lambda t: t.update({'golden/layer_0': np.zeros(2, np.uint8)}),
    'unsupported dtype',
  ),
}


@pytest.mark.parametrize('case', CONTENTS)
def test_contents_that_do_not_fit(path, case):
  spoil, match = CONTENTS[case]
  tensors, manifest = unpack(path)
  spoil(tensors)
  entries = table(tensors)
  for name in set(entries):
    kind = safetensors.numpy.save({'x': tensors[name]})
    header = json.loads(kind[8 : 8 + int.from_bytes(kind[:8], 'little')])
    entries[name]['dtype'] = header['x']['dtype']
  forge(path, tensors, seal(manifest | {'tensors': entries}))
  refused(path, match)


# ----------------------------------------------------------------- writing

BAD_BUNDLES = {
  'missing': (lambda b: b.target.pop('model.norm.weight'), {}, 'is missing'),
  'shape': (
    lambda b: b.target.update({'model.norm.weight': FLOATS[:3]}),
    {},
    'has shape',
  ),
  'nan': (
    lambda b: b.target.update({'model.norm.weight': FLOATS * np.nan}),
    {},
    'holds NaN',
  ),
  'dtype': (
    lambda b: b.target.update({'model.norm.weight': FLOATS.astype('>f4')}),
    {},
    'has dtype >f4',
  ),
  'ids': (
    lambda b: b.golden.update(prompt=np.array([11], np.int32)),
    {},
    'outside the vocabulary',
  ),
  'half a drafter': (None, {'drafter': None}, 'go together'),
  'other half': (None, {'drafter_config': None}, 'go together'),
  'name': (None, {'name': ''}, 'name is empty'),
  'name type': (None, {'name': 3}, 'name=3 is not a string'),
  'recipe nan': (None, {'recipe': {'x': float('nan')}}, 'is not JSON'),
  'recipe object': (None, {'recipe': {'x': object()}}, 'is not JSON'),
}


@pytest.mark.parametrize('case', BAD_BUNDLES)
def test_what_cannot_be_read_is_not_written(path, case):
  spoil, changes, match = BAD_BUNDLES[case]
  old = path.read_bytes()
  bundle = make_bundle(**changes)
  if spoil:
    spoil(bundle)
  with pytest.raises(BundleError, match=f'toy.kdtr: .*{match}'):
    write_bundle(path, bundle)
  assert path.read_bytes() == old
  assert [p.name for p in path.parent.iterdir()] == ['toy.kdtr']


@pytest.mark.parametrize('step', ['fsync', 'replace'])
def test_a_failure_while_writing_leaves_the_old_file(path, step, monkeypatch):
  old = path.read_bytes()

  def fail(*args):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(files.os, step, fail)
    with pytest.raises(BundleError, match='toy.kdtr: .*No space left'):
      write_bundle(path, make_bundle(name='new'))
  assert path.read_bytes() == old
  assert [p.name for p in path.parent.iterdir()] == ['toy.kdtr']


def test_a_link_stays_and_a_pipe_is_written_into(path, tmp_path, valid):
  """safetensors' writer renames over whatever is there."""
  link, pipe = tmp_path / 'link', tmp_path / 'pipe'
  link.symlink_to('toy.kdtr')
  write_bundle(link, make_bundle(name='new'))
  assert link.is_symlink() and read_bundle(path).name == 'new'
  plain = tmp_path / 'plain'
  plain.touch()
  assert path.stat().st_mode == plain.stat().st_mode
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
  try:
    write_bundle(pipe, make_bundle())
    assert os.read(reader, len(valid) + 1) == valid and pipe.is_fifo()
  finally:
    os.close(reader)
  names = {'toy.kdtr', 'link', 'pipe', 'plain'}
  assert {p.name for p in tmp_path.iterdir()} == names


def test_a_place_that_cannot_be_written(tmp_path):
  for path in (tmp_path / 'no' / 'x', tmp_path, pathlib.Path('/')):
    with pytest.raises(BundleError, match=f'{path}: '):
      write_bundle(path, make_bundle())


def test_writing_does_not_clobber_a_mapped_reader(path):
  reader = SafetensorsSource(path)
  target = random_tensors(tensor_shapes(CONFIG), 99)
  write_bundle(path, make_bundle(target=target))
  name = 'model.embed_tokens.weight'
  np.testing.assert_array_equal(
    reader.read(f'target/{name}'), make_bundle().target[name]
  )
  np.testing.assert_array_equal(read_bundle(path).target[name], target[name])


def test_bundle_errors_are_user_errors():
  assert issubclass(BundleError, UserError)


@pytest.mark.parametrize(
  'changes',
  [
    {'n_routed_experts': 0},
    {'q_lora_rank': None, 'attention_bias': True},
    {'tie_word_embeddings': True, 'rope_scaling': None},
    {'mlp_layer_types': ('sparse', 'dense'), 'n_shared_experts': 0},
    {'scoring_func': 'softmax', 'topk_method': 'greedy'},
  ],
)
def test_other_architectures_round_trip(tmp_path, changes):
  config: ModelConfig = dataclasses.replace(CONFIG, **changes)
  target = random_tensors(tensor_shapes(config))
  bundle = make_bundle(config=config, target=target)
  write_bundle(tmp_path / 'x', bundle)
  check_equal(read_bundle(tmp_path / 'x'), bundle)
