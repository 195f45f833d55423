"""Decoding of prompts by one method: in batches or as a stream."""

import collections
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging

from kdtree_jax import api, generation, sessions
from kdtree_jax.decode import GenerateResult
from kdtree_jax.io.tokenizer import Tokenizer
from kdtree_jax.modes.options import GenerateFlags
from kdtree_jax.options import GenerateOptions


class PendingPrompt(NamedTuple):
  """One prompt to continue.

  Attributes:
    index: index of the prompt, which is added to the seed of the options.
    ids: tokens of the prompt.
  """

  index: int
  ids: list[int]


def batches(
  prompts: Sequence[PendingPrompt],
  size: int,
  options: GenerateOptions,
  max_length: int,
) -> Iterator[tuple[int, list[PendingPrompt]]]:
  """Groups prompts by the capacity they need, to compile few programs.

  Args:
    prompts: prompts in any order.
    size: most prompts in a batch.
    options: options of the method.
    max_length: the target's max_position_embeddings.

  Yields:
    A capacity, a power of two unless the flags or the target set another, and
    the prompts that share it.
  """

  def capacity(prompt: PendingPrompt) -> int:
    if options.capacity is not None:
      return options.capacity
    tokens = len(prompt.ids) + options.max_new_tokens
    return generation.bucket(tokens, max_length)

  found = []
  for bucket, group in itertools.groupby(
    sorted(prompts, key=capacity), key=capacity
  ):
    members = list(group)
    logging.info('capacity %d: %d prompts', bucket, len(members))
    found += [(bucket, list(x)) for x in itertools.batched(members, size)]
  # Lines are written in the order of the prompts, so the first come first.
  yield from sorted(found, key=lambda each: each[1][0].index)


class InOrder:
  """A context that writes lines in order, however they are added.

  A line is written once all before it are; at the end, also on an exception,
  all that are left are written.
  """

  def __init__(
    self, keys: Iterable[Hashable], write: Callable[[dict[str, Any]], None]
  ):
    """Begins without lines.

    Args:
      keys: keys of all lines, in order.
      write: called with each line.
    """
    self._keys, self._write = collections.deque(keys), write
    self._lines: dict[Hashable, dict[str, Any] | None] = {}

  def __enter__(self) -> 'InOrder':
    return self

  def __exit__(self, *_: object) -> None:
    while self._keys:
      self._pass()

  def add(self, key: Hashable, line: dict[str, Any] | None) -> None:
    """Adds the line of a key; None if it has none."""
    self._lines[key] = line
    while self._keys and self._keys[0] in self._lines:
      self._pass()

  def _pass(self) -> None:
    line = self._lines.pop(self._keys.popleft(), None)
    if line is not None:
      self._write(line)


def results(
  flags: GenerateFlags,
  target: api.Target,
  drafter: api.LoadedDrafter | None,
  tokenizer: Tokenizer | None,
  batch: list[PendingPrompt],
  options: GenerateOptions,
) -> list[GenerateResult]:
  """The results of one batch of prompts, in order."""
  prompts = [prompt.ids for prompt in batch]
  seeds = [options.seed + prompt.index for prompt in batch]
  if not flags.stream and not flags.stop_strings:
    return generation.continue_prompts(
      target,
      drafter,
      prompts,
      options,
      seeds=seeds,
      record_rounds=flags.dump_trees,
    )
  stream = sessions.Stream.of(
    generation.prepare(target, drafter, prompts, options, seeds=seeds),
    stop_strings=flags.stop_strings,
    decode=tokenizer.decode if tokenizer else None,
  )
  if flags.stream:
    _show(stream, tokenizer)
  else:
    for _ in stream:
      pass
  return stream.results()


def _show(stream: sessions.Stream, tokenizer: Tokenizer | None) -> None:
  """Prints text, or ids, as it is committed, until the end or Ctrl-C."""
  decoder = None if tokenizer is None else tokenizer.stream()
  show = functools.partial(print, end='', file=sys.stderr, flush=True)
  try:
    for update in stream:
      ids = update.new_ids[0]
      show(decoder.push(ids) if decoder else ''.join(f'{i} ' for i in ids))
  except KeyboardInterrupt:
    pass
  show((decoder.finish() if decoder else '') + '\n')
