"""The Mosaic tree build: interpreted on the CPU, and lowered for a Hopper GPU.

One interpreted call takes many kinds of rows, since it is compiling the
interpreter's program that takes the time.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import _bits
from pallas_kernels.tree_build import (
  api,
  cases,
  mosaic_common,
  mosaic_select,
  reference,
)
from pallas_kernels.tree_build import mosaic_gpu as mosaic

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def assert_equal(got, want):
  for field, x, y in zip(want._fields, got, want, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y, err_msg=field)


def hard_rows(length, seed=0):
  """Logits `[8, length]`: smooth, tied, constant, with holes, and worse."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(8, length)).astype(np.float32)
  rows[1] = np.round(rows[1]) * 0.5  # many ties, 0 and -0 among them
  rows[2] = 1.25
  rows[3] = np.where(rng.integers(0, 3, length) > 0, np.nan, rows[3])
  rows[4] = -np.inf
  rows[4, length // 2] = 3.0
  rows[5, ::7] = np.inf
  rows[6] = np.sort(rows[6])[::-1] * 1e30
  rows[7] = np.where(np.arange(length) == 1, 1e4, rows[7])
  return rows


def hard_ranks(depth, num_ranks, seed=0):
  """Fixed-point log q `[5, D, K]`, sorted, with ties of every kind."""
  rng = np.random.default_rng(seed)
  logits = np.stack(
    [hard_rows(2 * num_ranks, seed + i) for i in range(depth)], axis=1
  )
  log_q, ids = reference.rank_marginals(jnp.asarray(logits), num_ranks)
  mixed = rng.integers(0, 8, (5, depth))
  mixed[0], mixed[1] = 0, 2  # no ties; nothing but ties within a depth
  mixed[2, ::2], mixed[2, 1::2] = 2, 7  # ties across depths: log q of 0
  mixed[3, 1] = 4  # one token at this depth
  log_q = np.asarray(log_q)[mixed, np.arange(depth)]
  ids = np.asarray(ids)[mixed, np.arange(depth)]
  log_q[4, -1] = reference.DEAD  # the last depth bars everything
  return jnp.asarray(log_q), jnp.asarray(ids)


def check_growth(budget, depth, num_ranks, kinds):
  """The interpreted trees against the reference, twice."""
  log_q, ids = (x[:kinds] for x in hard_ranks(depth, num_ranks))
  root = jnp.arange(kinds, dtype=jnp.int32)
  grow = jax.jit(
    functools.partial(
      mosaic.tree_from_ranks, budget=budget, interpret=INTERPRET
    )
  )
  got = grow(log_q, ids, root)
  assert_equal(got, reference.tree_from_ranks(log_q, ids, root, budget=budget))
  assert_equal(grow(log_q, ids, root), got)


def test_popped_trees_equal_the_reference():
  check_growth(budget=13, depth=3, num_ranks=9, kinds=5)


def test_trees_by_bands_equal_the_reference(monkeypatch):
  monkeypatch.setattr(mosaic, '_POPPED', 0)
  # 36 pairs of one score do not fit beside what is above them.
  check_growth(budget=7, depth=2, num_ranks=6, kinds=2)


def test_selection_equals_top_k(monkeypatch):
  """In two passes, as a large vocabulary takes them."""
  monkeypatch.setattr(mosaic_select, '_SLICE', 128)
  monkeypatch.setattr(mosaic_select, '_RANKED_AT_ONCE', 16)
  rows = jnp.asarray(hard_rows(257)[1:6:2])
  count = 19

  @jax.jit
  def select(rows):
    candidates = mosaic_select.select(rows, count, interpret=INTERPRET)
    return mosaic_select.sorted_by_rank(*candidates, count)

  keys, ids = select(rows)
  values, want = lax.top_k(reference.canonical(rows), count)
  np.testing.assert_array_equal(mosaic_select.float_of_key(keys), values)
  np.testing.assert_array_equal(ids, want)


@pytest.mark.parametrize('count', [5, 300])
def test_ranking_by_counting_equals_a_sort(count):
  rng = np.random.default_rng(0)
  keys = rng.integers(-9, 9, (2, 400)).astype(np.int32)
  ids = np.stack([rng.permutation(400) for _ in range(2)]).astype(np.int32)
  order = np.lexsort((ids, -keys))[:, :count]
  got = mosaic_select.sorted_by_rank(jnp.asarray(keys), jnp.asarray(ids), count)
  np.testing.assert_array_equal(got[0], np.take_along_axis(keys, order, 1))
  np.testing.assert_array_equal(got[1], np.take_along_axis(ids, order, 1))


@pytest.mark.slow
def test_whole_build_in_bfloat16():
  logits = jnp.asarray(hard_rows(37)[None, :3], jnp.bfloat16)
  root = jnp.full((1,), 5, jnp.int32)
  got = jax.jit(
    functools.partial(mosaic.tree_build, budget=7, interpret=INTERPRET)
  )(logits, root)
  want = jax.jit(functools.partial(reference.tree_build, budget=7))
  assert_equal(got, want(logits, root))


def test_log_sum_exp_is_the_reference_one():
  """Trees are equal to the last bit since both take it from one function."""
  logits = jnp.asarray(hard_rows(300)[None])
  highest = jnp.max(reference.canonical(logits), axis=2, keepdims=True)
  log_q, _ = reference.rank_marginals(logits, 1)
  lse = reference.log_sum_exp(logits, highest)
  np.testing.assert_array_equal(-log_q, lse)


def test_path_numbers_are_in_lexicographic_order():
  depth, limit = 3, 3
  paths = [
    path
    for d in range(1, depth + 1)
    for path in itertools.product(range(limit), repeat=d)
  ]
  # Long codes too, across the border of the two words.
  paths = paths[::3]
  paths += [(1023, *path) for path in paths] + [(0,) * 20 + p for p in paths]

  def number(path):
    hi = lo = used = 0
    for rank in path:
      k = (rank + 1).bit_length() - 1
      hi, lo = mosaic_common.append_rank(
        *map(jnp.int32, (hi, lo, used, rank, k))
      )
      used += 2 * k + 1
    return int(hi), int(lo), len(path)

  with jax.disable_jit():
    numbers = {path: number(path) for path in sorted(set(paths))}
  assert list(numbers.values()) == sorted(numbers.values())
  assert len(set(numbers.values())) == len(numbers)


def test_ancestors_by_doubling():
  rng = np.random.default_rng(0)
  parents = np.full((3, 70), -1, np.int32)
  for row, size in zip(parents, (70, 40, 1), strict=True):
    row[1:size] = [rng.integers(max(0, i - 4), i) for i in range(1, size)]
  depth = 69
  np.testing.assert_array_equal(
    mosaic.ancestors_by_doubling(jnp.asarray(parents), depth),
    _bits.ancestors_from_parents(jnp.asarray(parents), depth),
  )


@pytest.mark.parametrize(
  'shape, budget, dtype',
  [pytest.param((1, cases.DEPTH, cases.VOCAB), b, 'float32',
                marks=[pytest.mark.slow] * (b in cases.BUDGETS[1:-1]))
   for b in cases.BUDGETS]
  + [pytest.param((2, 31, 1 << 20), 1024, 'bfloat16', marks=pytest.mark.slow),
     ((3, 7, 33), 9, 'bfloat16')],
)  # fmt: skip
def test_lowers_for_hopper(shape, budget, dtype):
  device = AbstractDevice('NVIDIA H200', 132, 'gpu')
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=device)
  ):
    jax.jit(functools.partial(mosaic.tree_build, budget=budget)).trace(
      jax.ShapeDtypeStruct(shape, dtype),
      jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    ).lower(lowering_platforms=('cuda',))


def test_named_kernel_that_cannot_run_raises():
  logits, root = jnp.zeros((1, 2, 3)), jnp.zeros((1,), jnp.int32)
  build = functools.partial(api.tree_build, logits, root)
  with pytest.raises(ValueError, match='tree_build has no mosaic_gpu.*Hopper'):
    build(budget=3, implementation='mosaic_gpu')
  with pytest.raises(ValueError, match='budget 1025 is not in'):
    build(budget=1025, implementation='mosaic_gpu')
  assert jax.eval_shape(functools.partial(build, budget=3)).tokens.shape == (
    1,
    4,
  )
