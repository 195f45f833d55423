"""Programs are lowered in order, compiled side by side, and kept."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import pytest

from kdtree_jax.decode import programs
from kdtree_jax.decode.programs import ProgramCache

PARAMS, STATE = {'w': jnp.float32(3)}, jnp.arange(4, dtype=jnp.float32)


def recorded(order):
  """Two functions of an engine that say when they are lowered."""

  def times(engine, params, state):
    order.append(('times', engine))
    return params['w'] * state

  def plus(engine, params, state, more):
    order.append(('plus', engine))
    return state + more

  return times, plus


def test_several_programs_in_their_order_and_once():
  cache, order = ProgramCache(), []
  times, plus = recorded(order)
  calls = [(times, 'a'), (plus, 'b', jnp.float32(1)), (times, 'c')]
  (first, second, _), seconds = cache.get_all(calls, PARAMS, STATE)
  assert order == [('times', 'a'), ('plus', 'b'), ('times', 'c')]
  assert seconds > 0 and cache.compilations == 3
  assert first(PARAMS, STATE).tolist() == [0, 3, 6, 9]
  assert second(PARAMS, STATE, jnp.float32(2)).tolist() == [2, 3, 4, 5]
  again, seconds = cache.get_all(calls[:2], PARAMS, STATE)
  assert again == [first, second] and seconds == 0
  assert cache.get(times, 'a', PARAMS, STATE) == (first, 0.0)
  assert cache.compilations == 3


def test_the_same_program_twice_in_one_call():
  cache, order = ProgramCache(), []
  times, _ = recorded(order)
  found, _ = cache.get_all([(times, 'a'), (times, 'a')], PARAMS, STATE)
  assert found[0] is found[1] and cache.compilations == 1


def test_what_fails_leaves_nothing_unfinished():
  cache, order = ProgramCache(), []
  times, plus = recorded(order)

  def broken(engine, params, state):
    raise ValueError('no such thing')

  calls = [(times, 'a'), (broken, 'a'), (plus, 'a', jnp.float32(1))]
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    for _ in range(2):
      with pytest.raises(ValueError, match='no such thing'):
        cache.get_all(calls, PARAMS, STATE)
      asked = pool.submit(cache.get, times, 'a', PARAMS, STATE)
      program, _ = asked.result(timeout=60)
      assert program(PARAMS, STATE).tolist() == [0, 3, 6, 9]
  assert cache.compilations == 1


def test_what_does_not_compile_leaves_nothing_unfinished(monkeypatch):
  """The first one fails while the second waits for its turn."""
  cache, (times, plus) = ProgramCache(), recorded([])
  calls = [(times, 'a'), (plus, 'a', jnp.float32(1))]

  def wrong_options():
    return {'no_such_option': 'true'}

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    for _ in range(5):
      with monkeypatch.context() as patch:
        patch.setattr(programs, 'compiler_options', wrong_options)
        with pytest.raises(jax.errors.JaxRuntimeError, match='no_such_option'):
          cache.get_all(calls, PARAMS, STATE)
    asked = pool.submit(cache.get_all, calls, PARAMS, STATE)
    asked.result(timeout=60)
  assert cache.compilations == 2


def test_two_that_want_the_same_in_opposite_order():
  cache, order = ProgramCache(), []
  times, plus = recorded(order)
  calls = [(times, 'a'), (plus, 'a', jnp.float32(1))]
  both = threading.Barrier(2)

  def ask(calls):
    both.wait(timeout=60)
    return cache.get_all(calls, PARAMS, STATE)[0]

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    one, other = (pool.submit(ask, c) for c in (calls, calls[::-1]))
    assert one.result(timeout=60) == other.result(timeout=60)[::-1]
  assert cache.compilations == 2
