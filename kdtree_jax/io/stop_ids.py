"""Tokens that end a text, from every place of a checkpoint that states one."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kdtree_jax.errors import UserError
from kdtree_jax.io import kimi_tokenizer
from kdtree_jax.io.chat_contents import one_of
from kdtree_jax.io.chat_template import ChatTemplate
from kdtree_jax.io.checkpoint_config import eos_ids, text_config
from kdtree_jax.io.fields import Fields
from kdtree_jax.io.files import show
from kdtree_jax.io.json_tokenizer import JsonBackend
from kdtree_jax.io.kdtr import Bundle
from kdtree_jax.io.tensors import CheckpointError, read_json
from kdtree_jax.io.tokenizer_files import (
  CONFIG_FILE,
  JSON_FILE,
  KIMI_FILE,
  TokenizerFiles,
  read_files,
  token_text,
)

# An answer, which no template has among its own words.
_ANSWER = 'qzvkxwanswerqzvkxw'


class StopIds(NamedTuple):
  """Every token that ends a text.

  Attributes:
    sources: ids by the place that states them.
    problem: why the tokenizer was not asked, or None.
  """

  sources: dict[str, tuple[int, ...]]
  problem: str | None = None

  @property
  def ids(self) -> tuple[int, ...]:
    """The union, in the order of appearance."""
    return tuple(dict.fromkeys(i for ids in self.sources.values() for i in ids))


def stop_ids(
  directory: os.PathLike | str, raw_config: Mapping[str, Any]
) -> tuple[int, ...]:
  """The union of `read_stop_ids`."""
  return read_stop_ids(directory, raw_config).ids


def read_stop_ids(
  directory: os.PathLike | str, raw_config: Mapping[str, Any]
) -> StopIds:
  """What config.json, generation_config.json and the tokenizer's files state.

  Chat models list the end of a turn in one and the end of a text in another.

  Args:
    directory: the checkpoint's folder.
    raw_config: its parsed config.json.

  Raises:
    CheckpointError: an id that is no id, or outside the vocabulary; an
      `eos_token` that the tokenizer does not have.
  """
  folder = pathlib.Path(directory)
  where = str(folder / 'config.json')
  named = {'config.json': Fields(raw_config, where)}
  text, text_where = text_config(raw_config, where)
  if text is not raw_config:
    named['text_config of config.json'] = Fields(text, text_where)
  vocab = [*named.values()][-1].integer('vocab_size', None)
  path = folder / 'generation_config.json'
  if path.exists():
    named[path.name] = Fields(read_json(path), str(path))
  sources: dict[str, tuple[int, ...]] = {}
  for name, source in named.items():
    sources[name] = eos_ids(source)
    for token in sources[name]:
      if vocab is not None and token >= vocab:
        raise source.error(
          'eos_token_id', f'{token} is outside the vocabulary of {vocab}'
        )
  try:
    files = TokenizerFiles(str(folder), read_files(folder))
  except UserError as e:
    return _stated(sources, None, vocab, str(e))
  return _stated(sources, files, vocab)


def bundle_stop_ids(bundle: Bundle, home: str) -> StopIds:
  """The same of a bundle with a target.

  Args:
    bundle: whose config has what the folder's files stated when it was made.
    home: its path, for messages.
  """
  config = bundle.config
  files = TokenizerFiles(home, bundle.tokenizer)
  return _stated({'config': config.eos_token_id}, files, config.vocab_size)


def _stated(
  sources: dict[str, tuple[int, ...]],
  files: TokenizerFiles | None,
  vocab: int | None,
  problem: str | None = None,
) -> StopIds:
  """Adds what the tokenizer states, and drops sources that state nothing.

  A tokenizer that cannot be read is an error where text is needed only.
  """
  if files is not None:
    try:
      config = files.config()
      names = _names(files, config)
    except UserError as e:
      names, problem = None, str(e)
    if names is not None:
      sources |= _by_tokenizer(files, config, names)
  # The model cannot generate what is outside its vocabulary.
  limit = float('inf') if vocab is None else vocab
  sources = {
    name: tuple(token for token in ids if token < limit)
    for name, ids in sources.items()
  }
  return StopIds({name: ids for name, ids in sources.items() if ids}, problem)


def _names(
  files: TokenizerFiles, config: Mapping[str, Any]
) -> Mapping[str, int] | None:
  """Ids of a tokenizer's special tokens by name; None without a tokenizer."""
  if JSON_FILE in files.data:
    backend = JsonBackend(files, config)
    eos = token_text(config.get('eos_token'))
    number = None if eos is None else backend.token_id(eos)
    # A name of the vocabulary that is no added token counts as well.
    known = {} if eos is None or number is None else {eos: number}
    return known | dict(backend.controls)
  if KIMI_FILE in files.data:
    return kimi_tokenizer.special_tokens(files, config)
  return None


def _by_tokenizer(
  files: TokenizerFiles, config: Mapping[str, Any], names: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
  found = {}
  eos = token_text(config.get('eos_token'))
  if eos is not None:
    if eos not in names:
      raise CheckpointError(
        f'{files.where(CONFIG_FILE)}: eos_token is {show(eos)}, which the '
        'tokenizer does not have'
      )
    found[f'eos_token of {CONFIG_FILE}'] = (names[eos],)
  end = turn_end(ChatTemplate.read(files.data, config, files.home), names)
  if end is not None:
    found['end of a turn in the chat template'] = (names[end],)
  return found


def turn_end(
  template: ChatTemplate | None, names: Mapping[str, int]
) -> str | None:
  """The special token that follows an answer, whether or not a turn does.

  None without one, or if the template cannot be asked. A token that comes
  only if a turn follows, or only if none does, begins something else.
  """
  if template is None:
    return None
  question = {'role': 'user', 'content': 'x'}
  talk = [question, {'role': 'assistant', 'content': _ANSWER}]
  pattern, ends = re.compile(one_of(names)), set()
  for messages in (talk, [*talk, question]):
    try:
      text = template.render(messages, add_generation_prompt=False)
    except UserError:
      return None
    _, answer, rest = text.rpartition(_ANSWER)
    found = pattern.match(rest.lstrip()) if answer else None
    ends.add(None if found is None else found[0])
  return ends.pop() if len(ends) == 1 else None
