"""The exception for bad input."""


class UserError(ValueError):
  """Bad input, such as a flag, a file or a prompt, and what to change.

  `run.py` prints the message as one line and exits with status 2.
  """


def show(value: object, max_length: int = 100) -> str:
  """A value as one printable line: escaped, and cut if it is long."""
  text = ascii(value)
  if not isinstance(value, str):  # An array is printed on several lines.
    text = ' '.join(text.split())
  return text if len(text) <= max_length else text[: max_length - 3] + '...'
