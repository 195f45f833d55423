"""Programs compiled ahead of time, several side by side.

What was compiled is kept by JAX: in memory by function, engine and shapes, and
on disk where `jax_compilation_cache_dir` is set.
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.state import DecodeState

MAX_THREADS = 8


class Call(NamedTuple):
  """A program: a pure function and the arguments whose shapes it is for.

  Attributes:
    function: called as `function(engine, params, state, *operands)`.
    engine: static.
    params: parameters of target and drafter, or their shapes.
    state: the state, or its shapes; donated if `donate`.
    operands: further arrays, or their shapes.
    donate: whether a call consumes its state.
  """

  function: Callable[..., Any]
  engine: Engine
  params: Params
  state: DecodeState
  operands: tuple[Any, ...] = ()
  donate: bool = False

  def lower(self) -> jax.stages.Lowered:
    """Traces and lowers the program, or finds what JAX kept of it."""
    return _jitted(self.function, self.donate, jax.default_backend()).lower(
      self.engine, self.params, self.state, *self.operands
    )


@functools.lru_cache(maxsize=256)
def _jitted(
  function: Callable[..., Any], donate: bool, backend: str
) -> jax.stages.Wrapped:
  """The one `jax.jit` of a function, to which JAX ties what it keeps."""
  return jax.jit(
    function,
    static_argnums=0,
    donate_argnums=2 if donate else (),
    compiler_options=_compiler_options(backend),
  )


def _compiler_options(backend: str) -> dict[str, str] | None:
  """Options for XLA beside its defaults.

  On a GPU a captured launch waits for the launches that it needs, not for all
  before it, so that shared experts run beside the router.
  """
  if backend != 'gpu':
    return None
  return {'xla_gpu_command_buffer_scheduling_mode': 'CONCURRENT'}


def start_compiling(
  calls: Iterable[Call],
) -> list[concurrent.futures.Future[jax.stages.Compiled]]:
  """Lowers programs in their order and compiles them in threads.

  The order matters: Mosaic writes the number of kernels that the process has
  lowered into each kernel, and the cache on disk finds a program by its text.
  So the same command finds its programs again.

  Returns:
    One future a call. Its program takes `(params, state, *operands)`.
  """
  # XLA compiles for a CPU on all cores as it is.
  threads = 1 if jax.default_backend() == 'cpu' else MAX_THREADS
  pool = concurrent.futures.ThreadPoolExecutor(threads)
  try:
    return [pool.submit(call.lower().compile) for call in calls]
  finally:
    pool.shutdown(wait=False)


def compile_all(
  calls: Iterable[Call],
) -> tuple[list[jax.stages.Compiled], float]:
  """Compiles programs side by side; see `start_compiling`.

  Returns:
    The programs and the seconds that it took, next to nothing where JAX had
    them all in memory.
  """
  begin = time.perf_counter()
  programs = [future.result() for future in start_compiling(calls)]
  return programs, time.perf_counter() - begin
