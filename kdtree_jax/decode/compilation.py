"""Programs compiled ahead of time, several side by side.

JAX keeps what was compiled: in memory by function, engine and shapes, and on
disk if `jax_compilation_cache_dir` is set.
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.state import DecodeState

MAX_THREADS = 8

# Pure, of static and traced arguments, as `Call` describes it.
Function = Callable[..., Any]


class Call(NamedTuple):
  """A program: a pure function and arguments of the shapes to compile for.

  Attributes:
    function: called as `function(engine, params, state, *operands)`.
    engine: the static argument.
    params: parameters of target and drafter, or their shapes.
    state: the state, or its shapes; donated if `donate`.
    operands: further arrays, or their shapes.
    donate: whether a call consumes its state.
  """

  function: Function
  engine: Engine
  params: Params
  state: DecodeState
  operands: tuple[PyTree, ...] = ()
  donate: bool = False

  def lower(self) -> jax.stages.Lowered:
    """Traces and lowers the program, or finds what JAX kept of it."""
    return _jitted(self.function, self.donate, jax.default_backend()).lower(
      self.engine, self.params, self.state, *self.operands
    )


@functools.lru_cache(maxsize=256)
def _jitted(
  function: Function, donate: bool, backend: str
) -> jax.stages.Wrapped:
  """The one `jax.jit` of a function, to which JAX ties what it keeps."""
  return jax.jit(
    function,
    static_argnums=0,
    donate_argnums=2 if donate else (),
    compiler_options=_compiler_options(backend),
  )


def _compiler_options(backend: str) -> dict[str, str] | None:
  """XLA options other than its defaults.

  On a GPU a launch in a command buffer waits only for the launches whose
  results it needs, so that shared experts run beside the router.
  """
  if backend != 'gpu':
    return None
  return {'xla_gpu_command_buffer_scheduling_mode': 'CONCURRENT'}


def start_compiling(
  calls: Iterable[Call],
) -> list[concurrent.futures.Future[jax.stages.Compiled]]:
  """Lowers programs one after another and compiles them in threads.

  Mosaic numbers the kernels in the order in which they are lowered, and the
  cache on disk finds a program by its text. With a fixed order, the same
  command finds its programs again.

  Returns:
    One future a call. Its program takes `(params, state, *operands)`.
  """
  # For a CPU, XLA uses all cores to compile one program.
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
    The programs and the seconds that it took: next to none if JAX had them
    all in memory.
  """
  begin = time.perf_counter()
  programs = [future.result() for future in start_compiling(calls)]
  return programs, time.perf_counter() - begin
