"""The latent KV cache."""

import flax.struct
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from kdtree_jax.config import ModelConfig
from pallas_kernels.cache_compact.api import cache_compact


class KVCache(flax.struct.PyTreeNode):
  """The committed rows of every layer.

  Attributes:
    latent: the normed latent and the rotated shared key, side by side. Rows
      from `length` on are garbage.
    length: committed rows.
  """

  latent: Float[Array, 'L B S C']
  length: Int32[Array, ' B']


def init_cache(
  config: ModelConfig, batch: int, rows: int, dtype: DTypeLike
) -> KVCache:
  """An empty cache with space for `rows` rows a sequence."""
  shape = (config.num_hidden_layers, batch, rows, config.latent_dim)
  return KVCache(
    latent=jnp.zeros(shape, dtype), length=jnp.zeros((batch,), jnp.int32)
  )


def commit(
  cache: KVCache,
  rows: Float[Array, 'L B N C'],
  path: Int32[Array, 'B W'],
  new_length: Int32[Array, ' B'],
) -> KVCache:
  """Appends the rows at the indices `path` to the committed ones.

  Args:
    cache: a cache with `S >= length + W` for every sequence.
    rows: the rows that a forward returned, rotated already.
    path: indices into N. All W rows are written; those from `new_length` on are
      not committed and never read.
    new_length: committed rows afterwards.
  """
  latent = cache_compact(cache.latent, rows, path, cache.length)
  return KVCache(latent=latent, length=new_length)
