"""Bundles that carry a tokenizer, and bundles of a drafter alone."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.convert import read_drafter
from kdtree_jax.io.export import write_checkpoint
from kdtree_jax.io.kdtr import (
  BundleError,
  read_bundle,
  read_tokenizer,
  write_bundle,
)
from kdtree_jax.io.tensors import SafetensorsSource
from kdtree_jax.io.tokenizer import load_tokenizer
from kdtree_jax.modes import convert
from kdtree_jax.modes.inspect import describe
from tests import support
from tests.command_line import mode_flags
from tests.io import fixtures


def letters(vocab_size=11) -> bytes:
  """A tokenizer.json whose words are single letters."""
  vocab = {chr(ord('a') + i): i for i in range(vocab_size)}
  model = tokenizers.models.BPE(vocab=vocab, merges=[], fuse_unk=False)
  inner = tokenizers.Tokenizer(model)
  inner.decoder = tokenizers.decoders.Fuse()
  return inner.to_str().encode()


FILES = {
  'tokenizer.json': letters(),
  'tokenizer_config.json': b'{"add_bos_token": true, "bos_token": "k"}',
  'chat_template.jinja': b'{{ messages[0].content }}\r\nab',
}
ALONE = {'config': None, 'target': None, 'golden': {}}


@pytest.fixture
def path(tmp_path):
  path = tmp_path / 'x.kdtr'
  write_bundle(path, fixtures.make_bundle(tokenizer=FILES))
  return path


@pytest.fixture
def alone(tmp_path):
  path = tmp_path / 'drafter.kdtr'
  write_bundle(path, fixtures.make_bundle(**ALONE))
  return path


def run(**flags):
  flags = {name: str(value) for name, value in flags.items()}
  return convert.run(mode_flags(mode='convert', **flags))


def test_a_tokenizer_comes_back(path):
  bundle = read_bundle(path)
  assert bundle.tokenizer == FILES == read_tokenizer(path)
  tokenizer = load_tokenizer(path)
  assert tokenizer.encode('abc') == [10, 0, 1, 2]
  assert tokenizer.decode([3, 4]) == 'de'
  messages = [{'role': 'user', 'content': 'c'}]
  # The newline is no letter of this vocabulary.
  assert tokenizer.encode_chat(messages) == [2, 0, 1]
  again = path.with_name('again.kdtr')
  write_bundle(again, bundle)
  assert again.read_bytes() == path.read_bytes()


def test_a_bundle_without_tokenizer_has_none(alone, tmp_path):
  assert load_tokenizer(alone) is None
  write_bundle(tmp_path / 'y.kdtr', fixtures.make_bundle())
  assert load_tokenizer(tmp_path / 'y.kdtr') is None


def test_folder_and_back_byte_for_byte(path, alone, tmp_path):
  for first, flag in ((path, 'target'), (alone, 'drafter')):
    folder, back = tmp_path / flag, tmp_path / f'back-{flag}.kdtr'
    assert run(**{flag: first, 'output': folder}) == 0
    assert run(**{flag: folder, 'output': back}) == 0
    assert back.read_bytes() == first.read_bytes()
  for name, data in FILES.items():
    assert (tmp_path / 'target' / name).read_bytes() == data
  assert load_tokenizer(tmp_path / 'target').encode('b') == [10, 1]


def test_a_drafter_alone_drafts(tmp_path):
  """The folder's drafter and its bundle are one to the engine."""
  name = 'deepseek_v3_trained_drafter'
  folder, path = support.DATA / name / 'dflash', tmp_path / 'd.kdtr'
  run(drafter=folder, output=path)
  target = support.fixture(name)
  ours = api.load_drafter(path, target)
  theirs = api.load_drafter(folder, target)
  assert ours.drafter == theirs.drafter
  for a, b in zip(
    *(map(np.asarray, _leaves(d.params)) for d in (ours, theirs)), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  run(drafter=path, output=tmp_path / 'back')
  before, after = (
    SafetensorsSource(folder),
    SafetensorsSource(tmp_path / 'back'),
  )
  assert before.names() == after.names()
  for tensor in before.names():
    assert before.read(tensor).tobytes() == after.read(tensor).tobytes()
  with pytest.raises(UserError, match='does not fit the target'):
    api.load_drafter(path, support.fixture('moonlight'))
  with pytest.raises(UserError, match='holds a drafter and no target'):
    api.load_target(path)


def _leaves(tree):
  return jax.tree.leaves(tree)


def test_rounding_a_drafter(alone, tmp_path):
  write_checkpoint(tmp_path / 'd', read_bundle(alone))
  run(drafter=tmp_path / 'd', output=tmp_path / 'f.kdtr', weights='float32')
  wide = read_bundle(tmp_path / 'f.kdtr').drafter
  assert {v.dtype for v in wide.values()} == {np.dtype(np.float32)}
  narrow = read_drafter(tmp_path / 'd', dtype=ml_dtypes.bfloat16).drafter
  for name, value in read_bundle(alone).drafter.items():
    assert narrow[name].tobytes() == value.tobytes()


def test_every_flipped_bit_is_found(path, alone):
  """Of the tokenizer, and of a drafter alone, wherever it may be."""
  for file, read in (
    (path, read_bundle),
    (path, read_tokenizer),
    (alone, read_bundle),
  ):
    data = file.read_bytes()
    size = len(data)
    # The last bytes of a file are its narrowest values: the tokenizer.
    total = sum(map(len, FILES.values()))
    spots = range(size - total, size, 97) if file == path else ()
    for at in (*spots, 3, 9, 200, size // 2, size - 1):
      if read is read_tokenizer and 200 < at < size - total:
        continue
      broken = bytearray(data)
      broken[at] ^= 1 << at % 8
      file.write_bytes(broken)
      with pytest.raises(BundleError):
        read(file)
    file.write_bytes(data[:-1])
    with pytest.raises(BundleError):
      read(file)
    file.write_bytes(data)


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'tokenizer': {'vocab.txt': b'x'}}, 'vocab.txt.* is none of tokenizer'),
    (ALONE | {'tokenizer': FILES}, 'has tokenizer, but no target'),
    (ALONE | {'golden': {'x': np.ones(1, np.float32)}}, 'has golden, but'),
    (ALONE | {'drafter': None, 'drafter_config': None}, 'neither a target nor'),
    ({'target': None}, 'target and config go together'),
    ({'config': None}, 'target and config go together'),
  ],
)
def test_what_is_no_bundle(tmp_path, changes, match):
  with pytest.raises(BundleError, match=match):
    write_bundle(tmp_path / 'x', fixtures.make_bundle(**changes))
  assert not list(tmp_path.iterdir())


