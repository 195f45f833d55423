"""Shapes of the commit: 27 layers, 16 rows of 576, in place.

Plain XLA, one gather and one `dynamic_update_slice`, is the best known form
here: `implementation=None` takes it, and both columns time it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_case import BenchCase
from pallas_kernels.cache_compact import api, reference

LAYERS, CACHE, NODES, ROWS, WIDTH = 27, 32768, 1025, 16, 576


def _inputs(dtype, key):
  keys = jax.random.split(key, 3)
  cache = jax.random.normal(keys[0], (LAYERS, 1, CACHE, WIDTH), dtype)
  rows = jax.random.normal(keys[1], (LAYERS, 1, NODES, WIDTH), dtype)
  path = jax.random.randint(keys[2], (1, ROWS), 0, NODES)
  return cache, rows, path, jnp.full((1,), 12345, jnp.int32)


def _check(inputs):
  """Compared with the definition by plain indexing."""
  cache, rows, path, start = inputs
  got = jax.jit(api.cache_compact)(*inputs)
  at = int(start[0])
  want = cache.at[:, 0, at : at + ROWS].set(rows[:, 0, path[0]])
  return {'ok': bool(jnp.array_equal(got, want)), 'error': 0.0}


def cases() -> list[BenchCase]:
  """All cases of the op."""
  return [
    BenchCase(
      op='cache_compact',
      name=f'{LAYERS} layers {ROWS} rows {np.dtype(dtype).name}',
      make_inputs=functools.partial(_inputs, dtype),
      kernel=api.cache_compact,
      reference=reference.cache_compact,
      check=_check,
      bytes=2.0 * LAYERS * ROWS * WIDTH * np.dtype(dtype).itemsize,
      flops=0.0,
      in_place=True,
    )
    for dtype in (jnp.float32, jnp.bfloat16)
  ]
