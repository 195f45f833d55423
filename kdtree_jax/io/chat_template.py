"""Chat templates of checkpoints, rendered in jinja2's sandbox."""

import datetime
import functools
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kdtree_jax.errors import UserError
from kdtree_jax.io.chat_contents import HiddenNames, wrapped
from kdtree_jax.io.files import one_line

FILE = 'chat_template.jinja'

# What a template may expect to know besides the messages.
_TOKENS = (
  'bos_token',
  'eos_token',
  'unk_token',
  'sep_token',
  'pad_token',
  'cls_token',
  'mask_token',
)


class TemplateError(UserError):
  """A chat template that cannot be parsed, or that refuses a conversation."""


class ChatTemplate:
  """A template, and the tokens that it may name; parsed when it is needed."""

  def __init__(self, source: Any, tokens: Mapping[str, Any], where: str):
    """A template that nobody has looked at.

    Args:
      source: its text, or the bytes of a file.
      tokens: what it may name: texts, and lists of them.
      where: it comes from, for messages.
    """
    self._source, self._tokens, self._where = source, dict(tokens), where
    # A template for each type of contents.
    self._compiled = functools.cache(self._compile)

  @classmethod
  def read(
    cls, files: Mapping[str, bytes], config: Mapping[str, Any], home: str
  ) -> 'ChatTemplate | None':
    """The template of a checkpoint: a file of its own, or in its config.

    Args:
      files: of the tokenizer, by name.
      config: its tokenizer_config.json, parsed.
      home: the folder or bundle they come from, for messages.
    """
    tokens = _special_tokens(config)
    if FILE in files:
      return cls(files[FILE], tokens, f'{home}/{FILE}')
    source = config.get('chat_template')
    if isinstance(source, list):
      named = {
        entry.get('name'): entry.get('template')
        for entry in source
        if isinstance(entry, Mapping)
      }
      source = named.get('default')
    if source is None:
      return None
    return cls(source, tokens, f'{home}/tokenizer_config.json')

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    hidden: HiddenNames | None = None,
  ) -> str:
    """The conversation, up to where the model is to answer.

    Args:
      messages: each with `role` and `content`.
      add_generation_prompt: False: up to the end of the last message.
      hidden: names that become placeholders where contents spell them out.

    Raises:
      TemplateError: it cannot be parsed, refuses the conversation, or fails.
    """
    content = str if hidden is None else hidden.content
    template = self._compiled(content)
    try:
      return template.render(
        messages=[wrapped(dict(message), content) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **self._tokens,
      )
    # Whatever a template runs into is its author's error or its refusal.
    except Exception as e:
      raise TemplateError(f'{self._where}: {one_line(e)}') from e

  def _compile(self, content: type[str]) -> jinja2.Template:
    # The environment that transformers gives templates; immutable, so that
    # one conversation cannot leave anything for the next.
    environment = _Environment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters['tojson'] = lambda *a, **k: content(_to_json(*a, **k))
    environment.filters['replace'] = _replace
    environment.globals['raise_exception'] = _refuse
    environment.globals['strftime_now'] = _now
    text = self._text()
    try:
      return environment.from_string(text)
    # Python's own compiler has limits of its own and errors for them.
    except Exception as e:
      raise TemplateError(f'{self._where}: no template: {one_line(e)}') from e

  def _text(self) -> str:
    if isinstance(self._source, bytes):
      try:
        # As text files are read: with one kind of line break.
        with io.TextIOWrapper(io.BytesIO(self._source), 'utf-8') as file:
          return file.read()
      except UnicodeDecodeError as e:
        raise TemplateError(
          f'{self._where}: cannot be read: {one_line(e)}'
        ) from e
    if not isinstance(self._source, str):
      raise TemplateError(f'{self._where}: chat_template is no text')
    return self._source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
  """The special tokens that tokenizer_config.json names, as templates see them.

  What is not named is undefined.
  """
  extra = config.get('extra_special_tokens')
  named = {name: config.get(name) for name in _TOKENS}
  named |= extra if isinstance(extra, Mapping) else {}
  tokens: dict[str, Any] = {name: _text(value) for name, value in named.items()}
  more = config.get('additional_special_tokens')
  if isinstance(more, list):
    tokens['additional_special_tokens'] = [_text(value) for value in more]
  return {name: value for name, value in tokens.items() if value is not None}


def _text(value: Any) -> str | None:
  if isinstance(value, Mapping):
    value = value.get('content')
  return value if isinstance(value, str) else None


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """A sandbox in which texts join contents as what they write."""

  def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any):
    # Methods in C take the letters of a content, whatever it would write.
    if isinstance(getattr(function, '__self__', None), str):
      if function.__name__ == 'join' and args:
        args = ([str(x) if isinstance(x, str) else x for x in args[0]],)
      elif function.__name__ == 'replace' and len(args) > 1:
        args = (args[0], str(args[1]), *args[2:])
    return super().call(context, function, *args, **kwargs)


class _Generation(jinja2.ext.Extension):
  """`{% generation %}`: what the model is trained on; a scope, no more."""

  tags = frozenset({'generation'})

  def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
  """The filter of jinja2, by the text's own method."""
  text = text if isinstance(text, str) else str(text)
  return text.replace(
    str.__str__(old) if isinstance(old, str) else str(old),
    str(new),
    -1 if count is None else count,
  )


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
