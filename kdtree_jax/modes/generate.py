"""`--mode=generate`: prompts continued by several methods, as JSON lines."""

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

from kdtree_jax import api, generation
from kdtree_jax.decode import GenerateResult
from kdtree_jax.errors import UserError
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.results import JsonLines
from kdtree_jax.io.tokenizer import Tokenizer
from kdtree_jax.modes import decoding, texts
from kdtree_jax.modes.loading import (
  check_config,
  drafted_rounds,
  ends_early,
  load_drafter,
  mismatch,
  target_of,
)
from kdtree_jax.modes.options import GenerateFlags
from kdtree_jax.modes.status import status
from kdtree_jax.options import GenerateOptions

# What --dump_trees writes of each tree.
TREE_FIELDS = ('node_token_ids', 'node_depths', 'parents', 'accepted_indices')


@dataclasses.dataclass(frozen=True)
class Variant:
  """A method with its budget: one output line per prompt and turn."""

  method: str
  tree_budget: int | str
  tree_policy: str


def run(flags: GenerateFlags) -> int:
  """Runs every method and budget, and writes each line when it is done.

  Raises:
    UserError: bad input, before anything is compiled; or, after everything
      else, conversations that could not be continued.
  """
  check_config(flags)
  # Before a long load, so that wrong flags and prompts fail early.
  options = flags.options
  check_output(flags.output)
  tokenizer = texts.tokenizer_of(flags)
  dialogues = texts.dialogues(flags, tokenizer)
  first = texts.first_ids(dialogues, tokenizer, flags.chat)
  options.sampling([options.seed + len(dialogues) - 1])
  target = target_of(flags, flags.dtype)
  texts.check_first(dialogues, first, target, options.capacity)
  drafter = None
  if set(flags.used_methods) != {'ar'} and flags.drafter is not None:
    drafter = load_drafter(flags, flags.drafter, target, flags.acceptance_rate)
  generator = _Generator(
    flags, target, drafter, tokenizer, options, dialogues, first
  )
  variants = _variants(flags, drafter)
  for variant in variants:
    generator.check(variant)
  try:
    with JsonLines(flags.output) as lines:
      for variant in variants:
        generator.run(variant, lines)
  finally:
    if generator.warning is not None:
      print(generator.warning, file=sys.stderr)
  if generator.errors:
    raise UserError(
      f'{len(generator.errors)} conversations could not be continued, as their '
      f'lines state; the first error: {generator.errors[0]}'
    )
  return 0


