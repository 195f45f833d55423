"""DDTree speculative decoding for MLA+MoE language models, in JAX.

A name is imported when it is used: `run.py --help` needs none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from kdtree_jax.api import (
    LoadedDrafter,
    Target,
    bundled,
    load_drafter,
    load_target,
  )
  from kdtree_jax.config import (
    DecodeConfig,
    DrafterConfig,
    ModelConfig,
    RopeScaling,
  )
  from kdtree_jax.decode import GenerateResult, SamplingConfig
  from kdtree_jax.errors import UserError
  from kdtree_jax.generation import forward_logits, generate, generate_batch
  from kdtree_jax.io.tokenizer import Tokenizer, load_tokenizer
  from kdtree_jax.named_configs import load_config
  from kdtree_jax.options import GenerateOptions
  from kdtree_jax.sessions import Conversation, Stream, StreamUpdate

# The module of each name.
_HOMES = {
  'Conversation': 'sessions',
  'DecodeConfig': 'config',
  'DrafterConfig': 'config',
  'GenerateOptions': 'options',
  'GenerateResult': 'decode',
  'LoadedDrafter': 'api',
  'ModelConfig': 'config',
  'RopeScaling': 'config',
  'SamplingConfig': 'decode',
  'Stream': 'sessions',
  'StreamUpdate': 'sessions',
  'Target': 'api',
  'Tokenizer': 'io.tokenizer',
  'UserError': 'errors',
  'bundled': 'api',
  'forward_logits': 'generation',
  'generate': 'generation',
  'generate_batch': 'generation',
  'load_config': 'named_configs',
  'load_drafter': 'api',
  'load_target': 'api',
  'load_tokenizer': 'io.tokenizer',
}
__all__ = (
  'Conversation',
  'DecodeConfig',
  'DrafterConfig',
  'GenerateOptions',
  'GenerateResult',
  'LoadedDrafter',
  'ModelConfig',
  'RopeScaling',
  'SamplingConfig',
  'Stream',
  'StreamUpdate',
  'Target',
  'Tokenizer',
  'UserError',
  'bundled',
  'forward_logits',
  'generate',
  'generate_batch',
  'load_config',
  'load_drafter',
  'load_target',
  'load_tokenizer',
)


def __getattr__(name: str) -> Any:
  """Imports a name's module at its first use (PEP 562)."""
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  value = getattr(importlib.import_module(f'{__name__}.{_HOMES[name]}'), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted(set(globals()) | _HOMES.keys())
