"""Paths that flags name: what is refused, and how what is not is written."""

import os
import pathlib
import shutil
import socket
import tempfile

import pytest

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.convert import read_checkpoint
from kdtree_jax.io.files import file_kind, write_atomically
from kdtree_jax.io.paths import check_output, check_path
from kdtree_jax.io.prompts import read_prompts
from kdtree_jax.io.results import JsonLines, read_jsonl, write_jsonl
from kdtree_jax.io.tokenizer import load_tokenizer
from kdtree_jax.modes.inspect import describe
from kdtree_jax.training.build import build_corpus
from tests import support

LONG = 'x' * 300


@pytest.fixture
def closed():
  """A folder that one may not enter: even root is somebody else in here."""
  folder = pathlib.Path(tempfile.mkdtemp())
  folder.chmod(0o755)
  inner = folder / 'closed'
  inner.mkdir()
  (inner / 'file').write_text('{}')
  inner.chmod(0)
  user = os.geteuid()
  if not user:
    os.seteuid(65534)
  try:
    yield inner
  finally:
    os.seteuid(user)
    inner.chmod(0o755)
    shutil.rmtree(folder)


READERS = {
  'target': api.load_target,
  'drafter': lambda path: api.load_drafter(path, support.variant('tiny')),
  'inspect': describe,
  'convert': read_checkpoint,
  'tokenizer': load_tokenizer,
  'prompts': read_prompts,
  'corpus_sources': lambda path: build_corpus([path], pathlib.Path('x'), 300),
}


@pytest.mark.parametrize('suffix', ['', '.kdtr'])
@pytest.mark.parametrize('reader', READERS)
def test_what_is_no_path_is_one_line(reader, suffix, closed):
  for path in (LONG, f'{closed}/file', 'a\0b'):
    with pytest.raises(UserError) as info:
      READERS[reader](path + suffix)
    text = str(info.value)
    assert '\n' not in text and '\0' not in text
    assert (LONG if path == LONG else path[-1]) in text


def test_a_checkpoint_in_a_folder_that_may_not_be_entered(closed):
  for read in (api.load_target, describe, load_tokenizer):
    with pytest.raises(UserError, match='Permission denied'):
      read(closed)


def test_a_shard_whose_name_is_too_long(tmp_path):
  folder = tmp_path / 'moonlight'
  shutil.copytree(support.DATA / 'moonlight', folder)
  (folder / 'model.safetensors').unlink()
  index = folder / 'model.safetensors.index.json'
  index.write_text(f'{{"weight_map": {{"a": "{LONG}"}}}}')
  with pytest.raises(UserError, match='too long'):
    api.load_target(folder)


def test_kinds(tmp_path):
  (tmp_path / 'loop').symlink_to('loop')
  (tmp_path / 'link').symlink_to(tmp_path)
  assert file_kind(__file__) == 'file'
  assert file_kind(tmp_path / 'link') == 'folder'
  assert file_kind('/dev/null') == 'special'
  assert file_kind(tmp_path / 'none') is None
  assert file_kind(f'{__file__}/x') is None
  for path in (tmp_path / 'loop', LONG, '\0'):
    with pytest.raises(UserError):
      file_kind(path)


def test_paths_of_flags(closed):
  check_path('missing', 'target')
  for path in ('', LONG, f'{closed}/x', 'a\0b'):
    with pytest.raises(UserError, match=r'^--target[= ]'):
      check_path(path, 'target')


def test_outputs_that_cannot_be_written(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'folder').mkdir()
  (tmp_path / 'file').write_text('old')
  with socket.socket(socket.AF_UNIX) as server:
    server.bind('socket')
    bad = ['', 'folder', '.', '/', 'new/', 'no/file', 'file/x', LONG, 'socket']
    for path in [*bad, '/proc/x']:
      with pytest.raises(UserError, match=r'^--output[= ]') as info:
        check_output(path)
      assert '\n' not in str(info.value)
  for path in ('', 'file', 'no/folder', '/dev/null', LONG):
    with pytest.raises(UserError, match=r'^--plots[= ]'):
      check_output(path, 'plots', folder=True)
  for path in ('new', 'file', '/dev/null', 'x' * 255, None):
    check_output(path)
  for path in ('new', 'folder', '.'):
    check_output(path, folder=True)
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    'file',
    'folder',
    'socket',
  ]
  assert (tmp_path / 'file').read_text() == 'old'


