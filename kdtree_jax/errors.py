"""The one exception that a user, not a programmer, is meant to read."""


class UserError(ValueError):
  """Bad input: a flag, a file or a prompt. The message says what to change.

  `run.py` prints it as one line and exits with status 2; a library user
  catches it as the ValueError that it is.
  """
