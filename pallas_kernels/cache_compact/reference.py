"""The commit in plain jnp, shaped so that XLA keeps the cache in place."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

# Beyond it a scatter: so many updates take minutes to compile.
MAX_UPDATES = 32


def cache_compact(
  cache: Float[Array, 'L B S C'],
  rows: Float[Array, 'L B N C'],
  path: Int32[Array, 'B W'],
  start: Int32[Array, ' B'],
) -> Float[Array, 'L B S C']:
  """See `pallas_kernels.cache_compact.api.cache_compact`."""
  path = jnp.clip(path, 0, rows.shape[2] - 1)
  accepted = jnp.take_along_axis(rows, path[None, :, :, None], axis=2)
  # The rows were computed from reads of this cache. The barrier keeps them, and
  # the gather, out of the fusion that writes: an update is in place only if
  # every read of the old cache is over by then.
  accepted = lax.optimization_barrier(accepted)
  if cache.shape[1] > MAX_UPDATES:
    return _scatter(cache, accepted, start)
  zero = jnp.int32(0)
  # Every batch row starts elsewhere. One slice update each stays in place; a
  # batched one would become a scatter.
  for b in range(cache.shape[1]):
    cache = lax.dynamic_update_slice(
      cache, accepted[:, b : b + 1], (zero, zero + b, start[b], zero)
    )
  return cache


def _scatter(
  cache: jax.Array, accepted: jax.Array, start: jax.Array
) -> jax.Array:
  """The same on the cache as one list of rows, which keeps it in place."""
  layers, batch, size, width = cache.shape
  every = jnp.arange(layers * batch, dtype=jnp.int32) * size
  first = every.reshape(layers, batch) + start[None, :]
  ahead = jnp.arange(accepted.shape[2], dtype=jnp.int32)
  index = first[:, :, None] + ahead[None, None, :]
  flat = cache.reshape(-1, width)
  flat = flat.at[index.reshape(-1)].set(
    accepted.reshape(-1, width),
    indices_are_sorted=True,
    unique_indices=True,
    mode='promise_in_bounds',
  )
  return flat.reshape(cache.shape)
