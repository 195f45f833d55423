"""The latent KV cache: written in one place, read by length."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from kdtree_jax.config import ModelConfig
from pallas_kernels.cache_compact.api import cache_compact


class KVCache(flax.struct.PyTreeNode):
  """Committed rows of every layer.

  Attributes:
    latent: `[L, B, S, kv_lora_rank + qk_rope_head_dim]`: the normed latent and
      the rotated shared key, side by side. Rows from `length` on are garbage.
    length: `[B]` int32, committed rows.
  """

  latent: jax.Array
  length: jax.Array


def init_cache(
  config: ModelConfig, batch: int, rows: int, dtype: Any
) -> KVCache:
  """An empty cache with space for `rows` rows a sequence."""
  shape = (config.num_hidden_layers, batch, rows, config.latent_dim)
  return KVCache(
    latent=jnp.zeros(shape, dtype), length=jnp.zeros((batch,), jnp.int32)
  )


def commit(
  cache: KVCache,
  rows: jax.Array,
  path: jax.Array,
  new_length: jax.Array,
) -> KVCache:
  """Writes the rows `path` of `rows` behind the committed ones.

  Args:
    cache: with `S >= length + W` for every sequence.
    rows: `[L, B, N, C]`, as a forward returns them, rotated already.
    path: `[B, W]` int32 indices into N. All W are written; what is not
      committed lies behind `new_length` and is never read.
    new_length: `[B]` int32.
  """
  latent = cache_compact(cache.latent, rows, path, cache.length)
  return KVCache(latent=latent, length=new_length)
