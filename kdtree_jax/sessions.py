"""Generation in steps: a stream of rounds, a conversation of turns."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self, Unpack

import jax
import numpy as np

from kdtree_jax.api import LoadedDrafter, Target, check_pair
from kdtree_jax.checks import integer, integers
from kdtree_jax.decode import DecodeState, GenerateResult, drivers
from kdtree_jax.decode.state import (
  HostState,
  check_prompt,
  extend,
  truncate,
)
from kdtree_jax.errors import UserError
from kdtree_jax.generation import Prompts, Request, prepare
from kdtree_jax.io.tokenizer import StopStrings, text_stream
from kdtree_jax.options import GenerateKeywords, GenerateOptions
from kdtree_jax.schema import MAX_INT


@dataclasses.dataclass(frozen=True)
class StreamUpdate:
  """The tokens that one step committed.

  Attributes:
    new_ids: B lists of tokens.
    rounds: number of rounds so far.
  """

  new_ids: list[list[int]]
  rounds: int


class Stream:
  """An iterator of `StreamUpdate`s; `results()` returns the results so far.

  A loop over it may end early, by a break, by Ctrl-C during a step or by an
  exception of `decode`. No token is lost: unfinished rows have the stop reason
  `interrupted`, and the next loop, or `next`, continues after the last update
  that was returned.
  """

  def __init__(
    self,
    target: Target,
    drafter: LoadedDrafter | None,
    prompts: Prompts,
    *,
    rounds_per_step: int = 1,
    golden: Prompts | None = None,
    seeds: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    **options: Unpack[GenerateKeywords],
  ):
    """Validates and compiles.

    Args:
      target: the model.
      drafter: see `generate`.
      prompts: B prompts.
      rounds_per_step: rounds per update; all values share one program.
      golden: B golden sequences, for drafters that need them.
      seeds: see `generate_batch`.
      stop_strings: a row ends with the token that completes one of them.
      decode: turns ids into text, as a tokenizer's method does; needed for
        `stop_strings`.
      **options: fields of `GenerateOptions`.

    Raises:
      UserError: bad input, before anything is compiled.
    """
    self._rounds_per_step = integer(
      rounds_per_step, 'rounds_per_step', 1, MAX_INT
    )
    _check_stop_strings(stop_strings, decode)
    given = GenerateOptions(**options)
    request = prepare(target, drafter, prompts, given, golden, seeds)
    self._open(request, stop_strings, decode)

  @classmethod
  def of(
    cls,
    request: Request,
    stop_strings: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
  ) -> Self:
    """A stream of a prepared request, with an update per round."""
    _check_stop_strings(stop_strings, decode)
    stream = cls.__new__(cls)
    stream._rounds_per_step = 1
    stream._open(request, stop_strings, decode)
    return stream

  def _open(
    self,
    request: Request,
    stop_strings: Sequence[str],
    decode: Callable[[list[int]], str] | None,
  ) -> None:
    """Compiles, without decoding."""
    self._request = request
    self._stops: list[StopStrings] = []
    if decode is not None and stop_strings:
      self._stops = [
        StopStrings(stop_strings, text_stream(decode))
        for _ in range(len(request.state.done))
      ]
    self._fill, self._step, compiled = drivers.decode_programs(
      request.engine, request.params, request.state
    )
    self._seconds = drivers.Seconds(0.0, 0.0, compiled)
    self._filled = False
    # For the step whose update is due: lengths before it, its start time.
    self._due: tuple[np.ndarray, float] | None = None
    # An update that Ctrl-C kept from being returned.
    self._update: StreamUpdate | None = None
    # A copy for `results`: a step consumes the state itself.
    self._host = self._unfilled(HostState.of(request.state))

  def __iter__(self) -> Iterator[StreamUpdate]:
    return self

  def close(self) -> None:
    """Does nothing: a later loop continues this stream."""

  def __next__(self) -> StreamUpdate:
    """Takes a step, or finishes one that was interrupted.

    Raises:
      UserError: a step failed and left no state to continue from.
    """
    request = self._request
    _check_kept(request, 'stream')
    if not self._filled:
      due = self._due or self._take(self._fill, self._host.prompt_length)
      self._wait('prefill', due)
      with _uninterrupted():
        self._host = HostState.of(request.state)
        self._filled, self._due = True, None
    if self._update is None:
      due = self._due
      if due is None:
        if self._host.done.all():
          raise StopIteration
        count = jax.device_put(np.int32(self._rounds_per_step))
        due = self._take(self._step, self._host.length, count)
      self._wait('decode', due)
      before, _ = due
      with _uninterrupted():
        request.state, self._host = self._stop_at_strings(request.state, before)
        self._update, self._due = self._committed(before), None
    update, self._update = self._update, None
    return update

  def _take(
    self,
    program: Callable[..., DecodeState],
    before: np.ndarray,
    *operands: jax.Array,
  ) -> tuple[np.ndarray, float]:
    """Begins a step, makes its update due and returns what is due."""
    request = self._request
    with _uninterrupted():
      begin = time.perf_counter()
      request.state = program(request.params, request.state, *operands)
      self._due = due = before, begin
    return due

  def _wait(self, kind: str, due: tuple[np.ndarray, float]) -> None:
    """Waits for the current step and adds its time."""
    jax.block_until_ready(self._request.state)
    before, begin = due
    now = time.perf_counter()
    spent = getattr(self._seconds, kind) + now - begin
    # If Ctrl-C follows, the next wait must not count this time again.
    self._seconds = self._seconds._replace(**{kind: spent})
    self._due = before, now

  def _committed(self, before: np.ndarray) -> StreamUpdate:
    """The tokens after the lengths `[B]` before a step."""
    host = self._host
    new = [
      row[a:b].tolist()
      for row, a, b in zip(host.tokens, before, host.length, strict=True)
    ]
    return StreamUpdate(new, int(host.stats.rounds))

  def results(self) -> list[GenerateResult]:
    """One result per row, up to the last step."""
    count = self._request.options.max_new_tokens
    return [
      drivers.result_of(self._host, row, count, self._seconds)
      for row in range(len(self._host.done))
    ]

  @staticmethod
  def _unfilled(host: HostState) -> HostState:
    """The state before prefill, where only the prompt exists."""
    return host._replace(length=host.prompt_length)

  def _stop_at_strings(
    self, state: DecodeState, before: np.ndarray
  ) -> tuple[DecodeState, HostState]:
    """Ends the rows whose new tokens complete a stop string."""
    host = HostState.of(state)
    ends = {}
    for row, stops in enumerate(self._stops):
      for position in range(int(before[row]), int(host.length[row])):
        if stops.push(int(host.tokens[row, position])):
          ends[row] = position + 1
          break
    for row, length in ends.items():
      state = truncate(state, row, length)
    return state, HostState.of(state) if ends else host


class Conversation:
  """Turns that share one cache: earlier ones are not prefilled again."""

  def __init__(
    self,
    target: Target,
    drafter: LoadedDrafter | None,
    **options: Unpack[GenerateKeywords],
  ):
    """Opens an empty conversation.

    Args:
      target: the model.
      drafter: one that needs no golden continuation, or None.
      **options: fields of `GenerateOptions`; `capacity` is by default the
        target's max_position_embeddings.
    """
    check_pair(target, drafter)
    if drafter is not None and drafter.drafter.needs_golden:
      raise UserError(
        f'drafter {drafter.name} needs the continuation beforehand, which a '
        'conversation does not have'
      )
    self._target, self._drafter = target, drafter
    self._options = GenerateOptions(**options)
    if self._options.capacity is None:
      max_length = target.config.max_position_embeddings
      self._options = dataclasses.replace(self._options, capacity=max_length)
    self._request: Request | None = None
    # Tokens of the answered turns; the cache may have more, of a turn that was
    # interrupted.
    self._length = 0

  def send(
    self, ids: Sequence[int], max_new_tokens: int | None = None
  ) -> GenerateResult:
    """Appends a turn and generates its answer.

    Args:
      ids: the turn's tokens, at least one.
      max_new_tokens: length of this answer; default: that of the options.

    Returns:
      The answer; its `prompt_ids` are the whole text before it.

    Raises:
      UserError: the turn does not fit the capacity. After any exception, also
        Ctrl-C, the conversation is as it was before the call.
    """
    ids, options = integers(ids, 'ids'), self._options
    if max_new_tokens is not None:
      options = dataclasses.replace(options, max_new_tokens=max_new_tokens)
    request = self._request
    if request is None or self._length == 0:
      request = prepare(self._target, self._drafter, [ids], options)
    else:
      request = self._continued(request, ids, options)
    fill, loop, compiled = drivers.decode_programs(
      request.engine, request.params, request.state
    )
    self._request = request
    times = [time.perf_counter()]
    for program, operands in ((fill, ()), (loop, (drivers.ALL,))):
      with _uninterrupted():
        request.state = program(request.params, request.state, *operands)
      jax.block_until_ready(request.state)
      times.append(time.perf_counter())
    prefill, decode = np.diff(times).tolist()
    seconds = drivers.Seconds(prefill, decode, compiled)
    result = drivers.result_of(
      request.state, 0, options.max_new_tokens, seconds
    )
    self._length = len(result.prompt_ids) + len(result.output_ids)
    return result

  def _continued(
    self, request: Request, ids: list[int], options: GenerateOptions
  ) -> Request:
    """The request for a turn after the last answered one."""
    _check_kept(request, 'conversation')
    capacity, config = request.engine.decode.capacity, request.engine.config
    check_prompt(ids, config.vocab_size, capacity)
    if self._length + len(ids) > capacity:
      raise UserError(
        f'a turn of {len(ids)} tokens after {self._length} exceeds the '
        f'capacity of {capacity}'
      )
    length = jax.device_put(np.array([self._length], np.int32))
    state = request.state.replace(
      cache=request.state.cache.replace(length=length)
    )
    state = extend(state, [ids], [options.max_new_tokens], capacity)
    return dataclasses.replace(request, state=state, options=options)


def _check_stop_strings(
  stop_strings: Sequence[str], decode: Callable[[list[int]], str] | None
) -> None:
  if stop_strings and decode is None:
    raise UserError('stop strings need a tokenizer')
  if isinstance(stop_strings, str) or '' in stop_strings:
    raise UserError('stop_strings is a list of strings that are not empty')


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
  """Delays Ctrl-C, which must not separate a step from storing its state."""
  before = signal.getsignal(signal.SIGINT)
  main = threading.current_thread() is threading.main_thread()
  if before is None or not main:
    yield  # No Python handler, or a thread that gets no signals.
    return
  came = False

  def note(*_: object) -> None:
    nonlocal came
    came = True

  signal.signal(signal.SIGINT, note)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)
    if came:
      signal.raise_signal(signal.SIGINT)


def _check_kept(request: Request, name: str) -> None:
  """Raises a UserError if a failed step consumed the state."""
  kept = not any(leaf.is_deleted() for leaf in jax.tree.leaves(request.state))
  if kept:
    try:
      jax.block_until_ready(request.state)
    except jax.errors.JaxRuntimeError:  # The array holds an error.
      kept = False
  if not kept:
    raise UserError(
      f'the {name} ended with the step that failed; open a new {name}'
    )
