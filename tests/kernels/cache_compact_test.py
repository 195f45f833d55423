"""cache_compact against a NumPy loop, and the compiled text for copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels.cache_compact import api, cases

L, B, S, N, C, W = 2, 3, 11, 7, 5, 4

compact = jax.jit(api.cache_compact)


@pytest.fixture(autouse=True, scope='module')
def strict():
  with (
    jax.numpy_dtype_promotion('strict'),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


def copied(cache, rows, path, start):
  """What must be written, by copying row after row."""
  out = cache.copy()
  for b in range(cache.shape[1]):
    for w, node in enumerate(path[b]):
      out[:, b, start[b] + w] = rows[:, b, node]
  return out


def make_arrays(seed=0):
  rng = np.random.default_rng(seed)
  cache = rng.normal(size=(L, B, S, C)).astype(np.float32)
  rows = rng.normal(size=(L, B, N, C)).astype(np.float32)
  return cache, rows


@settings(derandomize=True, database=None, deadline=None, max_examples=30)
@given(data=st.data())
def test_equals_row_by_row_copies(data):
  cache, rows = make_arrays()
  cache[:, :, 6:] = np.nan  # a tail that was never written
  rows[:, :, N - 1] = np.nan  # a padding node, possibly on the path
  path = data.draw(
    st.lists(
      st.lists(st.integers(0, N - 1), min_size=W, max_size=W),
      min_size=B,
      max_size=B,
    )
  )
  start = data.draw(st.lists(st.integers(0, S - W), min_size=B, max_size=B))
  path, start = np.array(path, np.int32), np.array(start, np.int32)
  np.testing.assert_array_equal(
    compact(cache, rows, path, start), copied(cache, rows, path, start)
  )


@pytest.mark.parametrize(
  'case', cases.small_cases(), ids=lambda case: case.name
)
def test_case(case):
  inputs = case.make_inputs(jax.random.key(0))
  cache, rows, path, start = map(np.asarray, inputs)
  got = np.asarray(compact(*inputs))
  want = copied(cache, rows, np.clip(path, 0, N - 1), start)
  np.testing.assert_array_equal(got, want)
  assert (got != cache).any()
  assert case.check(case.kernel, inputs)['ok']


def test_bfloat16_rows_are_moved_bit_for_bit():
  cache, rows = (jnp.asarray(a, jnp.bfloat16) for a in make_arrays(3))
  path = np.array([[0, 2, 5, 5]] * B, np.int32)
  start = np.array([1, 2, 7], np.int32)
  got = np.asarray(compact(cache, rows, path, start))
  want = copied(np.asarray(cache), np.asarray(rows), path, start)
  np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize('batch', (32, 33, 71))
def test_many_sequences_are_one_scatter_in_place(batch):
  """From 33 on; each starts elsewhere, the last ones at the last row."""
  rng = np.random.default_rng(batch)
  cache = rng.normal(size=(L, batch, S, C)).astype(np.float32)
  rows = rng.normal(size=(L, batch, N, C)).astype(np.float32)
  path = rng.integers(0, N, (batch, W)).astype(np.int32)
  start = rng.integers(0, S - W + 1, batch).astype(np.int32)
  start[-2:] = S - W
  program = jax.jit(api.cache_compact, donate_argnums=0)
  program = program.lower(cache, rows, path, start).compile()
  text = program.as_text()
  for shape in (f'{L},{batch},{S},{C}', f'{L * batch * S},{C}'):
    assert not re.findall(rf'= f32\[{shape}\]\S* copy\(.*', text)
  assert (' scatter(' in text) == (batch > 32)
  got = program(jnp.asarray(cache), rows, path, start)
  np.testing.assert_array_equal(got, copied(cache, rows, path, start))


def grow(cache, start, path, *, rounds):
  """A loop like the engine's: rows computed from the cache, then committed."""

  def step(carry):
    i, cache, start = carry
    # The rows depend on what was written before, as a verify's rows do.
    last = jnp.take_along_axis(
      cache, jnp.maximum(start - 1, 0)[None, :, None, None], axis=2
    )
    node = jnp.arange(N, dtype=jnp.float32)[None, None, :, None]
    rows = last * 0.5 + jnp.broadcast_to(node, (L, B, N, C))
    cache = api.cache_compact(cache, rows, path, start)
    return i + 1, cache, start + 2

  carry = (jnp.int32(0), cache, start)
  return lax.while_loop(lambda c: c[0] < rounds, step, carry)[1:]


def test_in_place_in_a_loop_over_a_donated_cache():
  cache, _ = make_arrays(4)
  start = np.array([0, 1, 2], np.int32)
  path = np.array([[0, 1, 3, 3], [0, 2, 4, 6], [0, 0, 0, 0]], np.int32)
  arguments = (jnp.asarray(cache), jnp.asarray(start), path)

  def compile_it(donate):
    program = jax.jit(grow, static_argnames=('rounds',), donate_argnums=donate)
    compiled = program.lower(*arguments, rounds=3).compile()
    text = compiled.as_text()
    shape = re.escape(f'f32[{L},{B},{S},{C}]')
    return compiled, text, re.findall(rf'= {shape}\S* copy\(.*', text)

  assert compile_it(())[2]  # a cache that is not donated is copied, and seen
  compiled, text, copies = compile_it((0, 1))
  assert not copies, copies
  assert 'input_output_alias' in text
  got, _ = compiled(*arguments)
  want = cache
  for _ in range(3):
    last = want[:, np.arange(B), np.maximum(start - 1, 0)][:, :, None]
    node = np.arange(N, dtype=np.float32)[None, None, :, None]
    rows = (last * np.float32(0.5) + node).astype(np.float32)
    want = copied(want, rows, path, start)
    start = start + 2
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  'name,change',
  [
    ('cache', dict(cache=np.zeros((B, S, C), np.float32))),
    ('cache', dict(cache=np.zeros((L, B, S, C), np.int32))),
    ('rows', dict(rows=np.zeros((L, B, N, C + 1), np.float32))),
    ('rows', dict(rows=np.zeros((L, B, N, C), np.float16))),
    ('rows', dict(rows=np.zeros((L, B, 0, C), np.float32))),
    ('path', dict(path=np.zeros((B, S + 1), np.int32))),
    ('path', dict(path=np.zeros((B, W), np.float32))),
    ('start', dict(start=np.zeros((B, 1), np.int32))),
    ("implementation.*'reference'", dict(implementation='fast')),
  ],
)
def test_invalid_arguments_name_the_argument(name, change):
  arguments = dict(
    cache=np.zeros((L, B, S, C), np.float32),
    rows=np.zeros((L, B, N, C), np.float32),
    path=np.zeros((B, W), np.int32),
    start=np.zeros((B,), np.int32),
  )
  with pytest.raises(ValueError, match=f'^{name}'):
    api.cache_compact(**(arguments | change))
