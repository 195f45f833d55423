"""How a run ends: an exit status, and at most one line on standard error."""

import contextlib
import io
import os
import select
import sys
from collections.abc import Buffer, Callable
from typing import TextIO

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import reason, show_path

FAILED, INTERRUPTED = 2, 130
OUTPUT = 'standard output'
_TOO_LARGE = (
  'out of memory; lower --capacity, --batch_size, --tree_budget or '
  '--prefill_chunk'
)


def fail(message: str) -> int:
  """Prints `error: ` and the message on one line; gives the exit status."""
  with contextlib.suppress(OSError):  # Who closed it does not want to know.
    print(f'error: {" ".join(message.split())}', file=sys.stderr, flush=True)
  return FAILED


def exit_status(work: Callable[[], int]) -> int:
  """Works, and says in one line what a user can mend.

  Args:
    work: gives the status if all is well.

  Returns:
    That status; 2 after a line; 130 after Ctrl-C; 0 if a reader of the output,
    such as head, has seen enough.

  Raises:
    Exception: errors of the program itself.
  """
  if sys.stderr is None:
    # `print` would take standard output instead.
    sys.stderr = open(os.devnull, 'w')
  if sys.stdout is None:
    return fail(f'{OUTPUT} is closed; send it to /dev/null')
  sys.stdout = _named(sys.stdout)
  return _flushed(_caught(work))


def _caught(work: Callable[[], int]) -> int:
  try:
    return work()
  except UserError as error:
    return fail(str(error))
  except ValueError as error:
    # A kernel that was asked for by name says why it cannot run.
    if not str(error).startswith('implementation:'):
      raise
    return fail(f'--kernels: {error}')
  except KeyboardInterrupt:
    return INTERRUPTED
  except MemoryError:
    return fail(_TOO_LARGE)
  except RuntimeError as error:  # JAX's is one; it may not be imported yet.
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return fail(_TOO_LARGE)
  except BrokenPipeError as error:
    # On standard error it means that warnings are lost.
    return 0 if _is_unread(sys.stdout) else fail(reason(error))
  except OSError as error:
    if error.filename is None:
      return fail(reason(error))
    return fail(f'{show_path(os.fsdecode(error.filename))}: {reason(error)}')


def _flushed(status: int) -> int:
  """The status, once the output has left the program, which else exits 120."""
  satisfied = _is_unread(sys.stdout)
  error = _flush(sys.stdout)
  if error and not isinstance(error, BrokenPipeError) and status != FAILED:
    status = fail(f'{OUTPUT}: {reason(error)}')
  if _flush(sys.stderr) and not status and not satisfied:
    status = FAILED
  return status


class _Output(io.FileIO):
  """The standard output, whose errors say so."""

  def write(self, data: Buffer) -> int | None:
    try:
      return super().write(data)
    except OSError as error:
      raise OSError(error.errno, error.strerror, OUTPUT) from None


def _named(stream: TextIO) -> TextIO:
  """A stream of the same file, if it is one, whose errors name it.

  What its encoding lacks, as paths and texts may hold, is escaped.
  """
  if not isinstance(stream, io.TextIOWrapper):
    return stream
  stream.reconfigure(errors='backslashreplace')
  buffered = isinstance(stream.buffer, io.BufferedWriter)
  # PYTHONUNBUFFERED has it raw.
  if not isinstance(
    stream.buffer.raw if buffered else stream.buffer, io.FileIO
  ):
    return stream
  stream.flush()
  raw = _Output(stream.fileno(), 'w', closefd=False)
  return io.TextIOWrapper(
    io.BufferedWriter(raw) if buffered else raw,
    encoding=stream.encoding,
    errors=stream.errors,
    line_buffering=stream.line_buffering,
    write_through=not buffered,
  )


def _flush(stream: TextIO) -> OSError | None:
  """What keeps a stream from being written; it then goes nowhere."""
  try:
    stream.flush()
  except OSError as error:
    with contextlib.suppress(OSError):
      os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
      stream.flush()
    return error
  return None


def _is_unread(stream: TextIO) -> bool:
  """Whether a stream is a pipe or a socket that nobody reads any more."""
  poll = select.poll()
  try:
    poll.register(stream, 0)
  except OSError:  # It is no file at all.
    return False
  return any(
    event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)
  )
