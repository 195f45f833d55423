"""Safetensors files and folders: what is read, and what is refused."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdtree_jax.errors import UserError
from kdtree_jax.io.tensors import (
  CheckpointError,
  MappingSource,
  SafetensorsSource,
  read_json,
  write_safetensors,
)
from tests.io.fixtures import DATA, write_shards

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.array([1, -2.5], ml_dtypes.bfloat16)


@pytest.fixture
def folder(tmp_path):
  safetensors.numpy.save_file(
    {'x.a': A, 'b': B}, tmp_path / 'model.safetensors'
  )
  return tmp_path


def check_contents(source):
  assert source.names() == ('b', 'x.a')
  assert source.shape('x.a') == (2, 3)
  assert (source.dtype('x.a'), source.dtype('b')) == ('F32', 'BF16')
  np.testing.assert_array_equal(source.read('x.a'), A)
  assert source.read('b').dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(source.read('b'), B)


def test_a_file_a_folder_and_a_mapping_read_alike(folder):
  check_contents(SafetensorsSource(folder))
  check_contents(SafetensorsSource(folder / 'model.safetensors'))
  check_contents(MappingSource({'x.a': A, 'b': B}))


def test_shards_with_an_index(tmp_path):
  write_shards(tmp_path, {'m-1.safetensors': {'x.a': A}, 'm-2': {'b': B}})
  check_contents(SafetensorsSource(tmp_path))


@pytest.mark.parametrize('source', ['file', 'mapping'])
def test_an_unknown_name(folder, source):
  source = SafetensorsSource(folder) if source == 'file' else MappingSource({})
  for method in (source.shape, source.dtype, source.read):
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
      method('nope')


def refused(path, match):
  with pytest.raises(CheckpointError, match=match) as info:
    SafetensorsSource(path)
  assert '\n' not in str(info.value)


def test_missing_files(tmp_path):
  refused(tmp_path, 'neither model.safetensors nor')
  refused(tmp_path / 'none', 'none: no such file')
  (tmp_path / 'model.safetensors').mkdir()
  refused(tmp_path, 'model.safetensors: is not a file')


def test_every_truncation_of_a_file(folder):
  path = folder / 'model.safetensors'
  data = path.read_bytes()
  for size in range(len(data)):
    path.write_bytes(data[:size])
    refused(path, 'model.safetensors: not a complete safetensors file')
  path.write_bytes(data + b'\0')
  refused(path, 'not a complete safetensors file')


HEADERS = {
  'overlap': {'a': [0, 8], 'b': [4, 12]},
  'gap': {'a': [0, 8], 'b': [12, 20]},
  'beyond the file': {'a': [0, 8], 'b': [8, 1 << 40]},
  'negative': {'a': [0, 8], 'b': [8, -1]},
  'reversed': {'a': [8, 0], 'b': [8, 16]},
}


def raw_file(path, header, size=16):
  path.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(size))


@pytest.mark.parametrize('case', HEADERS)
def test_offsets(tmp_path, case):
  header = {
    name: {'dtype': 'F32', 'shape': [2], 'data_offsets': offsets}
    for name, offsets in HEADERS[case].items()
  }
  raw_file(tmp_path / 'x', json.dumps(header).encode())
  refused(tmp_path / 'x', 'x: not a complete safetensors file')


@pytest.mark.parametrize(
  'header',
  [
    b'\xff\xfe{}',
    b'{]',
    b'[]',
    b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],'
    b'"data_offsets":[0,16]}}',
    b'{"a":{"dtype":"F31","shape":[4],"data_offsets":[0,16]}}',
    b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}}',
  ],
)
def test_headers(tmp_path, header):
  raw_file(tmp_path / 'x', header)
  refused(tmp_path / 'x', 'x: not a complete safetensors file')


def test_header_length_beyond_the_file_and_the_cap(tmp_path):
  for length in (3, 1000, 1 << 40, (1 << 64) - 1):
    (tmp_path / 'x').write_bytes(length.to_bytes(8, 'little') + b'{}')
    refused(tmp_path / 'x', 'x: not a complete safetensors file')


def test_a_dtype_that_numpy_lacks_is_described_but_not_read(tmp_path):
  header = b'{"a":{"dtype":"F8_E8M0","shape":[16],"data_offsets":[0,16]}}'
  raw_file(tmp_path / 'x', header)
  source = SafetensorsSource(tmp_path / 'x')
  assert source.dtype('a') == 'F8_E8M0'
  with pytest.raises(CheckpointError, match="'a' of dtype F8_E8M0 cannot"):
    source.read('a')


INDEX_FAULTS = {
  'missing shard': ({'a': 's1', 'b': 's3'}, "names 's3', which is missing"),
  'lacking in shard': (
    {'a': 's1', 'b': 's2', 'c': 's2'},
    "tensor 'c' is not in s2",
  ),
  'other shard': ({'a': 's2', 'b': 's1'}, "tensor 'a' is not in s2"),
  'lacking in index': ({'a': 's1', 'c': 's2'}, "tensor 'c' is not in s2"),
  'empty': ({}, 'weight_map is missing or no object'),
  'not an object': (['s1'], 'weight_map is missing or no object'),
  'not a name': ({'a': 's1', 'b': 2}, "'b'.*=2 is not a file name"),
}


@pytest.mark.parametrize('case', INDEX_FAULTS)
def test_an_index_that_disagrees(tmp_path, case):
  weight_map, match = INDEX_FAULTS[case]
  write_shards(tmp_path, {'s1': {'a': A}, 's2': {'b': B}}, weight_map)
  refused(tmp_path, match)


def test_a_tensor_that_the_index_lacks(tmp_path):
  shards = {'s1': {'a': A}, 's2': {'b': B, 'c': B}}
  write_shards(tmp_path, shards, {'a': 's1', 'b': 's2'})
  refused(tmp_path, "s2: tensor 'c' is not in the index")


def test_a_tensor_in_two_shards(tmp_path):
  shards = {'s1': {'a': A}, 's2': {'b': B, 'a': A}}
  write_shards(tmp_path, shards, {'a': 's1', 'b': 's2'})
  refused(tmp_path, "s2: tensor 'a' is also in the shard s1")


@pytest.mark.parametrize(
  'shard', ['../s1', '/etc/passwd', 'x/../../s1', '..', '', 'a\\b', 's\0']
)
def test_a_shard_outside_the_folder(tmp_path, shard):
  write_shards(tmp_path, {'s1': {'a': A}}, {'a': shard})
  refused(tmp_path, "outside the checkpoint's folder")


def test_a_single_file_beside_an_index_is_ambiguous(folder):
  write_shards(folder, {'s1': {'a': A}})
  refused(folder, 'holds model.safetensors beside an index')
  write_shards(folder, {}, {'x.a': 'model.safetensors', 'b': 's1'})
  refused(folder, "tensor 'b' is not in s1")
  write_shards(folder, {}, dict.fromkeys(('x.a', 'b'), 'model.safetensors'))
  check_contents(SafetensorsSource(folder))


JSON_FAULTS = {
  '': 'not JSON',
  '{': 'not JSON',
  '[1]': 'holds .*, not a JSON object',
  '3': 'not a JSON object',
  '{"a": NaN}': 'NaN is not JSON',
  '{"a": {"b": 1, "b": 2}}': "key 'b' occurs twice",
  '[' * 100_000: 'not JSON',
  '{"a": ' + '9' * 5000 + '}': 'not JSON',
}


@pytest.mark.parametrize('text', JSON_FAULTS, ids=range(len(JSON_FAULTS)))
def test_json_that_is_not_an_object(tmp_path, text):
  path = tmp_path / 'x.json'
  path.write_text(text)
  with pytest.raises(UserError, match=f'x.json: .*{JSON_FAULTS[text]}'):
    read_json(path)


def test_json_files_that_cannot_be_read(tmp_path):
  with pytest.raises(CheckpointError, match='x.json: no such file'):
    read_json(tmp_path / 'x.json')
  with pytest.raises(CheckpointError, match='cannot be read'):
    read_json(tmp_path)
  (tmp_path / 'y').write_bytes(b'{"\xff": 1}')
  with pytest.raises(CheckpointError, match='y: not JSON'):
    read_json(tmp_path / 'y')


def test_fixtures_open():
  source = SafetensorsSource(DATA / 'moonlight')
  assert source.dtype('lm_head.weight') == 'F32'
  assert source.metadata() == {'format': 'pt'}


def test_only_a_plain_file_is_written(tmp_path):
  """safetensors' writer would rename its file over anything else."""
  link, pipe = tmp_path / 'link', tmp_path / 'pipe'
  link.symlink_to('file')
  os.mkfifo(pipe)
  for path in (link, pipe):
    with pytest.raises(OSError, match='is no plain file'):
      write_safetensors(path, {'a': A}, {})
  assert link.is_symlink() and pipe.is_fifo()
  write_safetensors(tmp_path / 'file', {'a': A.T}, {})
  mode = (tmp_path / 'file').stat().st_mode
  (tmp_path / 'plain').touch()
  assert mode == (tmp_path / 'plain').stat().st_mode
  found = SafetensorsSource(tmp_path / 'file').read('a')
  np.testing.assert_array_equal(found, A.T)
