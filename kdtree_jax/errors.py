"""The one exception that a user, not a programmer, is meant to read."""


class UserError(ValueError):
  """Bad input: a flag, a file or a prompt. The message says what to change.

  `run.py` prints it as one line and exits with status 2; a library user
  catches it as the ValueError that it is.
  """


def show(value: object, limit: int = 100) -> str:
  """A foreign value on one printable line: escaped, and cut if it is long."""
  text = ascii(value)
  if not isinstance(value, str):  # An array is printed on several lines.
    text = ' '.join(text.split())
  return text if len(text) <= limit else text[: limit - 3] + '...'
