"""DDTree speculative decoding for MLA+MoE language models, in JAX."""

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
