"""The flags of `run.py` as one frozen value; None means "not given"."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

import rich.console

from kdtree_jax.config import DecodeConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.files import file_kind
from kdtree_jax.io.paths import check_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """See `run.py --help` for what each flag means."""

  mode: str
  bundle: str | None = None
  target: str | None = None
  config: str | None = None
  layers: int | None = None
  drafter: str | None = None
  hit_rate: float | None = None
  methods: tuple[str, ...] | None = None
  drafter_attention_factor: float | None = None
  prompt_ids: tuple[str, ...] | None = None
  prompt: str | None = None
  prompts: str | None = None
  chat: bool | None = None
  parse_special_in_messages: bool | None = None
  max_new_tokens: int | None = None
  block_size: int | None = None
  tree_budget: tuple[str, ...] | None = None
  context: tuple[str, ...] | None = None
  end_to_end: bool | None = None
  tree_policy: str | None = None
  dtype: str | None = None
  weights: str | None = None
  stop_ids: tuple[str, ...] | None = None
  ignore_eos: bool | None = None
  stop_strings: tuple[str, ...] | None = None
  batch_size: int | None = None
  temperature: tuple[str, ...] | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  chain_seed: bool | None = None
  stream: bool | None = None
  capacity: int | None = None
  prefill_chunk: int | None = None
  kernels: str | None = None
  output: str | None = None
  dump_trees: bool | None = None
  variant: str | None = None
  seed: int | None = None
  num_prompts: int | None = None
  prompt_length: int | None = None
  plots: str | None = None
  corpus: str | None = None
  corpus_sources: tuple[str, ...] | None = None
  vocab_size: int | None = None
  max_tokens: int | None = None
  recipe: str | None = None
  train_steps: int | None = None


def integers(values: tuple[str, ...], flag: str) -> list[int]:
  """Parses the items of a list flag.

  Raises:
    UserError: an item is no integer; names the flag.
  """
  try:
    return [int(value) for value in values]
  except ValueError:
    given = ','.join(values)
    raise UserError(
      f'--{flag}={given} is not a comma-separated list of integers'
    ) from None


def numbers(values: tuple[str, ...], flag: str) -> list[float]:
  """Parses the items of a list flag.

  Raises:
    UserError: it is empty, or an item is no number; names the flag.
  """
  given = ','.join(values)
  if not values:
    raise UserError(f'--{flag} is empty')
  try:
    return [float(value) for value in values]
  except ValueError:
    raise UserError(
      f'--{flag}={given} is not a comma-separated list of numbers'
    ) from None


def check_budgets(config: RunConfig) -> None:
  """Refuses an empty `--tree_budget` and values that no program can have."""
  if config.tree_budget is None:
    return
  budgets = integers(config.tree_budget, 'tree_budget')
  if not budgets:
    raise UserError('--tree_budget is empty')
  for budget in budgets:
    DecodeConfig(tree_budget=budget, draft_depth=1)


# Flags that name files or folders to read, one or several.
INPUTS = ('bundle', 'target', 'drafter', 'prompts', 'corpus', 'corpus_sources')
OUTPUTS = ('output', 'plots')


def check_paths(config: RunConfig) -> None:
  """Refuses flags that name no path, or an input that would be replaced.

  Raises:
    UserError: names the flag.
  """
  for flag in (*INPUTS, *OUTPUTS):
    for path in _paths(config, flag):
      check_path(path, flag)
  if config.output is None or file_kind(config.output) != 'file':
    return
  for flag in INPUTS:
    for path in _paths(config, flag):
      if file_kind(path) and os.path.samefile(path, config.output):
        raise UserError(
          f'--output={config.output}: is --{flag}={path}, which it would '
          'replace'
        )


def _paths(config: RunConfig, flag: str) -> tuple[str, ...]:
  given = getattr(config, flag)
  given = () if given is None else given
  return (given,) if isinstance(given, str) else tuple(given)


def required(value, flag: str, mode: str):
  """`value`, or a UserError that asks for the flag."""
  if value is None:
    raise UserError(f'--mode={mode} needs --{flag}')
  return value


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
  """A spinner on a terminal, nothing elsewhere."""
  console = rich.console.Console(stderr=True)
  if not sys.stderr.isatty():
    yield
    return
  with console.status(message):
    yield
