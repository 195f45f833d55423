"""DDTree speculative decoding for MLA+MoE language models, in JAX."""

from kdtree_jax.api import (
  LoadedDrafter,
  Target,
  forward_logits,
  generate,
  load_drafter,
  load_target,
)
from kdtree_jax.config import (
  DecodeConfig,
  DrafterConfig,
  ModelConfig,
  RopeScaling,
  load_config,
)
from kdtree_jax.decode import GenerateResult
from kdtree_jax.errors import UserError

__all__ = (
  'DecodeConfig',
  'DrafterConfig',
  'GenerateResult',
  'LoadedDrafter',
  'ModelConfig',
  'RopeScaling',
  'Target',
  'UserError',
  'forward_logits',
  'generate',
  'load_config',
  'load_drafter',
  'load_target',
)
