"""Inputs of the commit, for the tests and the bench.

The bench times 27 layers, 16 rows of 576, in place.

Plain XLA, one gather and one `dynamic_update_slice`, is the best known form
here: `implementation=None` takes it, and both columns time it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_compact import api, reference
from pallas_kernels.case import Case, check_equal, random_generator

LAYERS, CACHE, NODES, ROWS, WIDTH = 27, 32768, 1025, 16, 576
SMALL_SHAPE = (2, 3, 11, 5)


def _inputs(dtype, key):
  keys = jax.random.split(key, 3)
  cache = jax.random.normal(keys[0], (LAYERS, 1, CACHE, WIDTH), dtype)
  rows = jax.random.normal(keys[1], (LAYERS, 1, NODES, WIDTH), dtype)
  path = jax.random.randint(keys[2], (1, ROWS), 0, NODES)
  return cache, rows, path, jnp.full((1,), 12345, jnp.int32)


def cases() -> list[Case]:
  """All cases of the op."""
  timed = [
    _case(
      f'{LAYERS} layers {ROWS} rows {np.dtype(dtype).name}',
      functools.partial(_inputs, dtype),
      bytes=2.0 * LAYERS * ROWS * WIDTH * np.dtype(dtype).itemsize,
    )
    for dtype in (jnp.float32, jnp.bfloat16)
  ]
  return timed + small_cases()


def small_cases() -> list[Case]:
  """Known paths, in order and not, up to the last row of the cache."""
  paths = (
    [0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 3, 6], [0, 0, 0, 0], [6, 6, 6, 6],
    [-5, 0, 99, 2**31 - 1],
  )  # fmt: skip
  return [
    _case(f'path {path}', functools.partial(small_inputs, path))
    for path in paths
  ]


def _case(name, make_inputs, **sizes):
  return Case(
    op='cache_compact',
    name=name,
    make_inputs=make_inputs,
    kernel=api.cache_compact,
    reference=reference.cache_compact,
    check=functools.partial(check_equal, _by_indexing),
    in_place=True,
    **sizes,
  )


def _by_indexing(cache, rows, path, start):
  """The definition, by plain indexing."""
  path = jnp.clip(path, 0, rows.shape[2] - 1)
  for b in range(cache.shape[1]):
    at = start[b] + jnp.arange(path.shape[1], dtype=jnp.int32)
    cache = cache.at[:, b, at].set(rows[:, b, path[b]])
  return cache


def small_inputs(path, key):
  """Three sequences that take the same path, the last one to the last row."""
  rng = random_generator(key)
  cache = rng.normal(size=SMALL_SHAPE).astype(np.float32)
  layers, batch, size, width = SMALL_SHAPE
  rows = rng.normal(size=(layers, batch, 7, width)).astype(np.float32)
  path = np.array([path] * batch, np.int32)
  start = np.array([0, 3, size - path.shape[1]], np.int32)
  return tuple(map(jnp.asarray, (cache, rows, path, start)))
