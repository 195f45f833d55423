"""The end of a run: an exit status, at most one line on standard error."""

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
  """Prints `error: ` and the message as one line; returns the exit status."""
  with contextlib.suppress(OSError):  # Standard error may be closed.
    print(f'error: {" ".join(message.split())}', file=sys.stderr, flush=True)
  return FAILED


def exit_status(work: Callable[[], int]) -> int:
  """Runs `work` and prints a user's error as one line.

  Args:
    work: returns the status of a run without errors.

  Returns:
    That status; 2 after an error; 130 after Ctrl-C; 0 if the reader of the
    output, such as head, has closed it.

  Raises:
    Exception: an error of the program itself.
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
    # From a kernel that was chosen by name and cannot run.
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
    # If it was standard error, warnings are lost.
    return 0 if _is_unread(sys.stdout) else fail(reason(error))
  except OSError as error:
    if error.filename is None:
      return fail(reason(error))
    return fail(f'{show_path(os.fsdecode(error.filename))}: {reason(error)}')


def _flushed(status: int) -> int:
  """The status after flushing; Python itself would exit with 120."""
  satisfied = _is_unread(sys.stdout)
  error = _flush(sys.stdout)
  if error and not isinstance(error, BrokenPipeError) and status != FAILED:
    status = fail(f'{OUTPUT}: {reason(error)}')
  if _flush(sys.stderr) and not status and not satisfied:
    status = FAILED
  return status


class _Output(io.FileIO):
  """The standard output, with errors that name it."""

  def write(self, data: Buffer) -> int | None:
    try:
      return super().write(data)
    except OSError as error:
      raise OSError(error.errno, error.strerror, OUTPUT) from None


def _named(stream: TextIO) -> TextIO:
  """A stream to the same file, if it is one, with errors that name it.

  Escapes characters that its encoding lacks.
  """
  if not isinstance(stream, io.TextIOWrapper):
    return stream
  stream.reconfigure(errors='backslashreplace')
  buffered = isinstance(stream.buffer, io.BufferedWriter)
  # Unbuffered under PYTHONUNBUFFERED.
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
  """Flushes; returns the error, after which the stream writes to nothing."""
  try:
    stream.flush()
  except OSError as error:
    with contextlib.suppress(OSError):
      os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
      stream.flush()
    return error
  return None


def _is_unread(stream: TextIO) -> bool:
  """Whether a stream is a pipe or a socket without a reader."""
  poll = select.poll()
  try:
    poll.register(stream, 0)
  except OSError:  # Not a file.
    return False
  return any(
    event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)
  )
