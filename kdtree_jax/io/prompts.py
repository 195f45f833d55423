"""Files of prompts: one JSON object a line."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import StrPath, show
from kdtree_jax.io.results import read_jsonl, source_name


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A line `{"id", "turns": [...]}` or `{"id", "prompt"}`.

  Attributes:
    id: as given, or the number of the line from 0.
    turns: texts of the user, in order; a single one for `prompt`.
    where: file and line for messages; None: it is from no file.
  """

  id: str | int
  turns: tuple[str, ...]
  where: str | None = None


def read_prompts(path: StrPath) -> list[Prompt]:
  """Reads prompts from a file, a pipe or, for `-`, the standard input.

  Raises:
    UserError: the file is unreadable or empty, a line is no prompt, or two
      have the same id; names the lines.
  """
  prompts: dict[str | int, Prompt] = {}
  for number, fields in read_jsonl(path):
    where = f'{source_name(path)}: line {number}'
    prompt = _prompt(fields, where, number - 1)
    other = prompts.setdefault(prompt.id, prompt)
    if other is not prompt:
      raise UserError(
        f'{where}: the id {show(prompt.id)} is also that of {other.where}'
      )
  if not prompts:
    raise UserError(f'{source_name(path)}: holds no prompt')
  return list(prompts.values())


def _prompt(fields: object, where: str, index: int) -> Prompt:
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
  return Prompt(name, tuple(turns), where)