@dataclasses.dataclass
class _Generator:
  """Models, prompts and options, which all methods share.

  Attributes:
    dialogues: dialogues with the message of their first turn.
    first: token ids of the first turns.
    errors: messages about conversations that could not be continued.
    warning: a warning about the drafter, or None.
  """

  flags: GenerateFlags
  target: api.Target
  drafter: api.LoadedDrafter | None
  tokenizer: Tokenizer | None
  options: GenerateOptions
  dialogues: list[texts.Dialogue]
  first: list[list[int]]
  errors: list[str] = dataclasses.field(default_factory=list)
  warning: str | None = None

  def check(self, variant: Variant) -> None:
    """Refuses options that no program has, before one is compiled."""
    longest = max(map(len, self.first))
    generation.make_engine(
      self.target, self._used(variant), longest, self._options(variant)
    )

  def run(self, variant: Variant, lines: JsonLines) -> None:
    """Writes the lines of one method in the order of the prompts."""
    count = range(len(self.dialogues))
    # At batch size 1, a conversation ends before the next begins.
    alone = self.flags.batch_size == 1
    keys = [(i, turn) for i in count for turn in range(self._turns(i))]
    with decoding.InOrder(keys, lines.write) as done:
      for group in [[i] for i in count] if alone else [count]:
        self._run_group(variant, group, done)

  def _run_group(
    self, variant: Variant, group: Iterable[int], done: decoding.InOrder
  ) -> None:
    """Continues some conversations, turn by turn."""
    options, size = self._options(variant), self.flags.batch_size
    drafter = self._used(variant)
    max_length = self.target.config.max_position_embeddings
    dialogues = {i: self.dialogues[i].copy() for i in group}
    for turn in range(max(map(self._turns, dialogues))):
      pending = self._pending(variant, dialogues, turn, done)
      for capacity, batch in decoding.batches(
        pending, size, options, max_length
      ):
        label = f'{variant.method}, budget {variant.tree_budget}, turn {turn}: '
        with status(f'{label}{len(batch)} at capacity {capacity}'):
          found = decoding.results(
            self.flags,
            self.target,
            drafter,
            self.tokenizer,
            batch,
            dataclasses.replace(options, capacity=capacity),
          )
        for prompt, result in zip(batch, found, strict=True):
          line = self._line(
            variant, dialogues[prompt.index], prompt.index, result
          )
          done.add((prompt.index, turn), line | {'turn': turn})
        self.warning = (
          self.warning
          or mismatch(drafter, found)
          or ends_early(self.target, drafter, found)
        )

  def _pending(
    self,
    variant: Variant,
    dialogues: dict[int, texts.Dialogue],
    turn: int,
    done: decoding.InOrder,
  ) -> list[decoding.PendingPrompt]:
    """The prompts of one turn; removes conversations that fail."""
    pending = []
    for i in [i for i in dialogues if turn < self._turns(i)]:
      prompt = dialogues[i].prompt
      try:
        with texts.naming(prompt.where, prompt.id):
          ids = self._ids(dialogues[i], i, turn)
          pending.append(decoding.PendingPrompt(i, ids))
      except UserError as error:
        del dialogues[i]
        self.errors.append(f'{error}, turn {turn}')
        head = {'method': variant.method, 'tree_budget': variant.tree_budget}
        line = {'id': prompt.id, 'turn': turn, 'error': str(error)}
        done.add((i, turn), head | line)
        for later in range(turn + 1, self._turns(i)):
          done.add((i, later), None)
    return pending

  def _ids(self, dialogue: texts.Dialogue, index: int, turn: int) -> list[int]:
    if turn == 0:
      return self.first[index]
    ids = texts.next_ids(dialogue, turn, self.tokenizer, self.flags.chat)
    texts.check_fit(ids, self.target, self.options.capacity)
    return ids

  def _line(
    self,
    variant: Variant,
    dialogue: texts.Dialogue,
    index: int,
    result: GenerateResult,
  ) -> dict[str, Any]:
    """The record of a turn, whose text is appended to the dialogue."""
    stops = self.flags.stop_strings
    text = texts.answer(dialogue, result, self.tokenizer, stops)
    temperature, seed = self.options.temperature, self.options.seed + index
    line = record(variant, result, self._used(variant), temperature, seed)
    return line | {'id': dialogue.prompt.id, 'text': text}

  def _turns(self, index: int) -> int:
    return max(1, len(self.dialogues[index].prompt.turns))

  def _used(self, variant: Variant) -> api.LoadedDrafter | None:
    return None if variant.method == 'ar' else self.drafter

  def _options(self, variant: Variant) -> GenerateOptions:
    return dataclasses.replace(
      self.options,
      tree_budget=variant.tree_budget,
      tree_policy=variant.tree_policy,
    )


def record(
  variant: Variant,
  result: GenerateResult,
  drafter: api.LoadedDrafter | None,
  temperature: float,
  seed: int,
) -> dict[str, Any]:
  """One JSON object; every list is in the order of the rounds."""
  drafts = drafted_rounds(drafter, result) if variant.tree_budget else 0
  line: dict[str, Any] = {
    'method': variant.method,
    'tree_budget': variant.tree_budget,
    'block_size': drafter.block_size if drafter else 1,
    'drafter': drafter.name if drafter else None,
    'temperature': temperature,
    'seed': seed,
    'prompt_ids': result.prompt_ids,
    'output_ids': result.output_ids,
    'acceptance_lengths': result.acceptance_lengths,
    'target_forwards': result.target_forwards,
    'draft_forwards': drafts,
    'stop_reason': result.stop_reason,
    'seconds': {
      'prefill': result.seconds.prefill,
      'decode': result.seconds.decode,
    },
  }
  if result.prices:
    line |= {
      'num_nodes': result.num_nodes,
      'predicted_tokens': [p.predicted_tokens for p in result.prices],
      'ms': [price.ms for price in result.prices],
      'priced_speedup': result.priced_speedup,
    }
  if result.rounds is not None:
    line['trees'] = [
      {name: getattr(tree, name) for name in TREE_FIELDS}
      for tree in result.rounds
    ]
  return line


def _variants(
  flags: GenerateFlags, drafter: api.LoadedDrafter | None
) -> list[Variant]:
  """The variants in order; DDTree has one for each budget."""
  found = []
  for method in flags.used_methods:
    if method == 'ddtree':
      found += [
        Variant('ddtree', budget, flags.tree_policy)
        for budget in flags.tree_budget
      ]
    elif method == 'chain' and drafter is not None:
      found.append(Variant('chain', drafter.block_size - 1, 'chain'))
    else:
      found.append(Variant('ar', 0, 'best_first'))
  return found
