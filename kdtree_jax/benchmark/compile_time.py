"""Seconds that `generate` compiles on its first call, as users meet them.

In a process of its own each time: Mosaic numbers the kernels that a process
lowers and writes the number into them, so that a program lowered twice in one
process is not found in JAX's persistent cache, where another process finds it.
"""

import concurrent.futures
import multiprocessing
import os
import tempfile
import time
from typing import Any

import jax

from kdtree_jax.decode import DecodeState, Engine
from kdtree_jax.decode.engine import Params
from kdtree_jax.decode.generate import loop_programs


def compile_seconds(
  engine: Engine, params: Params, state: DecodeState
) -> dict[str, float]:
  """Of prefill and loop, tracing included, with nothing else compiling.

  Args:
    engine: of the loop.
    params: whose shapes it is for.
    state: likewise.

  Returns:
    `cold`: from nothing; `warm`: where the persistent cache holds both.
  """
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state)
  )
  with tempfile.TemporaryDirectory() as folder:
    return {
      name: _in_a_process(engine, *shapes, folder) for name in ('cold', 'warm')
    }


def _in_a_process(*arguments: Any) -> float:
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
) -> float:
  for name, value in (
    ('jax_compilation_cache_dir', folder),
    ('jax_persistent_cache_min_compile_time_secs', 0.0),
    ('jax_persistent_cache_min_entry_size_bytes', -1),
  ):
    jax.config.update(name, value)
  jax.devices()
  begin = time.perf_counter()
  loop_programs(engine, params, state)
  return time.perf_counter() - begin
