"""Compiled programs, kept by engine and shapes, and what compiling cost."""

import collections
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

  Attributes:
    compilations: programs compiled so far; a test counts them.
  """

  def __init__(self):
    self._programs = collections.OrderedDict()
    self.compilations = 0

  def clear(self) -> None:
    """Forgets every program."""
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
    if key in self._programs:
      self._programs.move_to_end(key)
      return self._programs[key], 0.0
    begin = time.perf_counter()
    jitted = jax.jit(
      function, static_argnums=0, donate_argnums=2 if donate else ()
    )
    lowered = jitted.lower(engine, *arrays)
    program = lowered.compile(compiler_options=compiler_options())
    self._programs[key] = program
    self.compilations += 1
    if len(self._programs) > MAX_PROGRAMS:
      self._programs.popitem(last=False)
    return program, time.perf_counter() - begin


PROGRAMS = ProgramCache()
