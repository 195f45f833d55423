"""Compiled programs, kept by engine and shapes, and what compiling cost."""

import collections
import concurrent.futures
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.state import DecodeState

# Enough for a sweep over budgets; an executable holds memory.
MAX_PROGRAMS = 64


# A function, its engine and what it takes besides parameters and state.
Call = tuple[Any, ...]


def compiler_options() -> dict[str, str] | None:
  """What XLA is told beside its defaults.

  On a GPU a captured launch waits for the launches that it needs, not for all
  before it, so that shared experts run beside the router.
  """
  if jax.default_backend() != 'gpu':
    return None
  return {'xla_gpu_command_buffer_scheduling_mode': 'CONCURRENT'}


@dataclasses.dataclass(frozen=True)
class _Begun:
  """A program that somebody makes; one of two ends must be reached.

  Attributes:
    lower: lowers it, unless it was stored. By the caller's own thread, for
      JAX's settings are a thread's.
    finish: compiles it, or waits for who does; the program, and whether it
      was not there before.
    give_up: tells who waits why there will be none, if there is none yet.
    own: whether it is made here.
  """

  lower: Callable[[], None]
  finish: Callable[[], tuple[Callable[..., Any], bool]]
  give_up: Callable[[BaseException], None]
  own: bool


class Ingredients(NamedTuple):
  """What a program is made of, its code aside.

  Attributes:
    function: what is compiled.
    engine: its static argument.
    structure: the tree of its other arguments.
    shapes: shape and dtype of each of their leaves.
    options: the compiler's.
    donate: whether the state is.
  """

  function: Callable[..., Any]
  engine: Engine
  structure: Any
  shapes: tuple[tuple[tuple[int, ...], Any], ...]
  options: dict[str, str] | None
  donate: bool


class Store(Protocol):
  """Where programs outlive the process: see `program_store.ProgramStore`."""

  def path(self, made_of: Ingredients) -> pathlib.Path | None:
    """Where a program is, or will be; None if it is not to be stored."""

  def load(self, path: pathlib.Path) -> Callable[..., Any] | None:
    """The program of a file; None if there is none that loads."""

  def save(self, path: pathlib.Path, program: Callable[..., Any]) -> None:
    """Stores a program if it can be stored; a full disk is no failure."""


class ProgramCache:
  """Compiles ahead of time, so that a run can be timed without compilation.

  Threads may share it: of those that want the same program, one compiles.

  Attributes:
    store: where programs outlive the process, if anywhere.
    compilations: programs compiled so far; a test counts them.
  """

  def __init__(self):
    self.store: Store | None = None
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
      compile or to load: 0 if it was there before.
    """
    begin = time.perf_counter()
    begun = self._begin(function, engine, params, state, operands, donate)
    begun.lower()
    program, compiled = begun.finish()
    return program, time.perf_counter() - begin if compiled else 0.0

  def get_all(
    self,
    calls: Sequence[Call],
    params: Params,
    state: DecodeState,
    donate: bool = False,
  ) -> tuple[list[Callable[..., Any]], float]:
    """Several programs of the same arguments, for a GPU compiled side by side.

    They are lowered in their order: Mosaic numbers the kernels that a process
    lowers, and JAX's persistent cache knows a program by those numbers too.

    Args:
      calls: function, engine and further operands of each.
      params: see `get`.
      state: see `get`.
      donate: see `get`.

    Returns:
      The programs, and the seconds until all were there: 0 if all were before.
    """
    begin, begun = time.perf_counter(), []
    # XLA compiles for a CPU on all cores as it is.
    threads = 1 if jax.default_backend() == 'cpu' else len(calls)
    try:
      for function, engine, *operands in calls:
        begun.append(
          self._begin(function, engine, params, state, operands, donate)
        )
      for each in begun:
        each.lower()
      with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        # Own ones first: nobody waits for somebody who waits.
        order = sorted(range(len(begun)), key=lambda i: not begun[i].own)
        found = pool.map(lambda i: begun[i].finish(), order)
        found = dict(zip(order, found, strict=True))
    except BaseException as error:
      for each in begun:  # Somebody may wait for it.
        each.give_up(error)
      raise
    programs = [found[i][0] for i in range(len(begun))]
    if not any(compiled for _, compiled in found.values()):
      return programs, 0.0
    return programs, time.perf_counter() - begin

  def _begin(self, function, engine, params, state, operands, donate) -> _Begun:
    """Takes a program on, if nobody has."""
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
      return _Begun(
        lambda: None,
        lambda: (found.result(), False),
        lambda error: None,
        own=False,
      )

    def give_up(error: BaseException) -> None:
      with self._lock:
        if mine.done():
          return
        if self._programs.get(key) is mine:  # The next one may try again.
          del self._programs[key]
        mine.set_exception(error)

    def attempt(step: Callable[[], Any]) -> Any:
      try:
        return step()
      except BaseException as error:
        give_up(error)
        raise

    options, store = compiler_options(), self.store
    path, loading, lowered = None, None, None
    if store is not None and _is_here(leaves):
      made_of = Ingredients(
        function, engine, structure, shapes, options, donate
      )
      path = attempt(lambda: store.path(made_of))
    if path is not None:
      # While others are lowered.
      pool = concurrent.futures.ThreadPoolExecutor(1)
      loading = pool.submit(store.load, path)
      pool.shutdown(wait=False)

    def lower() -> None:
      nonlocal lowered
      if loading is None or attempt(loading.result) is None:
        jitted = jax.jit(
          function, static_argnums=0, donate_argnums=2 if donate else ()
        )
        lowered = attempt(lambda: jitted.lower(engine, *arrays))

    def make() -> Callable[..., Any]:
      if lowered is None:
        return loading.result()
      program = lowered.compile(compiler_options=options)
      if path is not None:
        store.save(path, program)
      with self._lock:
        self.compilations += 1
      return program

    def finish() -> tuple[Callable[..., Any], bool]:
      program = attempt(make)
      mine.set_result(program)
      return program, True

    return _Begun(lower, finish, give_up, own=True)


def _is_here(leaves: Sequence[Any]) -> bool:
  """Whether all arrays are on the first device, whose programs are stored."""
  here = {jax.devices()[0]}
  return all(
    leaf.sharding.device_set == here
    for leaf in leaves
    if isinstance(leaf, jax.Array)
  )


PROGRAMS = ProgramCache()
