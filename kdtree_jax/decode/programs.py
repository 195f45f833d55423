"""Compiled programs, kept by engine and shapes, and what compiling cost."""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.state import DecodeState

# Enough for a sweep over budgets; an executable holds memory.
MAX_PROGRAMS = 64


def compiler_options() -> dict[str, str] | None:
  """What XLA is told beside its defaults.

  On a GPU a captured launch waits for the launches that it needs, not for all
  before it, so that shared experts run beside the router.
  """
  if jax.default_backend() != 'gpu':
    return None
  return {'xla_gpu_command_buffer_scheduling_mode': 'CONCURRENT'}


class ProgramCache:
  """Compiles ahead of time, so that a run can be timed without compilation.

  Threads may share it: of those that want the same program, one compiles.

  Attributes:
    compilations: programs compiled so far; a test counts them.
  """

  def __init__(self):
    self._programs = collections.OrderedDict()
    self._lock = threading.Lock()
    self.compilations = 0

  def clear(self) -> None:
    """Forgets every program."""
    with self._lock:
      self._programs.clear()

  def get(
    self,
    function: Callable[..., Any],
    engine: Engine,
    params: Params,
    state: DecodeState,
    *operands: Any,
    donate: bool = False,
  ) -> tuple[Callable[..., Any], float]:
    """The program for `function(engine, params, state, *operands)`.

    Args:
      function: pure; `engine` is static.
      engine: the static half.
      params: of target and drafter.
      state: donated if `donate`, that is, consumed by a call.
      *operands: further arrays.
      donate: see `state`.

    Returns:
      A callable of `(params, state, *operands)` and the seconds it took to
      compile: 0 if it was compiled before.
    """
    arrays = (params, state, *operands)
    leaves, structure = jax.tree.flatten(arrays)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    key = (function, engine, structure, shapes, donate)
    with self._lock:
      found = self._programs.get(key)
      if found is not None:
        self._programs.move_to_end(key)
      else:
        mine = self._programs[key] = concurrent.futures.Future()
        if len(self._programs) > MAX_PROGRAMS:
          self._programs.popitem(last=False)
    if found is not None:
      return found.result(), 0.0
    begin = time.perf_counter()
    jitted = jax.jit(
      function, static_argnums=0, donate_argnums=2 if donate else ()
    )
    try:
      lowered = jitted.lower(engine, *arrays)
      program = lowered.compile(compiler_options=compiler_options())
    except BaseException as error:
      with self._lock:  # The next one who asks may try again.
        self._programs.pop(key, None)
      mine.set_exception(error)
      raise
    with self._lock:
      self.compilations += 1
    mine.set_result(program)
    return program, time.perf_counter() - begin


PROGRAMS = ProgramCache()
