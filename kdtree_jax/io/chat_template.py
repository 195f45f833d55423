"""Chat templates of checkpoints, rendered in jinja2's sandbox.

A message may spell out the name of a special token, which must stay text. The
template sees the message unchanged, so that its conditions hold; in its output
such names are placeholders (`SpecialTokenEscapes`), which the tokenizer tells
from the template's own special tokens.
"""

import datetime
import functools
import io
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import JsonObject, one_line
from kdtree_jax.io.tokenizer_files import CONFIG_FILE, TEMPLATE_FILE, token_text

# The special tokens that a template may use by these names.
_TOKENS = (
  'bos_token eos_token unk_token sep_token pad_token cls_token mask_token'
).split()
# Methods of `str` whose results are texts of the message again.
_DERIVED = (
  '__getitem__ __mod__ __mul__ __rmul__ capitalize casefold center '
  'expandtabs join ljust lower lstrip partition removeprefix removesuffix '
  'replace rjust rpartition rsplit rstrip split splitlines strip swapcase '
  'title translate upper zfill'
).split()


class TemplateError(UserError):
  """A chat template that cannot be parsed, or that refuses a conversation."""


class ChatTemplate:
  """A chat template with its special tokens; parsed at the first use."""

  def __init__(self, source: object, tokens: JsonObject, where: str):
    """Stores what is given, unchecked.

    Args:
      source: the template's text, or the bytes of its file.
      tokens: values of the variables that the template may use.
      where: the template's file, for messages.
    """
    self._source, self._tokens, self._where = source, dict(tokens), where
    # One compiled template for each type of message texts.
    self._compiled = functools.cache(self._compile)

  @classmethod
  def read(
    cls, files: Mapping[str, bytes], config: JsonObject, home: str
  ) -> 'ChatTemplate | None':
    """The template of a checkpoint: a file of its own, or in its config.

    Args:
      files: the tokenizer's files by name.
      config: the parsed tokenizer_config.json.
      home: the folder or bundle of the files, for messages.
    """
    tokens = _special_tokens(config)
    if TEMPLATE_FILE in files:
      return cls(files[TEMPLATE_FILE], tokens, f'{home}/{TEMPLATE_FILE}')
    source = config.get('chat_template')
    if isinstance(source, list):
      named = {
        entry.get('name'): entry.get('template')
        for entry in source
        if isinstance(entry, Mapping)
      }
      source = named.get('default')
    return (
      None if source is None else cls(source, tokens, f'{home}/{CONFIG_FILE}')
    )

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    escapes: 'SpecialTokenEscapes | None' = None,
  ) -> str:
    """The text of a conversation, up to where the model is to answer.

    Args:
      messages: each with `role` and `content`.
      add_generation_prompt: False ends the text after the last message.
      escapes: replaces names of special tokens inside messages; None: kept.

    Raises:
      TemplateError: the template cannot be parsed, refuses the conversation,
        or fails.
    """
    text_type = str if escapes is None else escapes.text_type
    template = self._compiled(text_type)
    try:
      return template.render(
        messages=[_convert_texts(dict(m), text_type) for m in messages],
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **self._tokens,
      )
    # Any exception is a template's error or its refusal.
    except Exception as e:
      raise TemplateError(f'{self._where}: {one_line(e)}') from e

  def _compile(self, text_type: Callable[[object], str]) -> jinja2.Template:
    # The environment that transformers gives templates; immutable, so that
    # no conversation can change the next one.
    environment = _Environment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols, _Generation],
    )

    def to_json(*args: Any, **kwargs: Any) -> str:
      return text_type(_to_json(*args, **kwargs))

    environment.filters |= {'tojson': to_json, 'replace': _replace}
    functions = {'raise_exception': _refuse, 'strftime_now': _now}
    text = self._text()
    try:
      return environment.from_string(text, globals=functions)
    # Python's own compiler raises other errors, such as MemoryError.
    except Exception as e:
      raise TemplateError(f'{self._where}: no template: {one_line(e)}') from e

  def _text(self) -> str:
    if isinstance(self._source, bytes):
      try:
        # Line breaks become line feeds, as in any text file.
        with io.TextIOWrapper(io.BytesIO(self._source), 'utf-8') as file:
          return file.read()
      except UnicodeDecodeError as e:
        raise TemplateError(
          f'{self._where}: cannot be read: {one_line(e)}'
        ) from e
    if not isinstance(self._source, str):
      raise TemplateError(f'{self._where}: chat_template is no text')
    return self._source


