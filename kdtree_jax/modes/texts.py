"""Prompts from flags and files, as token ids; and text for results."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from kdtree_jax import api
from kdtree_jax.decode import GenerateResult
from kdtree_jax.decode.state import check_prompt
from kdtree_jax.errors import UserError
from kdtree_jax.io.files import show
from kdtree_jax.io.prompts import Prompt, read_prompts
from kdtree_jax.io.tokenizer import Tokenizer, load_tokenizer
from kdtree_jax.modes.run_config import RunConfig, integers

SOURCES = ('prompt_ids', 'prompt', 'prompts')


@dataclasses.dataclass
class Talk:
  """One prompt by one method: what was said so far, turn by turn.

  Attributes:
    prompt: with the user's turns; without any if ids were given.
    ids: token ids that were given in the place of text, or None.
    parse_special: special tokens in messages are tokens, not text.
    messages: of the chat, the model's answers included.
  """

  prompt: Prompt
  ids: list[int] | None
  parse_special: bool = False
  messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

  def copy(self) -> 'Talk':
    """The same talk, which goes on by itself."""
    return dataclasses.replace(self, messages=list(self.messages))


def talks(config: RunConfig, tokenizer: Tokenizer | None) -> list[Talk]:
  """The prompts that the flags name, each with nothing said yet.

  Raises:
    UserError: none or two sources, no tokenizer, or turns without `--chat`.
  """
  given = [name for name in SOURCES if getattr(config, name) is not None]
  if len(given) != 1:
    names = ' or '.join(f'--{name}' for name in SOURCES)
    raise UserError(f'--mode={config.mode} needs one of {names}')
  (source,) = given
  parse_special = config.parse_special_in_messages
  if parse_special is not None and not config.chat:
    raise UserError('--parse_special_in_messages is not used without --chat')
  if source == 'prompt_ids':
    if config.chat:
      raise UserError('--chat is not used with --prompt_ids')
    ids = integers(config.prompt_ids, source)
    return [Talk(Prompt(0, ()), ids)]
  if tokenizer is None:
    raise UserError(
      f'--{source} needs a tokenizer, and {config.target or config.config} '
      'has none; use '
      '--prompt_ids'
    )
  if source == 'prompt':
    prompts = [Prompt(0, (config.prompt,))]
  else:
    prompts = read_prompts(config.prompts)
  for prompt in prompts:
    if len(prompt.turns) > 1 and not config.chat:
      raise UserError(
        f'--prompts={config.prompts}: prompt {prompt.id!r} has '
        f'{len(prompt.turns)} turns, which need --chat'
      )
  return [Talk(prompt, None, bool(parse_special)) for prompt in prompts]


def first_ids(
  talks: Sequence[Talk], tokenizer: Tokenizer | None, chat: bool
) -> list[list[int]]:
  """Token ids of every first turn, which becomes part of its talk.

  Raises:
    UserError: a text that cannot be encoded; names its line.
  """
  found = []
  for talk in talks:
    with naming(talk.prompt.where, talk.prompt.id):
      found.append(next_ids(talk, 0, tokenizer, chat))
  return found


def check_first(
  talks: Sequence[Talk],
  ids: Sequence[Sequence[int]],
  target: api.Target,
  capacity: int | None,
) -> None:
  """Refuses first turns that do not fit the target or the capacity.

  Raises:
    UserError: names the line.
  """
  for talk, turn in zip(talks, ids, strict=True):
    with naming(talk.prompt.where, talk.prompt.id):
      check_fit(turn, target, capacity)


def check_fit(
  ids: Sequence[int], target: api.Target, capacity: int | None
) -> None:
  """Refuses a prompt that does not fit the target or the capacity."""
  config = target.config
  limit = config.max_position_embeddings if capacity is None else capacity
  check_prompt(ids, config.vocab_size, limit)


@contextlib.contextmanager
def naming(where: str | None, name: str | int) -> Iterator[None]:
  """Errors that name a prompt by its line and id, if it is from a file."""
  try:
    yield
  except UserError as e:
    if where is None:
      raise
    raise UserError(f'{where}: id {show(name)}: {e}') from e


def next_ids(
  talk: Talk, turn: int, tokenizer: Tokenizer | None, chat: bool
) -> list[int]:
  """Token ids of a turn, with all that was said before it."""
  if talk.ids is not None or tokenizer is None:
    return talk.ids or []
  text = talk.prompt.turns[turn]
  if not chat:
    return tokenizer.encode(text)
  talk.messages.append({'role': 'user', 'content': text})
  return tokenizer.encode_chat(talk.messages, talk.parse_special)


def answer(
  talk: Talk,
  result: GenerateResult,
  tokenizer: Tokenizer | None,
  stop_strings: Sequence[str] | None = None,
) -> str | None:
  """The text of a result, which becomes part of the talk; None: no tokenizer.

  The stop token or stop string that ended it is no part of the text.
  """
  if tokenizer is None:
    return None
  text = tokenizer.decode(result.output_ids)
  ends = [text.find(stop) for stop in stop_strings or ()]
  ends = [end for end in ends if end >= 0]
  if ends:
    text = text[: min(ends)]
  elif result.stop_reason == 'stop':
    text = tokenizer.decode(result.output_ids[:-1])
  talk.messages.append({'role': 'assistant', 'content': text})
  return text


def tokenizer_of(config: RunConfig) -> Tokenizer | None:
  """The tokenizer beside the target, checked against the flags.

  With `--prompt_ids` it only adds text to the results, so that one which
  cannot be read is no obstacle.

  Raises:
    UserError: a broken tokenizer, or `--chat` without a template.
  """
  if config.target is None:  # Random weights have none.
    if config.chat:
      raise UserError('--chat is not used with --config')
    return None
  try:
    tokenizer = load_tokenizer(config.target)
  except UserError:
    if config.prompt_ids is None:
      raise
    return None
  if config.chat and (tokenizer is None or tokenizer.template is None):
    raise UserError(f'--chat: {config.target} has no chat template')
  return tokenizer
