"""Files of prompts: one JSON object a line."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import parse_json, show


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One line: `{"id", "turns": [...]}` or `{"id", "prompt"}`.

  Attributes:
    id: as given, or the number of the line from 0.
    turns: what the user says, in order; one where the line has a `prompt`.
    category: as given, for tables.
  """

  id: str | int
  turns: tuple[str, ...]
  category: str | None = None


def read_prompts(path: os.PathLike | str) -> list[Prompt]:
  """Reads a file of prompts; empty lines do not count.

  Raises:
    UserError: unreadable, empty, or a line that is no prompt; names the line.
  """
  path = pathlib.Path(path)
  try:
    lines = path.read_text(encoding='utf-8').split('\n')
  except FileNotFoundError:
    raise UserError(f'{path}: no such file') from None
  except (OSError, UnicodeDecodeError) as e:
    raise UserError(f'{path}: cannot be read: {e}') from e
  prompts = [
    _prompt(line, f'{path}: line {number}', number - 1)
    for number, line in enumerate(lines, 1)
    if line.strip()
  ]
  if not prompts:
    raise UserError(f'{path}: holds no prompt')
  return prompts


def _prompt(line: str, where: str, index: int) -> Prompt:
  try:
    fields = parse_json(line)
  except ValueError as e:
    raise UserError(f'{where}: not JSON: {e}') from e
  if not isinstance(fields, Mapping):
    raise UserError(f'{where}: {show(fields)} is not a JSON object')
  if ('prompt' in fields) == ('turns' in fields):
    raise UserError(f'{where}: has to have either prompt or turns')
  turns: Any = fields.get('turns', [fields.get('prompt')])
  texts = isinstance(turns, list) and all(isinstance(t, str) for t in turns)
  if not texts or not turns:
    raise UserError(f'{where}: {show(turns)} is no text')
  name = fields.get('id', fields.get('question_id', index))
  if type(name) not in (str, int):
    raise UserError(f'{where}: id is {show(name)}, no text and no integer')
  category = fields.get('category')
  return Prompt(
    name, tuple(turns), category if isinstance(category, str) else None
  )
