"""Flags of the modes that generate text: demo, generate, audit."""

import dataclasses
from collections.abc import Sequence

from kdtree_jax.errors import UserError
from kdtree_jax.modes.options.fields import REQUIRED, ModeFlags, flag
from kdtree_jax.modes.options.shared import (
  DecodingFlags,
  PromptFlags,
  RatedDrafterFlags,
  TargetFlags,
  block_size_flag,
  check_budgets,
  costs_flag,
  drafter_flag,
  ignore_eos_flag,
  prefill_chunk_flag,
)
from kdtree_jax.options import AUTO, GenerateOptions

METHODS = ('ar', 'chain', 'ddtree')


def methods() -> Sequence[str]:
  """The decoding methods of `--mode=generate`."""
  return METHODS


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoFlags(ModeFlags):
  """Shows that AR and DDTree give the same tokens, DDTree in fewer forwards.

  First with a drafter that knows the output, on random weights; then with a
  small model trained on Python and its drafter.
  """

  mode = 'demo'
  bundle: str | None = flag(
    None,
    'A .kdtr file with a golden prompt. If it is not given: the tiny one in '
    'the package, then the trained pair.',
    path='input',
  )
  drafter: str = drafter_flag('oracle')
  block_size: int | None = block_size_flag()
  max_new_tokens: int = flag(24, 'Tokens to generate.')
  tree_budget: int = flag(
    16, 'Draft nodes verified per round, without the root.'
  )

  def __post_init__(self):
    super().__post_init__()
    check_budgets(self.tree_budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags(ModeFlags):
  """Sampling."""

  temperature: float = flag(
    GenerateOptions.temperature,
    '0 is greedy; above 0 tokens are sampled, the same by AR and by DDTree.',
  )
  top_k: int = flag(
    GenerateOptions.top_k, 'Sample from the k most probable tokens; 0 for all.'
  )
  top_p: float = flag(
    GenerateOptions.top_p,
    'Sample from the most probable tokens that together reach this '
    'probability; 1 for all.',
  )
  min_p: float = flag(
    GenerateOptions.min_p,
    'Drop tokens below this share of the highest probability.',
  )
  seed: int = flag(
    GenerateOptions.seed, 'Seed of sampling; prompt i has seed + i.'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopFlags(ModeFlags):
  """When to stop."""

  stop_ids: tuple[int, ...] | None = flag(
    None,
    'Token ids that end the output; empty for none. If it is not given: those '
    'of the checkpoint.',
    may_be_empty=True,
  )
  ignore_eos: bool = ignore_eos_flag()
  stop_strings: tuple[str, ...] = flag(
    (),
    'Text that ends the output, also across tokens; blanks and commas are '
    'part of it. Give the flag once per text. Needs a tokenizer.',
    may_be_empty=True,
  )

  def __post_init__(self):
    super().__post_init__()
    if self.ignore_eos and self.stop_ids is not None:
      raise UserError('--ignore_eos and --stop_ids exclude each other')
    if '' in self.stop_strings:
      raise UserError('--stop_strings holds an empty string')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateFlags(
  StopFlags,
  SamplingFlags,
  DecodingFlags,
  PromptFlags,
  RatedDrafterFlags,
  TargetFlags,
):
  """Continues prompts by AR, DFlash chain and DDTree, as JSON lines."""

  mode = 'generate'
  methods: tuple[str, ...] | None = flag(
    None,
    'How to decode. If it is not given: by all, or by ar without --drafter.',
    choices=methods,
  )
  tree_budget: tuple[int | str, ...] = flag(
    (AUTO,),
    'Draft nodes verified per round, without the root; a list gives one run '
    'each. auto chooses them each round by what they cost.',
  )
  costs: str | None = costs_flag()
  calibration: str | None = flag(
    None,
    'For --tree_budget=auto: a file of --mode=bench_acceptance with the '
    'correction of the drafter to start from.',
    path='input',
  )
  batch_size: int = flag(
    1, 'Prompts of one capacity that are decoded together.'
  )
  capacity: int | None = flag(
    None,
    'Most tokens of prompt and output. If it is not given: the next power of '
    'two that holds both.',
  )
  prefill_chunk: int = prefill_chunk_flag()
  stream: bool = flag(
    False,
    'Show tokens on standard error as they are committed; Ctrl-C keeps what is '
    'there.',
  )
  output: str | None = flag(
    None, 'A JSONL file. If it is not given: standard output.', path='output'
  )
  dump_trees: bool = flag(False, "Add every round's tree to the output.")

  def __post_init__(self):
    super().__post_init__()
    check_budgets(*self.tree_budget)
    self.at_least_one('batch_size')
    self._check_methods()
    if self.stream and self.dump_trees:
      raise UserError('--stream and --dump_trees exclude each other')
    if self.dump_trees and self.stop_strings:
      raise UserError('--dump_trees and --stop_strings exclude each other')
    if self.batch_size > 1 and (self.stream or self.dump_trees):
      raise UserError('--stream and --dump_trees take one prompt at a time')

  def _check_methods(self) -> None:
    used = self.used_methods
    why = f'is not used by --methods={",".join(used)}'
    if 'ddtree' not in used:
      names = ['tree_budget', 'tree_policy', 'keep_top1_chain']
      self.refuse([*names, 'costs', 'calibration'], why)
    elif AUTO not in self.tree_budget:
      self.refuse(['costs', 'calibration'], 'needs --tree_budget=auto')
    if set(used) != {'ar'}:
      if self.drafter is None:
        raise UserError(f'--methods={",".join(used)} needs --drafter')
      return
    names = ('drafter', 'block_size', 'drafter_attention_factor')
    self.refuse([*names, 'acceptance_rate'], why)

  @property
  def used_methods(self) -> tuple[str, ...]:
    """The methods that are given, or else all possible ones."""
    if self.methods is not None:
      return self.methods
    return METHODS if self.drafter is not None else ('ar',)

  @property
  def options(self) -> GenerateOptions:
    """The options of all methods and budgets.

    Raises:
      UserError: a value out of range.
    """
    return GenerateOptions(
      max_new_tokens=self.max_new_tokens,
      costs=self.costs,
      calibration=self.calibration,
      keep_top1_chain=self.keep_top1_chain,
      stop_ids=() if self.ignore_eos else self.stop_ids,
      capacity=self.capacity,
      prefill_chunk=self.prefill_chunk,
      kernels=self.kernels,
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      min_p=self.min_p,
      seed=self.seed,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFlags(DecodingFlags, PromptFlags, RatedDrafterFlags, TargetFlags):
  """Checks that DDTree's output is that of AR, token for token.

  Judges a divergence by noise that is measured without the engine; the exit
  status is 1 if one is not a near-tie.
  """

  mode = 'audit'
  drafter: str = drafter_flag(REQUIRED)
  tree_budget: tuple[int, ...] = flag(
    (64,),
    'Draft nodes verified per round, without the root; a list gives one audit '
    'each.',
  )
  output: str | None = flag(
    None, 'A JSONL file for reports. If it is not given: none.', path='output'
  )

  def __post_init__(self):
    super().__post_init__()
    check_budgets(*self.tree_budget)

  @property
  def options(self) -> GenerateOptions:
    """The options of all budgets.

    Raises:
      UserError: a value out of range.
    """
    return GenerateOptions(
      max_new_tokens=self.max_new_tokens,
      tree_policy=self.tree_policy,
      keep_top1_chain=self.keep_top1_chain,
      kernels=self.kernels,
    )
