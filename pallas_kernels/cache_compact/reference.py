"""The commit in plain jnp, shaped so that XLA keeps the cache in place."""

import jax
import jax.numpy as jnp
from jax import lax


def cache_compact(
  cache: jax.Array, rows: jax.Array, path: jax.Array, start: jax.Array
) -> jax.Array:
  """See `pallas_kernels.cache_compact.api.cache_compact`."""
  path = jnp.clip(path, 0, rows.shape[2] - 1)
  accepted = jnp.take_along_axis(rows, path[None, :, :, None], axis=2)
  # The rows were computed from reads of this cache. The barrier keeps them, and
  # the gather, out of the fusion that writes: an update is in place only if
  # every read of the old cache is over by then.
  accepted = lax.optimization_barrier(accepted)
  zero = jnp.int32(0)
  # Every batch row starts elsewhere. One slice update each stays in place; a
  # batched one would become a scatter.
  for b in range(cache.shape[1]):
    cache = lax.dynamic_update_slice(
      cache, accepted[:, b : b + 1], (zero, zero + b, start[b], zero)
    )
  return cache
