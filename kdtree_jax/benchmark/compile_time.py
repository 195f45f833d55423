"""Seconds that `generate` compiles on its first call, as users meet them.

In a process of its own each time, of which the second finds what the first
has stored, as `run.py` does.
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
from kdtree_jax.decode.programs import PROGRAMS
from kdtree_jax.program_store import ProgramStore


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
    they could not be.
  """
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state)
  )
  with tempfile.TemporaryDirectory() as folder:
    cold, _ = _in_a_process(engine, *shapes, folder)
    warm, compiled = _in_a_process(engine, *shapes, folder)
  return {'cold': cold, 'warm': None if compiled else warm}


def _in_a_process(*arguments: Any) -> tuple[float, int]:
  """Seconds, and how many programs were compiled, not loaded."""
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
  jax.config.update('jax_enable_compilation_cache', False)
  PROGRAMS.store = ProgramStore(folder, (jax.default_backend(),))
  begin = time.perf_counter()
  loop_programs(engine, params, state)
  return time.perf_counter() - begin, PROGRAMS.compilations
