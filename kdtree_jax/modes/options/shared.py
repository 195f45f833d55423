"""Flags and groups of flags that several modes share."""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from kdtree_jax import registry
from kdtree_jax.config import DecodeConfig
from kdtree_jax.errors import UserError
from kdtree_jax.modes.options.fields import ModeFlags, flag
from kdtree_jax.options import GenerateOptions


def config_names() -> Sequence[str]:
  """Names of the files in `configs/`."""
  from kdtree_jax import named_configs

  return named_configs.config_names()


def drafter_names() -> Sequence[str]:
  """Names of the drafters without a file."""
  importlib.import_module('kdtree_jax.drafters')  # It registers them.
  return registry.names('drafter')


def tree_policies() -> Sequence[str]:
  """Names of the tree policies."""
  importlib.import_module('kdtree_jax.tree')  # It registers them.
  return registry.names('tree_policy')


def kernel_names() -> Sequence[str]:
  """`auto` and the names of the implementations."""
  from kdtree_jax.decode.engine import KERNELS

  return KERNELS


def dtype_names() -> Sequence[str]:
  """Types of the computation."""
  return ('float32', 'bfloat16')


def weight_forms() -> Sequence[str]:
  """Values of `--weights`."""
  return ('as_stored', *dtype_names())


def check_budgets(*budgets: int | str) -> None:
  """Checks values of `--tree_budget`."""
  for budget in budgets:
    if isinstance(budget, int):
      DecodeConfig(tree_budget=budget, draft_depth=1)


def costs_flag() -> Any:
  """`--costs` of a budget that is chosen each round."""
  return flag(
    None,
    'For --tree_budget=auto: what steps cost, as a file of --mode=bench or the '
    'name of a table that ships (then prices are of its model and device); '
    'bytes computes them. If it is not given: as measured on this machine, '
    'once.',
  )


def weights_flag() -> Any:
  """`--weights` of a target that is loaded."""
  return flag(
    'as_stored',
    'as_stored keeps quantised weights and dequantises them where they are '
    'used; bfloat16 and float32 dequantise them while loading and round all '
    'weights to that type.',
    choices=weight_forms,
  )


def target_flag(default: Any) -> Any:
  """`--target`."""
  return flag(
    default,
    'A checkpoint folder in the Hugging Face layout or a .kdtr file.',
    path='input',
  )


def drafter_flag(default: Any, help: str = '') -> Any:
  """`--drafter`; `help` follows the common text."""
  return flag(
    default,
    f'A DFlash folder, a .kdtr file with a drafter, or a name.{help}',
    known=drafter_names,
    path='input',
  )


def dtype_flag() -> Any:
  """`--dtype` of a target that is loaded."""
  return flag(
    'float32',
    'Type of weights, cache and arithmetic.',
    choices=dtype_names,
  )


def kernels_flag() -> Any:
  """`--kernels`."""
  return flag(
    GenerateOptions.kernels,
    'auto uses the Mosaic kernels on a Hopper GPU and the reference elsewhere; '
    'a name selects one implementation.',
    choices=kernel_names,
  )


def prefill_chunk_flag() -> Any:
  """`--prefill_chunk`."""
  return flag(GenerateOptions.prefill_chunk, 'Prompt tokens per prefill step.')


def ignore_eos_flag() -> Any:
  """`--ignore_eos`."""
  return flag(False, "Do not stop at the checkpoint's own stop ids.")


def prompts_flag() -> Any:
  """`--prompts`."""
  return flag(
    None,
    'A JSONL file with {"id", "prompt"} or {"id", "turns"} in each line; '
    'several turns need --chat; - is the standard input.',
    path='input',
  )


def block_size_flag() -> Any:
  """`--block_size`."""
  return flag(
    None,
    '1 + positions drafted per round. If it is not given: what the drafter was '
    'trained for; 8 for one without a file.',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFlags(ModeFlags):
  """The target."""

  target: str | None = target_flag(None)
  config: str | None = flag(
    None,
    'Instead of --target: random weights in the shape of a file in configs/, '
    'made on the device.',
    choices=config_names,
  )
  layers: int | None = flag(
    None, 'With --config: number of leading layers to keep.'
  )
  weights: str = weights_flag()

  def __post_init__(self):
    super().__post_init__()
    if self.config is None:
      if self.target is None:
        raise UserError(f'--mode={self.mode} needs --target or --config')
      self.refuse(['layers'], 'is not used without --config')
    for name in ('target', 'weights'):
      if self.config is not None and name in self.given:
        raise UserError(f'--config and --{name} exclude each other')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterFlags(ModeFlags):
  """The drafter."""

  drafter: str | None = drafter_flag(
    None,
    ' oracle drafts right tokens, acceptance_rate right ones at a rate, '
    'adversarial wrong ones, random random ones, repeat the last one again, '
    'null none; dflash by name is untrained.',
  )
  block_size: int | None = block_size_flag()
  drafter_attention_factor: float | None = flag(
    None,
    "Replaces the amplitude of the drafter's YaRN, about which engines "
    'disagree.',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatedDrafterFlags(DrafterFlags):
  """The drafter."""

  acceptance_rate: float | None = flag(
    None,
    'With --drafter=acceptance_rate: share of right drafts, 0..1. If it is not '
    'given: 0.8.',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFlags(ModeFlags):
  """The prompt."""

  prompt_ids: tuple[int, ...] | None = flag(
    None, 'Token ids of the prompt, as in 1,2,3.', may_be_empty=True
  )
  prompt: str | None = flag(
    None,
    'The prompt as text. Special tokens in it are those tokens, unless with '
    '--chat.',
  )
  prompts: str | None = prompts_flag()
  chat: bool = flag(
    False,
    "Put the prompt into the checkpoint's chat template; special tokens in the "
    'prompt are then plain text.',
  )
  parse_special_in_messages: bool = flag(
    False,
    'With --chat: special tokens in messages are those tokens, not text.',
  )

  def __post_init__(self):
    super().__post_init__()
    sources = ('prompt_ids', 'prompt', 'prompts')
    if sum(getattr(self, name) is not None for name in sources) != 1:
      names = ' or '.join(f'--{name}' for name in sources)
      raise UserError(f'--mode={self.mode} needs one of {names}')
    if not self.chat:
      self.refuse(['parse_special_in_messages'], 'is not used without --chat')
    if self.chat and self.prompt_ids is not None:
      raise UserError('--chat is not used with --prompt_ids')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingFlags(ModeFlags):
  """Decoding."""

  dtype: str = dtype_flag()
  max_new_tokens: int = flag(
    GenerateOptions.max_new_tokens, 'Tokens to generate.'
  )
  tree_policy: str = flag(
    GenerateOptions.tree_policy,
    'How ddtree grows its tree.',
    choices=tree_policies,
  )
  keep_top1_chain: bool = flag(
    GenerateOptions.keep_top1_chain,
    'Keep the most probable chain in every ddtree tree.',
  )
  kernels: str = kernels_flag()
