"""`--mode=generate`: continue a prompt by several methods, as JSON lines."""

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
from kdtree_jax.modes import serving, texts
from kdtree_jax.modes.loading import (
  check_target,
  drafted_rounds,
  ends_early,
  load_target,
  mismatch,
)
from kdtree_jax.modes.run_config import (
  RunConfig,
  check_budgets,
  integers,
  numbers,
  status,
)

FLAGS = (
  'target',
  'config',
  'layers',
  'drafter',
  'hit_rate',
  'methods',
  'drafter_attention_factor',
  'prompt_ids',
  'prompt',
  'prompts',
  'chat',
  'parse_special_in_messages',
  'max_new_tokens',
  'block_size',
  'tree_budget',
  'tree_policy',
  'dtype',
  'weights',
  'stop_ids',
  'ignore_eos',
  'stop_strings',
  'temperature',
  'top_k',
  'top_p',
  'min_p',
  'seed',
  'chain_seed',
  'stream',
  'batch_size',
  'capacity',
  'prefill_chunk',
  'kernels',
  'output',
  'dump_trees',
)
METHODS = ('ar', 'chain', 'ddtree')


@dataclasses.dataclass(frozen=True)
class Run:
  """One line of the output."""

  method: str
  tree_budget: int
  tree_policy: str


def run(config: RunConfig) -> int:
  """Runs every method and budget; 0 when all are written.

  A line is written when it is done.

  Raises:
    UserError: bad input, before anything is compiled; or, when the rest is
      done, conversations that could not go on.
  """
  check_target(config)
  methods = _methods(config)
  options = _options(config)
  tokenizer = texts.tokenizer_of(config)
  # Wrong flags and prompts show before a long load.
  talks = texts.talks(config, tokenizer)
  first = texts.first_ids(talks, tokenizer, bool(config.chat))
  last = options['seed'] + len(talks) - 1
  generation.GenerateOptions(**options).sampling([last])
  target = load_target(config)
  texts.check_first(talks, first, target, options['capacity'])
  with status('loading the drafter'):
    drafter = _drafter(config, target, methods)
  served = _Served(config, target, drafter, tokenizer, options, talks, first)
  plan = _plan(config, methods, drafter)
  for item in plan:
    served.check(item)
  try:
    with JsonLines(config.output) as lines:
      for item in plan:
        served.run(item, lines)
  finally:
    if served.warning is not None:
      print(served.warning, file=sys.stderr)
  if served.errors:
    raise UserError(
      f'{len(served.errors)} conversations could not go on, and their lines '
      f'have an error; the first: {served.errors[0]}'
    )
  return 0


