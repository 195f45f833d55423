"""JSON lines."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.errors import UserError
from kdtree_jax.io.results import write_jsonl


def test_numpy_and_jax_become_plain_json(tmp_path):
  path = tmp_path / 'r.jsonl'
  record = {
    'z': np.int32(3),
    'a': np.arange(4).reshape(2, 2),
    'f': np.float32(0.5),
    'b': np.bool_(True),
    'h': ml_dtypes.bfloat16(1.5),
    'j': jnp.arange(3),
    'n': {'text': 'é\n', 'none': None, 'tuple': (1, np.int64(2))},
  }
  write_jsonl(path, [record, {}])
  first, second, rest = path.read_text().split('\n')
  assert json.loads(first) == {
    'z': 3,
    'a': [[0, 1], [2, 3]],
    'f': 0.5,
    'b': True,
    'h': 1.5,
    'j': [0, 1, 2],
    'n': {'text': 'é\n', 'none': None, 'tuple': [1, 2]},
  }
  assert first.startswith('{"z":3,"a":[[0,1],[2,3]],')
  assert (second, rest) == ('{}', '')


BAD = {
  'nan': {'x': float('nan')},
  'infinite array': {'x': np.array([np.inf])},
  'no data': {'x': object()},
  'objects': {'x': np.array([object()])},
  'key': {np.int64(1): 2},
  'no object': [1],
}


@pytest.mark.parametrize('case', BAD)
def test_what_is_not_json_leaves_the_old_file(tmp_path, case):
  path = tmp_path / 'r.jsonl'
  write_jsonl(path, [{'old': 1}])
  with pytest.raises(UserError, match='r.jsonl: record 1 is not JSON'):
    write_jsonl(path, [{'x': 1}, BAD[case]])
  assert path.read_text() == '{"old":1}\n'
  assert [p.name for p in tmp_path.iterdir()] == ['r.jsonl']


def test_a_failing_producer_leaves_no_trace(tmp_path):
  def records():
    yield {'x': 1}
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    write_jsonl(tmp_path / 'r.jsonl', records())
  assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written(tmp_path):
  (tmp_path / 'folder').mkdir()
  for path in (tmp_path / 'no' / 'r', tmp_path / 'folder', '/'):
    with pytest.raises(UserError, match=f'{path}: ') as info:
      write_jsonl(path, [{'x': 1}])
    assert '\n' not in str(info.value)
  assert [p.name for p in tmp_path.iterdir()] == ['folder']
