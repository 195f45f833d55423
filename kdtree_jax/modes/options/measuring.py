"""Flags of the modes that measure: bench, bench_acceptance."""

import dataclasses

from kdtree_jax.errors import UserError
from kdtree_jax.modes.options.fields import REQUIRED, ModeFlags, flag
from kdtree_jax.modes.options.shared import (
  DrafterFlags,
  TargetFlags,
  check_budgets,
  drafter_flag,
  dtype_flag,
  dtype_names,
  ignore_eos_flag,
  kernels_flag,
  prefill_chunk_flag,
  prompts_flag,
  target_flag,
  weights_flag,
)
from kdtree_jax.options import GenerateOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchFlags(DrafterFlags, TargetFlags):
  """Times AR and rounds by budget and context, beside the bytes they must move.

  Continues a file of records that exists.
  """

  mode = 'bench'
  dtype: str | None = flag(
    None,
    'Type of weights, cache and arithmetic. If it is not given: bfloat16 on a '
    'GPU, else float32.',
    choices=dtype_names,
  )
  drafter: str | None = drafter_flag(
    None, ' If it is not given: random weights, 5 layers.'
  )
  tree_budget: tuple[int, ...] | None = flag(
    None,
    'Draft nodes verified per round, without the root. If it is not given: '
    '0,4,8,16,32,64,128,256,512, and 16,64 for --end_to_end.',
  )
  context: tuple[int, ...] = flag(
    (512, 2048, 8192, 32768), 'Committed tokens before the step.'
  )
  kernels: str = kernels_flag()
  end_to_end: bool = flag(
    False,
    'Also decode --max_new_tokens after the first context by AR and by DDTree, '
    'with drafters that know the output but cost as much as a real draft.',
  )
  acceptance_rate: float = flag(
    0.8, 'With --end_to_end: share of right drafts of the second drafter, 0..1.'
  )
  max_new_tokens: int = flag(
    GenerateOptions.max_new_tokens, 'With --end_to_end: tokens to generate.'
  )
  output: str | None = flag(
    None,
    'A JSONL file, continued if it exists. If it is not given: none.',
    path='output',
  )

  def __post_init__(self):
    super().__post_init__()
    check_budgets(*self.tree_budget or ())
    if min(self.context) < 1:
      raise UserError('--context needs positive integers')
    if not self.end_to_end:
      names = ('acceptance_rate', 'max_new_tokens')
      self.refuse(names, 'is not used without --end_to_end')
    self.at_least_one('max_new_tokens')
    if not 0 <= self.acceptance_rate <= 1:
      raise UserError(
        f'--acceptance_rate={self.acceptance_rate} is not in 0..1'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassageFlags(ModeFlags):
  """The prompts."""

  corpus: str | None = flag(
    None,
    'A folder of make_corpus; prompts are passages of its test split, each of '
    'another document.',
    path='input',
  )
  num_prompts: int = flag(100, 'With --corpus: number of passages.')
  prompt_length: int = flag(
    128, 'With --corpus: tokens of a passage that are the prompt.'
  )
  prompts: str | None = prompts_flag()

  def __post_init__(self):
    super().__post_init__()
    if (self.prompts is None) == (self.corpus is None):
      raise UserError(f'--mode={self.mode} needs one of --corpus or --prompts')
    if self.prompts is not None:
      names = ('num_prompts', 'prompt_length')
      self.refuse(names, 'is not used with --prompts')
    self.at_least_one('num_prompts', 'prompt_length')


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchAcceptanceFlags(PassageFlags, DrafterFlags):
  """Measures the acceptance of drafts by budget and temperature.

  On the model's own text and, with --corpus, on real text by teacher forcing.
  The exit status is 1 if an output is not that of AR.
  """

  mode = 'bench_acceptance'
  target: str = target_flag(REQUIRED)
  drafter: str = drafter_flag(REQUIRED)
  dtype: str = dtype_flag()
  weights: str = weights_flag()
  max_new_tokens: int = flag(
    GenerateOptions.max_new_tokens, 'Tokens to generate.'
  )
  tree_budget: tuple[int, ...] = flag(
    (4, 8, 16, 32, 64, 128, 256, 512),
    'Draft nodes verified per round, without the root.',
  )
  temperature: tuple[float, ...] = flag(
    (0.0, 0.8, 1.0), 'Temperatures; 0 is greedy.'
  )
  seed: int = flag(
    GenerateOptions.seed, 'Seed of sampling; prompt i has seed + i.'
  )
  ignore_eos: bool = ignore_eos_flag()
  batch_size: int = flag(32, 'Prompts that are decoded together.')
  prefill_chunk: int = prefill_chunk_flag()
  kernels: str = kernels_flag()
  output: str | None = flag(
    None,
    'A JSONL file, continued if it exists; tables are beside it, as .md.',
    path='output',
  )
  plots: str | None = flag(
    None,
    'A folder for acceptance.png and histogram.png; needs matplotlib, the '
    'extra plots.',
    path='output',
  )

  def __post_init__(self):
    super().__post_init__()
    check_budgets(*self.tree_budget)
    self.at_least_one('max_new_tokens', 'batch_size', 'prefill_chunk')

  @property
  def temperatures(self) -> list[float]:
    """The different temperatures, in order."""
    return sorted(set(self.temperature))