@dataclasses.dataclass
class _Served:
  """The prompts, and all that stays the same from method to method.

  Attributes:
    talks: after their first turn.
    first: token ids of it.
    errors: of conversations that could not go on.
    warning: about the drafter, or None.
  """

  config: RunConfig
  target: api.Target
  drafter: api.LoadedDrafter | None
  tokenizer: Tokenizer | None
  options: dict[str, Any]
  talks: list[texts.Talk]
  first: list[list[int]]
  errors: list[str] = dataclasses.field(default_factory=list)
  warning: str | None = None

  def check(self, item: Run) -> None:
    """Refuses what no program can have, before one is compiled."""
    options = generation.GenerateOptions(**self._fields(item))
    longest = max(map(len, self.first))
    generation.make_engine(self.target, self._used(item), longest, options)

  def run(self, item: Run, lines: JsonLines) -> None:
    """Writes the lines of one method, in the order of the prompts."""
    count = range(len(self.talks))
    # Alone, a conversation ends before the next begins.
    alone = (self.config.batch_size or 1) == 1
    keys = [(i, turn) for i in count for turn in range(self._turns(i))]
    with serving.InOrder(keys, lines.write) as done:
      for group in [[i] for i in count] if alone else [count]:
        self._run_group(item, group, done)

  def _run_group(
    self, item: Run, group: Iterable[int], done: serving.InOrder
  ) -> None:
    """Some conversations, turn by turn."""
    fields, size = self._fields(item), self.config.batch_size or 1
    limit = self.target.config.max_position_embeddings
    talks = {i: self.talks[i].copy() for i in group}
    for turn in range(max(map(self._turns, talks))):
      jobs = self._jobs(item, talks, turn, done)
      for capacity, batch in serving.batches(jobs, size, fields, limit):
        label = f'{item.method}, budget {item.tree_budget}, turn {turn}: '
        with status(f'{label}{len(batch)} at capacity {capacity}'):
          found = serving.results(
            self.config,
            self.target,
            self._used(item),
            self.tokenizer,
            batch,
            fields | {'capacity': capacity},
          )
        for job, result in zip(batch, found, strict=True):
          line = self._line(item, talks[job.index], job.index, result)
          done.add((job.index, turn), line | {'turn': turn})
        used = self._used(item)
        self.warning = self.warning or mismatch(used, found)
        self.warning = self.warning or ends_early(self.target, used, found)

  def _jobs(
    self,
    item: Run,
    talks: dict[int, texts.Talk],
    turn: int,
    done: serving.InOrder,
  ) -> list[serving.Job]:
    """A turn of all conversations that have one; drops those that fail."""
    jobs = []
    for i in [i for i in talks if turn < self._turns(i)]:
      prompt = talks[i].prompt
      try:
        with texts.naming(prompt.where, prompt.id):
          jobs.append(serving.Job(i, self._ids(talks[i], i, turn)))
      except UserError as error:
        del talks[i]
        self.errors.append(f'{error}, turn {turn}')
        head = {'method': item.method, 'tree_budget': item.tree_budget}
        line = {'id': prompt.id, 'turn': turn, 'error': str(error)}
        done.add((i, turn), head | line)
        for later in range(turn + 1, self._turns(i)):
          done.add((i, later), None)
    return jobs

  def _ids(self, talk: texts.Talk, index: int, turn: int) -> list[int]:
    if turn == 0:
      return self.first[index]
    chat = bool(self.config.chat)
    ids = texts.next_ids(talk, turn, self.tokenizer, chat)
    texts.check_fit(ids, self.target, self.options['capacity'])
    return ids

  def _line(
    self, item: Run, talk: texts.Talk, index: int, result: GenerateResult
  ) -> dict[str, Any]:
    """The record of a turn, whose text becomes part of the talk."""
    seeded = self._fields(item)
    seeded['seed'] += index
    stops = self.config.stop_strings
    text = texts.answer(talk, result, self.tokenizer, stops)
    line = record(item, result, self._used(item), seeded)
    return line | {'id': talk.prompt.id, 'text': text}

  def _turns(self, index: int) -> int:
    return max(1, len(self.talks[index].prompt.turns))

  def _used(self, item: Run) -> api.LoadedDrafter | None:
    return None if item.method == 'ar' else self.drafter

  def _fields(self, item: Run) -> dict[str, Any]:
    budget = {'tree_budget': item.tree_budget}
    return self.options | budget | {'tree_policy': item.tree_policy}


def record(
  item: Run,
  result: GenerateResult,
  drafter: api.LoadedDrafter | None,
  options: dict[str, Any],
) -> dict[str, Any]:
  """One JSON object; every list is in the order of the rounds."""
  line = {
    'method': item.method,
    'tree_budget': item.tree_budget,
    'block_size': drafter.block_size if drafter else 1,
    'drafter': drafter.name if drafter else None,
    'temperature': options['temperature'],
    'seed': options['seed'],
    'prompt_ids': result.prompt_ids,
    'output_ids': result.output_ids,
    'acceptance_lengths': result.acceptance_lengths,
    'target_forwards': result.target_forwards,
    'draft_forwards': drafted_rounds(drafter, result)
    if item.tree_budget
    else 0,
    'stop_reason': result.stop_reason,
    'seconds': {
      'prefill': result.seconds.prefill,
      'decode': result.seconds.decode,
    },
  }
  if result.rounds is not None:
    line['trees'] = [
      {
        'node_token_ids': tree.node_token_ids,
        'node_depths': tree.node_depths,
        'parents': tree.parents,
        'accepted_indices': tree.accepted_indices,
      }
      for tree in result.rounds
    ]
  return line


