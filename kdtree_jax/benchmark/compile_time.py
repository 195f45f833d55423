"""Seconds that the first call of `generate` takes to compile.

Each measurement runs in a new process. The second one finds the programs of the
first in JAX's cache on disk, like the second run of a command.
"""

import concurrent.futures
import multiprocessing
import os
import tempfile
import time

import jax
from jaxtyping import PyTree

from kdtree_jax.decode import DecodeState, Engine
from kdtree_jax.decode.drivers import decode_programs
from kdtree_jax.decode.engine import Params


def compile_seconds(
  engine: Engine, params: Params, state: DecodeState
) -> dict[str, float | None]:
  """Seconds to trace and compile prefill and loop, with nothing else compiling.

  Args:
    engine: the loop's.
    params: parameters; only their shapes are used.
    state: a state; only its shapes are used.

  Returns:
    `cold`: with an empty cache; `warm`: with both programs in the cache, None
    if they were not found there.
  """
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state)
  )
  with tempfile.TemporaryDirectory() as folder:
    cold, _ = _in_new_process(engine, shapes, folder)
    warm, missed = _in_new_process(engine, shapes, folder)
  return {'cold': cold, 'warm': None if missed else warm}


def _in_new_process(
  engine: Engine, shapes: tuple[PyTree, PyTree], folder: str
) -> tuple[float, int]:
  """Seconds to compile, and how many programs the cache did not have."""
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(
    1, context, initializer=_preallocate_nothing
  ) as pool:
    return pool.submit(_compile, engine, *shapes, folder).result()


def _preallocate_nothing() -> None:
  """Most of a GPU's memory belongs to the parent process."""
  os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'


def _compile(
  engine: Engine, params: PyTree, state: PyTree, folder: str
) -> tuple[float, int]:
  """Seconds to compile for these shapes, and the cache's misses."""
  jax.config.update('jax_enable_compilation_cache', True)
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  missed = []

  def count(event: str, **_: str | int) -> None:
    if event == '/jax/compilation_cache/cache_misses':
      missed.append(event)

  jax.monitoring.register_event_listener(count)
  begin = time.perf_counter()
  decode_programs(engine, params, state)
  return time.perf_counter() - begin, len(missed)
