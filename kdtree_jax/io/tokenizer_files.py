"""The files of a tokenizer, from a checkpoint's folder or a bundle."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import JsonObject, show
from kdtree_jax.io.tensors import json_object

JSON_FILE, KIMI_FILE = 'tokenizer.json', 'tiktoken.model'
CONFIG_FILE, TEMPLATE_FILE = 'tokenizer_config.json', 'chat_template.jinja'
TOKENIZER_FILES = (JSON_FILE, KIMI_FILE, CONFIG_FILE, TEMPLATE_FILE)


class TokenizerError(UserError):
  """A file of a tokenizer that is missing, broken or unsupported."""


class TokenizerFiles(NamedTuple):
  """A tokenizer's files.

  Attributes:
    home: the folder or bundle.
    data: bytes by file name.
  """

  home: str
  data: Mapping[str, bytes]

  def where(self, name: str) -> str:
    return f'{self.home}/{name}'

  def config(self) -> JsonObject:
    """tokenizer_config.json, parsed; empty if there is none."""
    if CONFIG_FILE not in self.data:
      return {}
    where = self.where(CONFIG_FILE)
    return json_object(self.data[CONFIG_FILE], where, TokenizerError)


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
  """The bytes of those of `TOKENIZER_FILES` that a folder has, by name.

  Raises:
    TokenizerError: a file that cannot be read.
  """
  data = {}
  for name in TOKENIZER_FILES:
    path = folder / name
    try:
      data[name] = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
      continue
    except OSError as e:
      raise TokenizerError(f'{path}: cannot be read: {e.strerror or e}') from e
  return data


def token_text(value: object) -> str | None:
  """The text of a token, given as a string or as an object with `content`."""
  if isinstance(value, Mapping):
    value = value.get('content')
  return value if isinstance(value, str) else None


def added_tokens(config: JsonObject, where: str) -> dict[int, JsonObject]:
  """The entries of `added_tokens_decoder` by id, in the order of ids.

  Args:
    config: the parsed tokenizer_config.json.
    where: its name, for messages.

  Raises:
    TokenizerError: an entry is ill-formed.
  """
  raw = config.get('added_tokens_decoder') or {}
  if not isinstance(raw, Mapping):
    raise TokenizerError(f'{where}: added_tokens_decoder is no object')
  found: dict[int, JsonObject] = {}
  for key, value in raw.items():
    text = token_text(value)
    if text == '':
      raise TokenizerError(
        f'{where}: added_tokens_decoder: the name of token {key} is empty'
      )
    if not (key.isascii() and key.isdecimal()) or text is None:
      raise TokenizerError(
        f'{where}: added_tokens_decoder: {show(key)} is {show(value, 60)}, no '
        'id with a token'
      )
    entry = value if isinstance(value, dict) else {'content': text}
    found[int(key)] = entry
  return dict(sorted(found.items()))
