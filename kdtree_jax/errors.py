"""The exception for bad input."""

from typing import Any


class UserError(ValueError):
  """Bad input, such as a flag, a file or a prompt, and what to change.

  `run.py` prints the message as one line and exits with status 2.
  """


def show(value: Any, max_length: int = 100) -> str:
  """A value as one printable line: escaped, and cut if it is long."""
  text = ascii(value)
  return text if len(text) <= max_length else text[: max_length - 3] + '...'
