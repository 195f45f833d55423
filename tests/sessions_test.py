"""Streams and conversations that Ctrl-C or an exception interrupts."""

import signal

import jax
import pytest

from kdtree_jax import api, generation, sessions
from kdtree_jax.errors import UserError
from tests import support

FIXTURE = 'deepseek_v3_trained_drafter'
OPTIONS = {
  'max_new_tokens': 20,
  'tree_budget': 16,
  'capacity': 64,
  'prefill_chunk': 8,
  'stop_ids': (),
}


@pytest.fixture(scope='module')
def pair():
  target = support.fixture(FIXTURE)
  return target, api.load_drafter(support.DATA / FIXTURE / 'dflash', target)


@pytest.fixture(scope='module')
def prompt(pair):
  return support.prompt_of(pair[0].config, 4)


@pytest.fixture(scope='module')
def wanted(pair, prompt):
  return generation.generate(*pair, prompt, **OPTIONS)


@pytest.fixture(autouse=True)
def heard():
  """Python's handler of Ctrl-C, which a shell's background job is without."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def interrupting(function, calls, before=False):
  """A function that Ctrl-C meets in its calls of these numbers."""
  count = 0

  def interrupted(*operands):
    nonlocal count
    count += 1
    if before and count in calls:
      signal.raise_signal(signal.SIGINT)
    result = function(*operands)
    if count in calls:
      signal.raise_signal(signal.SIGINT)
    return result

  return interrupted


def patient(stream):
  """All updates, and how often one had to be asked for again."""
  taken, again = [], 0
  while True:
    try:
      taken.append(next(stream))
    except KeyboardInterrupt:
      again += 1
      assert stream.results()[0].stop_reason == 'interrupted'
    except StopIteration:
      return taken, again


@pytest.mark.parametrize('place', ('wait', '_fill', '_step', '_committed'))
def test_a_stream_goes_on_after_ctrl_c(
  pair, prompt, wanted, monkeypatch, place
):
  """While a step runs, and as it returns what replaces the consumed state."""
  stream = sessions.Stream(*pair, [prompt], **OPTIONS)
  if place == 'wait':
    wait = interrupting(jax.block_until_ready, (1, 2, 5), before=True)
    monkeypatch.setattr(jax, 'block_until_ready', wait)
  else:
    calls = (1,) if place == '_fill' else (1, 3)
    patched = interrupting(getattr(stream, place), calls)
    monkeypatch.setattr(stream, place, patched)
  taken, again = patient(iter(stream))
  assert again == {'wait': 3, '_fill': 1}.get(place, 2)
  tokens = sum((update.new_ids[0] for update in taken), [])
  (result,) = stream.results()
  assert tokens == result.output_ids == wanted.output_ids
  assert result.acceptance_lengths == wanted.acceptance_lengths
  assert [update.rounds for update in taken] == [
    *range(1, 1 + wanted.target_forwards)
  ]
  assert result.stop_reason == 'length'


def test_a_stream_goes_on_after_an_exception_of_its_caller(
  pair, prompt, wanted
):
  """`decode` fails once, after the step."""
  calls = []

  def decode(ids):
    calls.append(len(ids))
    if len(calls) == 2:
      raise LookupError('no such token')
    return ''

  stream = sessions.Stream(
    *pair, [prompt], stop_strings=('x',), decode=decode, **OPTIONS
  )
  tokens = []
  with pytest.raises(LookupError):
    for update in stream:
      tokens += update.new_ids[0]
  for update in stream:
    tokens += update.new_ids[0]
  assert tokens == wanted.output_ids == stream.results()[0].output_ids


@pytest.mark.parametrize('kind', ('dispatch', 'device'))
def test_a_step_that_fails_for_good_is_said_in_one_line(
  pair, prompt, monkeypatch, kind
):
  stream = sessions.Stream(*pair, [prompt], **OPTIONS)
  first = next(stream).new_ids[0]
  step = stream._step

  def failing(*operands):
    state = step(*operands)
    if kind == 'dispatch':
      raise MemoryError
    return state

  def broken(state):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED')

  monkeypatch.setattr(stream, '_step', failing)
  if kind == 'device':
    monkeypatch.setattr(jax, 'block_until_ready', broken)
  with pytest.raises((MemoryError, UserError)):
    next(stream)
  with pytest.raises(UserError, match='the step that failed') as error:
    next(stream)
  assert '\n' not in str(error.value)
  assert stream.results()[0].output_ids == first


def interrupt(patch, place):
  """Ctrl-C in prefill, in the loop, or while one of them is waited for."""
  if place == 'wait':
    wait = interrupting(jax.block_until_ready, (2,))
    patch.setattr(jax, 'block_until_ready', wait)
    return
  programs = sessions.drivers.decode_programs

  def patched(*operands):
    *found, seconds = programs(*operands)
    found[place] = interrupting(found[place], (1,))
    return *found, seconds

  patch.setattr(sessions.drivers, 'decode_programs', patched)


@pytest.mark.parametrize('turn', (0, 1))
@pytest.mark.parametrize('place', (0, 1, 'wait'))
def test_an_interrupted_turn_was_never_sent(
  pair, prompt, monkeypatch, turn, place
):
  usual = sessions.Conversation(*pair, **OPTIONS)
  talk = sessions.Conversation(*pair, **OPTIONS)
  for number, ids in enumerate((prompt, [5, 6, 7])):
    if number == turn:
      with monkeypatch.context() as patch:
        interrupt(patch, place)
        with pytest.raises(KeyboardInterrupt):
          talk.send([9] * 11, 7)
    ours, theirs = talk.send(ids, 9), usual.send(ids, 9)
    assert ours.prompt_ids == theirs.prompt_ids
    assert ours.output_ids == theirs.output_ids
    assert ours.acceptance_lengths == theirs.acceptance_lengths
