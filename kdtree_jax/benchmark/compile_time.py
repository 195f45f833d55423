"""Seconds that `generate` compiles on its first call, as users meet them.

In a process of its own each time. The second finds what the first has left in
JAX's cache on disk, as the second run of a command does.
"""

import concurrent.futures
import multiprocessing
import os
import tempfile
import time
from typing import Any

import jax

from kdtree_jax.decode import DecodeState, Engine
from kdtree_jax.decode.drivers import loop_programs
from kdtree_jax.decode.engine import Params


def compile_seconds(
  engine: Engine, params: Params, state: DecodeState
) -> dict[str, float | None]:
  """Of prefill and loop, tracing included, with nothing else compiling.

  Args:
    engine: of the loop.
    params: whose shapes it is for.
    state: likewise.

  Returns:
    `cold`: from nothing, storing both; `warm`: where both are stored, None if
    they were not found.
  """
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state)
  )
  with tempfile.TemporaryDirectory() as folder:
    cold, _ = _in_a_process(engine, *shapes, folder)
    warm, missed = _in_a_process(engine, *shapes, folder)
  return {'cold': cold, 'warm': None if missed else warm}


def _in_a_process(*arguments: Any) -> tuple[float, int]:
  """Seconds, and how many programs the cache did not have."""
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(
    1, context, initializer=_leave_memory
  ) as pool:
    return pool.submit(_compile, *arguments).result()


def _leave_memory() -> None:
  """Most of a GPU's belongs to the process that measures."""
  os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'


def _compile(
  engine: Engine, params: Params, state: DecodeState, folder: str
) -> tuple[float, int]:
  jax.config.update('jax_enable_compilation_cache', True)
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  missed = []

  def count(event: str, **_: Any) -> None:
    if event == '/jax/compilation_cache/cache_misses':
      missed.append(event)

  jax.monitoring.register_event_listener(count)
  begin = time.perf_counter()
  loop_programs(engine, params, state)
  return time.perf_counter() - begin, len(missed)