def test_tokenizer_tensors_of_other_kinds(path):
  tensors, manifest = fixtures.unpack(path)
  name = 'tokenizer/tokenizer.json'
  tensors[name] = tensors[name].astype(np.int32)
  manifest['tensors'] |= fixtures.table({name: tensors[name]})
  fixtures.forge(path, tensors, fixtures.seal(manifest))
  for read in (read_bundle, read_tokenizer):
    with pytest.raises(BundleError, match='is I32 .* not a row of U8'):
      read(path)


def test_description(path, alone):
  lines = describe(path).splitlines()
  sizes = ', '.join(f'{n} {len(FILES[n]):,} bytes' for n in sorted(FILES))
  assert f'tokenizer: {sizes}' in lines
  lines = describe(alone).splitlines()
  assert lines[1] == 'target: none'
  assert any(
    line.startswith('drafter architecture: 1 layers') for line in lines
  )


def test_refused_conversions(path, alone, tmp_path):
  for flags, match in (
    ({}, 'needs --target, --drafter or both'),
    ({'drafter': tmp_path / 'none'}, '--drafter=.*none: no such file'),
    ({'drafter': alone, 'weights': 'float32'}, '--weights is not used'),
    ({'target': path, 'drafter': alone}, '--drafter is not used'),
  ):
    with pytest.raises(UserError, match=match):
      run(**flags, output=tmp_path / 'out')


def test_a_broken_tokenizer_is_named_as_part_of_its_file(tmp_path):
  path = tmp_path / 'x.kdtr'
  bundle = fixtures.make_bundle(tokenizer={'tokenizer.json': b'{'})
  write_bundle(path, bundle)
  with pytest.raises(UserError, match=r'x\.kdtr/tokenizer\.json: no token'):
    load_tokenizer(path)
  config = dict(FILES) | {'tokenizer_config.json': json.dumps([]).encode()}
  write_bundle(path, dataclasses.replace(bundle, tokenizer=config))
  with pytest.raises(UserError, match=r'x\.kdtr/tokenizer_config\.json: holds'):
    load_tokenizer(path)