def _plan(
  config: RunConfig,
  methods: tuple[str, ...],
  drafter: api.LoadedDrafter | None,
) -> list[Run]:
  """The runs in order: one an AR or chain, one a budget for DDTree."""
  budgets = [generation.GenerateOptions.tree_budget]
  if config.tree_budget is not None:
    budgets = integers(config.tree_budget, 'tree_budget')
  plan = []
  for method in methods:
    if method == 'ar':
      plan.append(Run('ar', 0, 'best_first'))
    elif method == 'chain':
      plan.append(Run('chain', drafter.block_size - 1, 'chain'))
    else:
      policy = config.tree_policy or 'best_first'
      plan += [Run('ddtree', budget, policy) for budget in budgets]
  return plan


def _methods(config: RunConfig) -> tuple[str, ...]:
  methods = config.methods
  if methods is None:
    methods = METHODS if config.drafter is not None else ('ar',)
  for method in methods:
    if method not in METHODS:
      raise UserError(f'--methods={method} is none of {", ".join(METHODS)}')
  if not methods:
    raise UserError(f'--methods is empty; choose from {", ".join(METHODS)}')
  unused = []
  if 'ddtree' not in methods:
    unused += ['tree_budget', 'tree_policy', 'chain_seed']
  if set(methods) == {'ar'}:
    unused += ['drafter', 'block_size', 'drafter_attention_factor', 'hit_rate']
  for flag in unused:
    if getattr(config, flag) is not None:
      raise UserError(f'--{flag} is not used by --methods={",".join(methods)}')
  return tuple(methods)


def _drafter(
  config: RunConfig, target: api.Target, methods: tuple[str, ...]
) -> api.LoadedDrafter | None:
  if set(methods) == {'ar'}:
    return None
  name = config.drafter
  if name is None:
    raise UserError(f'--methods={",".join(methods)} needs --drafter')
  return api.load_drafter(
    name,
    target,
    config.block_size,
    config.drafter_attention_factor,
    config.hit_rate,
  )


def _options(config: RunConfig) -> dict[str, Any]:
  """The fields of `GenerateOptions` that do not differ between runs."""
  defaults = generation.GenerateOptions
  names = (
    'max_new_tokens',
    'capacity',
    'prefill_chunk',
    'kernels',
    'chain_seed',
    'top_k',
    'top_p',
    'min_p',
    'seed',
  )
  options = {}
  for name in names:
    value = getattr(config, name)
    options[name] = getattr(defaults, name) if value is None else value
  options['temperature'] = defaults.temperature
  if config.temperature is not None:
    temperatures = numbers(config.temperature, 'temperature')
    if len(temperatures) != 1:
      raise UserError('--temperature takes one value in --mode=generate')
    (options['temperature'],) = temperatures
  if config.ignore_eos:
    if config.stop_ids is not None:
      raise UserError('--ignore_eos and --stop_ids exclude each other')
    options['stop_ids'] = ()
  elif config.stop_ids is not None:
    options['stop_ids'] = tuple(integers(config.stop_ids, 'stop_ids'))
  check_budgets(config)
  check_output(config.output)
  if '' in (config.stop_strings or ()):
    raise UserError('--stop_strings holds an empty string')
  if config.stream and config.dump_trees:
    raise UserError('--stream and --dump_trees exclude each other')
  if config.dump_trees and config.stop_strings:
    raise UserError('--dump_trees and --stop_strings exclude each other')
  if config.batch_size is not None and config.batch_size < 1:
    raise UserError(f'--batch_size={config.batch_size} is below 1')
  if (config.batch_size or 1) > 1 and (config.stream or config.dump_trees):
    raise UserError('--stream and --dump_trees take one prompt at a time')
  return options
