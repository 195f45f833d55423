"""Stop tokens, from every file of a checkpoint that states some."""

import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from kdtree_jax.errors import UserError
from kdtree_jax.io import kimi_tokenizer
from kdtree_jax.io.chat_template import ChatTemplate, one_of
from kdtree_jax.io.checkpoint_config import eos_ids, text_config
from kdtree_jax.io.fields import Fields
from kdtree_jax.io.files import JsonObject, StrPath, show
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

# An answer that no template contains.
_ANSWER = 'qzvkxwanswerqzvkxw'


class StopIds(NamedTuple):
  """The tokens that end a text.

  Attributes:
    sources: ids by the file or key that states them.
    problem: why the tokenizer's files could not be used, or None.
  """

  sources: dict[str, tuple[int, ...]]
  problem: str | None = None

  @property
  def ids(self) -> tuple[int, ...]:
    """All ids, in the order of appearance."""
    return tuple(dict.fromkeys(i for ids in self.sources.values() for i in ids))


def stop_ids(directory: StrPath, raw_config: JsonObject) -> tuple[int, ...]:
  """All ids of `read_stop_ids`."""
  return read_stop_ids(directory, raw_config).ids


def read_stop_ids(directory: StrPath, raw_config: JsonObject) -> StopIds:
  """Stop tokens of config.json, generation_config.json and the tokenizer.

  Chat models state the end of a turn in one of them and the end of a text in
  another.

  Args:
    directory: the checkpoint's folder.
    raw_config: its parsed config.json.

  Raises:
    CheckpointError: an ill-typed id, or one outside the vocabulary; an
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
  data, problem = {}, None
  try:
    data = read_files(folder)
  except UserError as e:
    problem = str(e)
  files = TokenizerFiles(str(folder), data)
  return _with_tokenizer(sources, files, vocab, problem)


def bundle_stop_ids(bundle: Bundle, home: str) -> StopIds:
  """Stop tokens of a bundle.

  Args:
    bundle: its config already has what generation_config.json stated.
    home: its path, for messages.
  """
  if bundle.config is None:
    return StopIds({})
  sources = {'config': bundle.config.eos_token_id}
  files = TokenizerFiles(home, bundle.tokenizer)
  return _with_tokenizer(sources, files, bundle.config.vocab_size)


def _with_tokenizer(
  sources: dict[str, tuple[int, ...]],
  files: TokenizerFiles,
  vocab: int | None,
  problem: str | None = None,
) -> StopIds:
  """Adds the tokenizer's stop tokens, and drops sources without any.

  A broken tokenizer is no error here: decoding of token ids needs none.
  """
  config, names = {}, None
  try:
    config = files.config()
    names = _names(files, config)
  except UserError as e:
    problem = str(e)
  if names is not None:
    sources |= _by_tokenizer(files, config, names)
  # The model cannot generate ids outside its vocabulary.
  sources = {
    name: tuple(token for token in ids if vocab is None or token < vocab)
    for name, ids in sources.items()
  }
  return StopIds({name: ids for name, ids in sources.items() if ids}, problem)


def _names(
  files: TokenizerFiles, config: JsonObject
) -> Mapping[str, int] | None:
  """Ids of a tokenizer's special tokens by name; None without a tokenizer."""
  if JSON_FILE in files.data:
    backend = JsonBackend(files, config)
    eos = token_text(config.get('eos_token'))
    number = None if eos is None else backend.token_id(eos)
    # It may be in the vocabulary without being an added token.
    known = {} if eos is None or number is None else {eos: number}
    return known | backend.special_tokens
  if KIMI_FILE in files.data:
    return kimi_tokenizer.special_tokens(files, config)
  return None


def _by_tokenizer(
  files: TokenizerFiles, config: JsonObject, names: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
  """Stop tokens by the part of the tokenizer's files that states them."""
  found: dict[str, tuple[int, ...]] = {}
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
  """The special token that a chat template puts after an answer.

  None if it puts none or fails. The token must be the same whether or not
  another turn follows; else it is not the end of the answer.
  """
  if template is None:
    return None
  question = {'role': 'user', 'content': 'x'}
  chat = [question, {'role': 'assistant', 'content': _ANSWER}]
  pattern, ends = re.compile(one_of(names)), set()
  for messages in (chat, [*chat, question]):
    try:
      text = template.render(messages, add_generation_prompt=False)
    except UserError:
      return None
    _, answer, rest = text.rpartition(_ANSWER)
    found = pattern.match(rest.lstrip()) if answer else None
    ends.add(None if found is None else found[0])
  return ends.pop() if len(ends) == 1 else None