def _special_tokens(config: JsonObject) -> JsonObject:
  """The special tokens that tokenizer_config.json names, as template variables.

  A token that it does not name stays undefined.
  """
  extra = config.get('extra_special_tokens')
  named = {name: config.get(name) for name in _TOKENS}
  named |= extra if isinstance(extra, Mapping) else {}
  tokens: JsonObject = {k: token_text(value) for k, value in named.items()}
  more = config.get('additional_special_tokens')
  if isinstance(more, list):
    tokens['additional_special_tokens'] = [token_text(value) for value in more]
  return {name: value for name, value in tokens.items() if value is not None}


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """A sandbox in which joining or replacing texts escapes those of messages."""

  def call(
    self,
    context: jinja2.runtime.Context,
    function: Any,
    /,
    *args: Any,
    **kwargs: Any,
  ):
    # These methods of `str` read the characters directly, without `__str__`.
    if isinstance(getattr(function, '__self__', None), str):
      if function.__name__ == 'join' and args:
        args = ([f'{x}' if isinstance(x, str) else x for x in args[0]],)
      elif function.__name__ == 'replace' and len(args) > 1:
        args = (args[0], str(args[1]), *args[2:])
    return super().call(context, function, *args, **kwargs)


class _Generation(jinja2.ext.Extension):
  """`{% generation %}`, which marks text to train on: here a mere scope."""

  tags = {'generation'}

  def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


def _replace(
  text: object, old: object, new: object, count: int | None = None
) -> str:
  """jinja2's filter `replace`, calling the text's own method."""
  text = text if isinstance(text, str) else str(text)
  return text.replace(
    str.__str__(old) if isinstance(old, str) else str(old),
    str(new),
    -1 if count is None else count,
  )


def _to_json(
  value: object,
  ensure_ascii: bool = False,
  indent: int | str | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """The filter `tojson` of transformers, which does not escape HTML."""
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


def one_of(names: Iterable[str]) -> str:
  """A pattern that matches the longest of some names; none matches nothing."""
  longest_first = sorted(names, key=len, reverse=True)
  return '|'.join(map(re.escape, longest_first)) or r'(?!)'


class SpecialTokenEscapes:
  """Placeholders that replace the names of special tokens.

  Attributes:
    text_type: the type of a message's text. It behaves as `str`, but is escaped
      when it is joined with other text or printed.
  """

  def __init__(self, names: Iterable[str]):
    self._names = list(names)
    self._index = {name: i for i, name in enumerate(self._names)}
    # Characters of the private use area, which occur in no name, and enough
    # random ones that nobody can guess a placeholder.
    mark = ''.join(chr(0xE000 + byte) for byte in secrets.token_bytes(8))
    self._mark, number = f'\uf000{mark}', '([\ue100-\ue109]+)\uf001'
    self._name = re.compile(one_of(self._names))
    self._either = re.compile(f'{self._mark}{number}|{one_of(self._names)}')
    self.text_type = _escaped_text_type(self.escape)

  def placeholder(self, name: str) -> str:
    """The placeholder of a name."""
    digits = (chr(0xE100 + int(digit)) for digit in str(self._index[name]))
    return f'{self._mark}{"".join(digits)}\uf001'

  def escape(self, text: str) -> str:
    """The text with every name replaced by its placeholder."""
    return self._name.sub(lambda found: self.placeholder(found[0]), text)

  def unescape(self, text: str) -> str:
    """The text with every placeholder replaced by its name."""
    return self._either.sub(lambda f: self._name_of(f) if f[1] else f[0], text)

  def swap(self, text: str) -> str:
    """The text with names and placeholders exchanged."""
    return self._either.sub(
      lambda f: self._name_of(f) if f[1] else self.placeholder(f[0]), text
    )

  def _name_of(self, found: re.Match[str]) -> str:
    digits = (str(ord(letter) - 0xE100) for letter in found[1])
    return self._names[int(''.join(digits))]

  def found_in(self, value: object) -> bool:
    """Whether a text, or one inside a list or mapping, contains a name."""
    if isinstance(value, str):
      return self._name.search(value) is not None
    if isinstance(value, Mapping):
      value = value.values()
    elif not isinstance(value, (list, tuple)):
      return False
    return any(map(self.found_in, value))


def _convert_texts(value: Any, kind: Callable[[object], str]) -> Any:
  """A value with all its texts as `kind`, also inside lists and mappings."""
  if isinstance(value, str):
    return kind(value)
  if isinstance(value, Mapping):
    return {key: _convert_texts(item, kind) for key, item in value.items()}
  if isinstance(value, list):
    return [_convert_texts(item, kind) for item in value]
  if isinstance(value, tuple):
    return tuple(_convert_texts(item, kind) for item in value)
  return value


def _escaped_text_type(escape: Callable[[str], str]) -> type[str]:
  class EscapedText(str):
    """A text from a message."""

    __slots__ = ()

    def __str__(self) -> str:
      return escape(str.__str__(self))

    def __format__(self, spec: str) -> str:
      return format(str(self), spec)

    def __add__(self, other: object) -> str:
      return str(self) + str(other)

    def __radd__(self, other: object) -> str:
      return str(other) + str(self)

    def __iter__(self) -> Iterator[str]:
      return map(EscapedText, str.__iter__(self))

  def derived(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: str, *args: Any, **kwargs: Any) -> Any:
      return _convert_texts(method(self, *args, **kwargs), EscapedText)

    return call

  for name in _DERIVED:
    setattr(EscapedText, name, derived(name))
  return EscapedText
