"""The target: an MLA+MoE transformer over a latent KV cache."""

from kdtree_jax.model.cache import KVCache, commit, init_cache
from kdtree_jax.model.moe import Routing
from kdtree_jax.model.transformer import (
  ForwardOutput,
  Transformer,
  abstract_params,
  init_params,
)

__all__ = (
  'ForwardOutput',
  'KVCache',
  'Routing',
  'Transformer',
  'abstract_params',
  'commit',
  'init_cache',
  'init_params',
)
