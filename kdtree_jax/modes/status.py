"""A message on a terminal during long work."""

import contextlib
import sys
from collections.abc import Iterator

import rich.console


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
  """A spinner on a terminal, nothing elsewhere."""
  console = rich.console.Console(stderr=True)
  if not sys.stderr.isatty():
    yield
    return
  with console.status(message):
    yield