def test_outputs_without_permission(closed):
  for path in (closed / 'new', closed):
    with pytest.raises(UserError, match='Permission denied'):
      check_output(str(path), folder=True)


WRITERS = {
  'atomically': lambda path: write_atomically(path, [b'{"x":1}\n']),
  'whole': lambda path: write_jsonl(path, [{'x': 1}]),
  'lines': lambda path: _lines(path, append=False),
  'more lines': lambda path: _lines(path, append=True),
}


def _lines(path, **options):
  with JsonLines(str(path), **options) as lines:
    lines.write({'x': 1})


@pytest.mark.parametrize('writer', WRITERS)
def test_links_stay_and_what_is_no_file_is_written_into(tmp_path, writer):
  write = WRITERS[writer]
  other = tmp_path / 'other'
  other.mkdir()
  link = tmp_path / 'link'
  link.symlink_to('other/file')
  for _ in range(2):  # Dangling, then not.
    write(link)
    assert link.is_symlink() and other.joinpath('file').is_file()
  count = 2 if writer == 'more lines' else 1
  assert (other / 'file').read_text() == '{"x":1}\n' * count
  device = tmp_path / 'null'
  device.symlink_to('/dev/null')
  write(device)
  assert device.is_char_device() and device.is_symlink()
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
  try:
    write(pipe)
    assert os.read(reader, 100) == b'{"x":1}\n' and pipe.is_fifo()
  finally:
    os.close(reader)
  write(tmp_path / ('x' * 255))


@pytest.mark.parametrize('writer', WRITERS)
def test_a_full_device_is_one_line(writer):
  with pytest.raises(UserError, match='/dev/full: cannot be written: No space'):
    WRITERS[writer]('/dev/full')


def test_lines_are_there_when_they_are_written(tmp_path):
  path = tmp_path / 'x'
  path.write_text('old')
  with pytest.raises(KeyboardInterrupt), JsonLines(str(path)) as lines:
    assert path.read_text() == 'old'
    lines.write({'a': 1})
    assert path.read_text() == '{"a":1}\n'
    with pytest.raises(UserError, match='record 1 is not JSON'):
      lines.write({'a': float('nan')})
    lines.write({'b': 2})
    raise KeyboardInterrupt
  assert path.read_text() == '{"a":1}\n{"b":2}\n'
  path.write_text('{"a":1}')  # As an editor leaves it.
  with JsonLines(str(path), append=True) as lines:
    lines.write({'c': 3})
  assert path.read_text() == '{"a":1}\n{"c":3}\n'


def test_a_line_that_does_not_fit_leaves_no_part(tmp_path, monkeypatch):
  path = tmp_path / 'x'
  with JsonLines(str(path)) as lines:
    lines.write({'a': 1})
    real, left = lines._file, [3]

    class Small:
      """A disk with room for three bytes."""

      def __getattr__(self, name):
        return getattr(real, name)

      def write(self, data):
        count = min(left[0], len(data))
        left[0] -= count
        if not count:
          raise OSError(28, 'No space left on device')
        return real.write(data[:count])

    lines._file = Small()
    with pytest.raises(UserError, match='No space left'):
      lines.write({'b': 2})
    left[0] = 100
    lines.write({'c': 3})
  assert path.read_text() == '{"a":1}\n{"c":3}\n'


def test_json_lines_come_back(tmp_path):
  path = tmp_path / 'x'
  path.write_bytes(b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\r\n\r\n[1]\n')
  assert list(read_jsonl(path)) == [(1, {'a': '\u2028'}), (3, [1])]
  for data, match in ((b'{}\n{', 'line 2: not JSON'), (b'\xff', 'utf-8')):
    path.write_bytes(data)
    with pytest.raises(UserError, match=f'{path}: .*{match}'):
      list(read_jsonl(path))
