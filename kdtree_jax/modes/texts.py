"""Prompts from flags and files as token ids, and the text of results."""

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
class Dialogue:
  """A prompt with its messages so far, for one method.

  Attributes:
    prompt: the user's turns; none if `ids` are given.
    ids: token ids in place of text, or None.
    parse_special: whether special tokens in messages are tokens, not text.
    messages: messages of the chat, with the model's answers.
  """

  prompt: Prompt
  ids: list[int] | None
  parse_special: bool = False
  messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

  def copy(self) -> 'Dialogue':
    """A copy with its own list of messages."""
    return dataclasses.replace(self, messages=list(self.messages))


def dialogues(
  flags: GenerateFlags | AuditFlags, tokenizer: Tokenizer | None
) -> list[Dialogue]:
  """The prompts that the flags name, without messages yet.

  Raises:
    UserError: no tokenizer, or turns without `--chat`.
  """
  if flags.prompt_ids is not None:
    return [Dialogue(Prompt(0, ()), list(flags.prompt_ids))]
  if tokenizer is None:
    flag = 'prompts' if flags.prompt is None else 'prompt'
    raise UserError(
      f'--{flag} needs a tokenizer, and {flags.target or flags.config} has '
      'none; use --prompt_ids'
    )
  special = flags.parse_special_in_messages
  if flags.prompts is not None:
    return dialogues_in(flags.prompts, flags.chat, special)
  return [Dialogue(Prompt(0, (flags.prompt or '',)), None, special)]


def dialogues_in(
  path: str, chat: bool = False, parse_special: bool = False
) -> list[Dialogue]:
  """The prompts of a file, without messages yet.

  Raises:
    UserError: it cannot be read, or has several turns without a chat.
  """
  found = read_prompts(path)
  for prompt in found:
    if len(prompt.turns) > 1 and not chat:
      raise UserError(
        f'--prompts={path}: prompt {prompt.id!r} has {len(prompt.turns)} '
        'turns, which need --chat'
      )
  return [Dialogue(prompt, None, parse_special) for prompt in found]


def first_ids(
  dialogues: Sequence[Dialogue], tokenizer: Tokenizer | None, chat: bool
) -> list[list[int]]:
  """Token ids of the first turns, whose messages the dialogues then have.

  Raises:
    UserError: a text cannot be encoded; names its line.
  """
  found = []
  for dialogue in dialogues:
    with naming(dialogue.prompt.where, dialogue.prompt.id):
      found.append(next_ids(dialogue, 0, tokenizer, chat))
  return found


def check_first(
  dialogues: Sequence[Dialogue],
  ids: Sequence[Sequence[int]],
  target: api.Target,
  capacity: int | None,
) -> None:
  """Checks that first turns fit the target and the capacity.

  Raises:
    UserError: one does not; names its line.
  """
  for dialogue, turn in zip(dialogues, ids, strict=True):
    with naming(dialogue.prompt.where, dialogue.prompt.id):
      check_fit(turn, target, capacity)


def check_fit(
  ids: Sequence[int], target: api.Target, capacity: int | None
) -> None:
  """Checks that a prompt fits the target and the capacity."""
  config = target.config
  max_length = config.max_position_embeddings if capacity is None else capacity
  check_prompt(ids, config.vocab_size, max_length)


@contextlib.contextmanager
def naming(where: str | None, name: str | int) -> Iterator[None]:
  """A context that adds a prompt's line and id to errors, if it has a line."""
  try:
    yield
  except UserError as e:
    if where is None:
      raise
    raise UserError(f'{where}: id {show(name)}: {e}') from e


def next_ids(
  dialogue: Dialogue, turn: int, tokenizer: Tokenizer | None, chat: bool
) -> list[int]:
  """Token ids of a turn, with all messages before it."""
  if dialogue.ids is not None or tokenizer is None:
    return dialogue.ids or []
  text = dialogue.prompt.turns[turn]
  if not chat:
    return tokenizer.encode(text)
  dialogue.messages.append({'role': 'user', 'content': text})
  return tokenizer.encode_chat(dialogue.messages, dialogue.parse_special)


def answer(
  dialogue: Dialogue,
  result: GenerateResult,
  tokenizer: Tokenizer | None,
  stop_strings: Sequence[str] = (),
) -> str | None:
  """The text of a result, also appended to the dialogue.

  Without the stop token or stop string that ended it; None without a tokenizer.
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
  dialogue.messages.append({'role': 'assistant', 'content': text})
  return text


def tokenizer_of(flags: GenerateFlags | AuditFlags) -> Tokenizer | None:
  """The target's tokenizer, checked against the flags.

  With `--prompt_ids`, a tokenizer that cannot be read counts as none, because
  it would only add text to the results.

  Raises:
    UserError: the tokenizer is broken, or `--chat` has no template.
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
