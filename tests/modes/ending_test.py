"""How a run ends."""

import io
import os
import pathlib
import subprocess
import sys

import pytest

from kdtree_jax.errors import UserError
from kdtree_jax.modes import ending


def unread():
  """The end of a pipe that nobody reads."""
  reader, writer = os.pipe()
  os.close(reader)
  return os.fdopen(writer, 'w')


def full():
  return open('/dev/full', 'w')


def said(text, stream='stdout', flush=False):
  def work():
    print(text, file=getattr(sys, stream), flush=flush)
    return 0

  return work


@pytest.mark.parametrize('flush', [False, True])
@pytest.mark.parametrize(
  ('stream', 'made', 'status', 'message'),
  [
    ('stdout', unread, 0, None),
    ('stdout', full, 2, 'error: standard output: No space left on device'),
    ('stderr', unread, 2, None),
    ('stderr', full, 2, None),
  ],
)
def test_streams_that_take_nothing(
  monkeypatch, capsys, stream, made, status, message, flush
):
  broken = made()
  monkeypatch.setattr(sys, stream, broken)
  assert ending.exit_status(said('x', stream, flush)) == status
  assert capsys.readouterr().err == (f'{message}\n' if message else '')
  broken.close()  # What is left of it goes nowhere.


def test_streams_that_are_closed(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'stdout', None)
  assert ending.exit_status(lambda: 1 / 0) == 2
  assert 'standard output is closed' in capsys.readouterr().err


def test_errors_never_go_to_the_output(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'stderr', None)

  def work():
    print('fine')
    raise UserError('not fine')

  assert ending.exit_status(work) == 2
  assert capsys.readouterr().out == 'fine\n'
  sys.stderr.close()


def test_both_streams_in_one_pipe(monkeypatch):
  """As in `2>&1 | head`: the reader has seen enough."""
  with unread() as broken:
    monkeypatch.setattr(sys, 'stdout', broken)
    with os.fdopen(os.dup(broken.fileno()), 'w') as other:
      monkeypatch.setattr(sys, 'stderr', other)
      assert ending.exit_status(said('x', 'stderr', True)) == 0


def test_a_verdict_stays_what_it_is(monkeypatch):
  with unread() as broken:
    monkeypatch.setattr(sys, 'stdout', broken)

    def work():
      print('no near-tie')
      return 1

    assert ending.exit_status(work) == 1


@pytest.mark.parametrize(
  ('error', 'status', 'message'),
  [
    (UserError('a\n b'), 2, 'a b'),
    (PermissionError(13, 'Permission denied', 'x/y'), 2, 'x/y: Permission'),
    (OSError(36, 'File name too long', b'x'), 2, 'too long'),
    (OSError(5, 'Input/output error'), 2, 'error: Input/output error'),
    (ValueError('implementation: none'), 2, '--kernels: implementation: none'),
    (MemoryError(), 2, 'out of memory'),
    (KeyboardInterrupt(), 130, None),
  ],
)
def test_what_a_user_can_mend_is_one_line(capsys, error, status, message):
  def work():
    raise error

  assert ending.exit_status(work) == status
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == (message is not None)
  assert message is None or (message in lines[0] and 'error: ' in lines[0])


def test_errors_of_the_program_are_not_hidden():
  with pytest.raises(ZeroDivisionError):
    ending.exit_status(lambda: 1 // 0)


def test_text_that_a_stream_cannot_show(monkeypatch):
  shown = io.TextIOWrapper(io.BytesIO(), 'ascii')
  monkeypatch.setattr(sys, 'stdout', shown)
  assert ending.exit_status(said('wrote \udcff \u00e9')) == 0
  assert shown.buffer.getvalue() == b'wrote \\udcff \\xe9\n'


@pytest.mark.parametrize(
  ('target', 'redirected', 'errors'),
  [
    (
      'tests/data/moonlight',
      '>/dev/full',
      'error: standard output: No space left on device\n',
    ),
    ('missing', '2>/dev/full', ''),
  ],
)
def test_a_process_ends_as_it_says(target, redirected, errors):
  """What Python itself does at its end, exit status 120, is not left to do."""
  command = f'exec "$0" run.py --mode=inspect --target={target} {redirected}'
  done = subprocess.run(
    ['sh', '-c', command, sys.executable],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert (done.returncode, done.stdout, done.stderr) == (2, '', errors)
