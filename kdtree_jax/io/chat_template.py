"""Chat templates of checkpoints, rendered in jinja2's sandbox."""

import datetime
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import one_line

FILE = 'chat_template.jinja'

# What a template may expect to know besides the messages.
_TOKENS = ('bos_token', 'eos_token', 'pad_token', 'unk_token')


class TemplateError(UserError):
  """A chat template that cannot be parsed, or that refuses a conversation."""


class ChatTemplate:
  """A template, and the tokens that it may name."""

  def __init__(self, text: str, tokens: Mapping[str, str], where: str):
    self._where, self._tokens = where, dict(tokens)
    # The environment that transformers gives templates; immutable, so that
    # one conversation cannot leave anything for the next.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols],
    )
    environment.filters['tojson'] = _to_json
    environment.globals['raise_exception'] = _refuse
    environment.globals['strftime_now'] = _now
    try:
      self._template = environment.from_string(text)
    # Python's own compiler has limits of its own and errors for them.
    except Exception as e:
      raise TemplateError(f'{where}: no template: {one_line(e)}') from e

  @classmethod
  def read(
    cls, files: Mapping[str, bytes], config: Mapping[str, Any], home: str
  ) -> 'ChatTemplate | None':
    """The template of a checkpoint: a file of its own, or in its config.

    Args:
      files: of the tokenizer, by name.
      config: its tokenizer_config.json, parsed.
      home: the folder or bundle they come from, for messages.

    Raises:
      TemplateError: it cannot be read or parsed.
    """
    tokens = {name: _text(config.get(name)) for name in _TOKENS}
    tokens = {name: text for name, text in tokens.items() if text is not None}
    if FILE in files:
      where = f'{home}/{FILE}'
      try:
        # As text files are read: with one kind of line break.
        with io.TextIOWrapper(io.BytesIO(files[FILE]), 'utf-8') as file:
          return cls(file.read(), tokens, where)
      except UnicodeDecodeError as e:
        raise TemplateError(f'{where}: cannot be read: {one_line(e)}') from e
    text = config.get('chat_template')
    where = f'{home}/tokenizer_config.json'
    if isinstance(text, list):
      named = {
        entry.get('name'): entry.get('template')
        for entry in text
        if isinstance(entry, Mapping)
      }
      text = named.get('default')
    if text is None:
      return None
    if not isinstance(text, str):
      raise TemplateError(f'{where}: chat_template is no text')
    return cls(text, tokens, where)

  def render(self, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation up to where the model is to answer.

    Raises:
      TemplateError: the template refuses the conversation, or fails.
    """
    try:
      return self._template.render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=True,
        tools=None,
        **self._tokens,
      )
    # Whatever a template runs into is its author's error or its refusal.
    except Exception as e:
      raise TemplateError(f'{self._where}: {one_line(e)}') from e


def _text(value: Any) -> str | None:
  if isinstance(value, Mapping):
    value = value.get('content')
  return value if isinstance(value, str) else None


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | str | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """The filter of transformers, without jinja's escapes for HTML."""
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _refuse(message: str) -> None:
  raise jinja2.TemplateError(message)


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)
