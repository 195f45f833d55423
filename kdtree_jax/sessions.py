"""Generation that goes on: a stream of rounds, a conversation of turns."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kdtree_jax.api import LoadedDrafter, Target
from kdtree_jax.decode import DecodeState, GenerateResult
from kdtree_jax.decode import generate as drivers
from kdtree_jax.decode.state import (
  HostState,
  check_prompt,
  extend,
  truncate,
)
from kdtree_jax.errors import UserError
from kdtree_jax.generation import (
  GenerateOptions,
  Prompts,
  Run,
  finished,
  prepare,
)
from kdtree_jax.io.text_stream import StopStrings
from kdtree_jax.io.tokenizer import text_stream


@dataclasses.dataclass(frozen=True)
class StreamUpdate:
  """What one step committed.

  Attributes:
    new_ids: B lists of tokens.
    rounds: rounds taken so far.
  """

  new_ids: list[list[int]]
  rounds: int


class Stream:
  """Iterates over `StreamUpdate`s; `results()` is what there is so far.

  An interrupted loop keeps its tokens: rows that are not done then have the
  stop reason `interrupted`.
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
    **options: Any,
  ):
    """Prepares and compiles; see `generate` for what is not named here.

    Args:
      target: the model.
      drafter: see `generate`.
      prompts: B prompts.
      rounds_per_step: rounds between two updates, through one program.
      golden: B golden sequences for drafters that need them.
      seeds: see `generate_batch`.
      stop_strings: a row ends with the token that completes one of them.
      decode: ids to text, such as a tokenizer's method; needed for
        `stop_strings`.
      **options: fields of `GenerateOptions`.
    """
    if rounds_per_step < 1:
      raise UserError(f'rounds_per_step={rounds_per_step} is below 1')
    if stop_strings and decode is None:
      raise UserError('stop strings need a tokenizer')
    if isinstance(stop_strings, str) or '' in stop_strings:
      raise UserError('stop_strings is a list of strings that are not empty')
    self._run = prepare(target, drafter, prompts, golden, options, seeds)
    self._rounds_per_step = rounds_per_step
    run = self._run
    self._stops: list[StopStrings] = []
    if stop_strings:
      self._stops = [
        StopStrings(stop_strings, text_stream(decode)) for _ in prompts
      ]
    self._fill, self._step, compiled = drivers.stream_programs(
      run.engine, run.params, run.state
    )
    self._seconds = drivers.Seconds(0.0, 0.0, compiled)
    self._filled = False
    # What `results` reads: a step consumes the state itself.
    self._host = self._unfilled(HostState.of(run.state))

  def __iter__(self) -> Iterator[StreamUpdate]:
    """Goes on where an earlier loop over the stream ended."""
    run = self._run
    if not self._filled:
      begin = time.perf_counter()
      state = self._fill(run.params, run.state)
      run.state, self._filled = jax.block_until_ready(state), True
      spent = time.perf_counter() - begin
      self._seconds = self._seconds._replace(prefill=spent)
      self._host = HostState.of(run.state)
    count = jax.device_put(np.int32(self._rounds_per_step))
    while not self._host.done.all():
      seen = self._host.length
      begin = time.perf_counter()
      state = jax.block_until_ready(self._step(run.params, run.state, count))
      run.state, self._host = self._stop_at_strings(state, seen)
      spent = self._seconds.decode + time.perf_counter() - begin
      self._seconds = self._seconds._replace(decode=spent)
      yield self._update(seen)

  def _update(self, seen: np.ndarray) -> StreamUpdate:
    host = self._host
    new = [
      row[a:b].tolist()
      for row, a, b in zip(host.tokens, seen, host.length, strict=True)
    ]
    return StreamUpdate(new, int(host.stats.rounds))

  def results(self) -> list[GenerateResult]:
    """One result a row, as far as the stream was consumed."""
    count = self._run.options.max_new_tokens
    return [
      drivers.result_of(self._host, row, count, self._seconds)
      for row in range(len(self._host.done))
    ]

  @staticmethod
  def _unfilled(host: HostState) -> HostState:
    """Before the prefill not even the prompt is committed."""
    return host._replace(length=host.prompt_length)

  def _stop_at_strings(
    self, state: DecodeState, seen: np.ndarray
  ) -> tuple[DecodeState, HostState]:
    """Ends the rows whose new tokens complete a stop string."""
    host = HostState.of(state)
    ends = {}
    for row, stops in enumerate(self._stops):
      for place in range(int(seen[row]), int(host.length[row])):
        if stops.push(int(host.tokens[row, place])):
          ends[row] = place + 1
          break
    for row, length in ends.items():
      state = truncate(state, row, length)
    return state, HostState.of(state) if ends else host


class Conversation:
  """Turns over one cache: what was said is never prefilled again."""

  def __init__(
    self, target: Target, drafter: LoadedDrafter | None, **options: Any
  ):
    """Opens an empty conversation.

    Args:
      target: the model.
      drafter: one that needs no golden continuation, or None.
      **options: fields of `GenerateOptions`; without `capacity` it is the
        target's max_position_embeddings.
    """
    if drafter is not None and drafter.drafter.needs_golden:
      raise UserError(
        f'drafter {drafter.name} needs the continuation beforehand, which a '
        'conversation does not have'
      )
    self._target, self._drafter = target, drafter
    limit = target.config.max_position_embeddings
    options.setdefault('capacity', limit)
    self._options = GenerateOptions(**options)
    self._run: Run | None = None
    self._broken = False

  def send(
    self, ids: Sequence[int], max_new_tokens: int | None = None
  ) -> GenerateResult:
    """Appends a turn and answers it.

    Args:
      ids: the turn's tokens, at least one.
      max_new_tokens: of this answer; default: that of the options.

    Returns:
      The answer; its `prompt_ids` are the whole text before it.

    Raises:
      UserError: the turn does not fit the capacity; nothing has changed.
    """
    if self._broken:
      raise UserError('a turn was interrupted; open a new conversation')
    options = self._options
    if max_new_tokens is not None:
      options = dataclasses.replace(options, max_new_tokens=max_new_tokens)
    fields = dataclasses.asdict(options)
    if self._run is None:
      run = prepare(self._target, self._drafter, [ids], None, fields)
    else:
      run = dataclasses.replace(self._run, options=options)
      capacity, config = run.engine.decode.capacity, run.engine.config
      used = int(np.asarray(run.state.length)[0])
      check_prompt(ids, config.vocab_size, capacity)
      if used + len(ids) > capacity:
        raise UserError(
          f'a turn of {len(ids)} tokens after {used} exceeds the capacity of '
          f'{capacity}'
        )
      if options.max_new_tokens < 1:
        raise UserError(f'max_new_tokens={options.max_new_tokens} is below 1')
      count = [options.max_new_tokens]
      run.state = extend(run.state, [list(ids)], count, capacity)
    # The state is consumed: an interrupted turn leaves none to go on from.
    self._run, self._broken = None, True
    result = finished(run)[0]
    self._run, self._broken = run, False
    return result
