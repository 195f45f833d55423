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
from kdtree_jax.modes.options.generating import AuditFlags, GenerateFlags


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


def talks(
  flags: GenerateFlags | AuditFlags, tokenizer: Tokenizer | None
) -> list[Talk]:
  """The prompts that the flags name, each with nothing said yet.

  Raises:
    UserError: no tokenizer, or turns without `--chat`.
  """
  if flags.prompt_ids is not None:
    return [Talk(Prompt(0, ()), list(flags.prompt_ids))]
  if tokenizer is None:
    flag = 'prompts' if flags.prompt is None else 'prompt'
    raise UserError(
      f'--{flag} needs a tokenizer, and {flags.target or flags.config} has '
      'none; use --prompt_ids'
    )
  special = flags.parse_special_in_messages
  if flags.prompts is not None:
    return talks_in(flags.prompts, flags.chat, special)
  return [Talk(Prompt(0, (flags.prompt or '',)), None, special)]


def talks_in(
  path: str, chat: bool = False, parse_special: bool = False
) -> list[Talk]:
  """The prompts of a file, each with nothing said yet.

  Raises:
    UserError: it cannot be read, or has turns that need a chat.
  """
  found = read_prompts(path)
  for prompt in found:
    if len(prompt.turns) > 1 and not chat:
      raise UserError(
        f'--prompts={path}: prompt {prompt.id!r} has {len(prompt.turns)} '
        'turns, which need --chat'
      )
  return [Talk(prompt, None, parse_special) for prompt in found]


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
  stop_strings: Sequence[str] = (),
) -> str | None:
  """The text of a result, which becomes part of the talk; None: no tokenizer.

  The stop token or stop string that ended it is no part of the text.
  """
  if tokenizer is None:
    return None
  text = tokenizer.decode(result.output_ids)
  ends = [text.find(stop) for stop in stop_strings]
  ends = [end for end in ends if end >= 0]
  if ends:
    text = text[: min(ends)]
  elif result.stop_reason == 'stop':
    text = tokenizer.decode(result.output_ids[:-1])
  talk.messages.append({'role': 'assistant', 'content': text})
  return text


def tokenizer_of(flags: GenerateFlags | AuditFlags) -> Tokenizer | None:
  """The tokenizer beside the target, checked against the flags.

  With `--prompt_ids` it only adds text to the results, so that one which
  cannot be read is no obstacle.

  Raises:
    UserError: a broken tokenizer, or `--chat` without a template.
  """
  if flags.target is None:  # Random weights have none.
    if flags.chat:
      raise UserError('--chat is not used with --config')
    return None
  try:
    tokenizer = load_tokenizer(flags.target)
  except UserError:
    if flags.prompt_ids is None:
      raise
    return None
  if flags.chat and (tokenizer is None or tokenizer.template is None):
    raise UserError(f'--chat: {flags.target} has no chat template')
  return tokenizer
