"""verify_attention against float64 NumPy, one node at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import _bits
from pallas_kernels.verify_attention import api

L, B, S, N, H, C, R = 2, 3, 19, 5, 3, 13, 9
SCALE = 0.37

attend = jax.jit(
  api.verify_attention,
  static_argnames=('layer', 'value_dim', 'scale', 'implementation'),
)


@pytest.fixture(autouse=True, scope='module')
def strict():
  with (
    jax.numpy_dtype_promotion('strict'),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


def pack(mask):
  """Packs `[B, N, N]` bool to uint32 words, bit by bit."""
  n = mask.shape[-1]
  words = np.zeros((*mask.shape[:-1], -(-n // 32)), np.uint32)
  for b, i, j in zip(*np.nonzero(mask), strict=True):
    words[b, i, j // 32] |= np.uint32(1 << (j % 32))
  return words


def expected(query, cache, rows, lengths, mask, layer=1, scale=SCALE):
  """Softmax over exactly the visible rows, in float64."""
  out = np.zeros((*query.shape[:3], R))
  for b, i in np.ndindex(query.shape[:2]):
    keys = np.concatenate([cache[layer, b, : lengths[b]], rows[b, mask[b, i]]])
    keys = keys.astype(np.float64)
    if len(keys):
      scores = scale * query[b, i].astype(np.float64) @ keys.T
      weights = np.exp(scores - scores.max(axis=1, keepdims=True))
      weights /= weights.sum(axis=1, keepdims=True)
      out[b, i] = weights @ keys[:, :R]
  return out


def make_arrays(seed=0, batch=B, size=S, n=N):
  rng = np.random.default_rng(seed)
  query, cache, rows = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((batch, n, H, C), (L, batch, size, C), (batch, n, C))
  )
  mask = np.tril(rng.random((batch, n, n)) < 0.4)
  mask[:, np.arange(n), np.arange(n)] = True
  mask[:, :, 0] = True
  return query, cache, rows, mask


def run(query, cache, rows, lengths, words, layer=1, scale=SCALE):
  return np.asarray(
    attend(
      query,
      cache,
      rows,
      np.asarray(lengths, np.int32),
      layer=layer,
      value_dim=R,
      scale=scale,
      ancestors=words,
    )
  )


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(
  lengths=st.lists(
    st.sampled_from([0, 1, 7, S - 1, S]), min_size=B, max_size=B
  ),
  seed=st.integers(0, 2**31),
)
def test_equals_float64_with_nan_tails(lengths, seed):
  query, cache, rows, mask = make_arrays(seed)
  for b, length in enumerate(lengths):
    cache[:, b, length:] = np.nan
  # The last node of row 0 is padding: it sees nothing and nobody sees it.
  mask[0, -1] = mask[0, :, -1] = False
  rows[0, -1] = np.nan
  cache[0] = np.nan  # another layer
  got = run(query, cache, rows, lengths, pack(mask))
  np.testing.assert_allclose(
    got, expected(query, cache, rows, lengths, mask), rtol=2e-5, atol=2e-6
  )


@pytest.mark.parametrize('size', [0, 1, 32])
@pytest.mark.parametrize('n', [1, 33])
def test_edges_of_cache_and_tree(size, n):
  query, cache, rows, mask = make_arrays(size + n, batch=2, size=size, n=n)
  lengths = [size, size // 2]
  for words, seen in ((pack(mask), mask), (None, np.tril(np.ones_like(mask)))):
    got = run(query, cache, rows, lengths, words)
    want = expected(query, cache, rows, lengths, seen.astype(bool))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_a_node_that_sees_nothing_gets_zeros():
  query, cache, rows, mask = make_arrays(1)
  mask[:, 3] = False
  got = run(query, cache, rows, [0, 4, 0], pack(mask))
  assert (got[[0, 2], 3] == 0).all() and (got[1, 3] != 0).any()
  assert np.isfinite(got).all()
  got = run(query, cache, rows, [0, 0, 0], pack(np.zeros_like(mask)))
  assert (got == 0).all()


def test_chain_bits_equal_implicit_causal_bitwise():
  query, cache, rows, _ = make_arrays(2)
  chain = np.tile(np.arange(-1, N - 1, dtype=np.int32), (B, 1))
  words = _bits.ancestors_from_parents(jnp.asarray(chain), N - 1)
  np.testing.assert_array_equal(
    run(query, cache, rows, [0, 5, S], words),
    run(query, cache, rows, [0, 5, S], None),
  )


def test_very_low_scores_survive():
  query, cache, rows, mask = make_arrays(3)
  # Every visible score is about -1e5, and their differences still decide.
  query[..., 0] = 1e3
  cache[..., 0] = rows[..., 0] = -1e2
  lengths = [3, S, 0]
  got = run(query, cache, rows, lengths, pack(mask), scale=1.0)
  want = expected(query, cache, rows, lengths, mask, scale=1.0)
  # float32 holds a score of 1e5 to 2^-8, which is its weight's relative error.
  np.testing.assert_allclose(got, want, rtol=0.02, atol=0.05)
  assert (got != 0).all()


def test_invisible_rows_change_no_bit():
  query, cache, rows, mask = make_arrays(4)
  lengths = [2, 9, 0]
  words = pack(mask)
  want = run(query, cache, rows, lengths, words)
  np.testing.assert_array_equal(run(query, cache, rows, lengths, words), want)
  for b, length in enumerate(lengths):
    cache[:, b, length:] = 1e4
  cache[0] = -1e4
  np.testing.assert_array_equal(run(query, cache, rows, lengths, words), want)
  for j in range(N):
    other = rows.copy()
    other[:, j] = 1e4
    got = run(query, cache, other, lengths, words)
    blind = ~mask[:, :, j]
    np.testing.assert_array_equal(got[blind], want[blind])
    assert (got[~blind] != want[~blind]).any()


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('chain', [False, True])
def test_what_is_not_finite_reaches_only_those_that_see_it(value, chain):
  """A whole new row, one value of it, and what lies behind the length."""
  query, cache, rows, mask = make_arrays(9)
  if chain:
    mask[:] = np.tril(np.ones((N, N), bool))
  lengths, words = [2, 9, 0], None if chain else pack(mask)
  want = run(query, cache, rows, lengths, words)
  for b, length in enumerate(lengths):
    cache[:, b, length:] = value
  for j in range(N):
    for columns in (slice(None), 2, C - 1):
      other = rows.copy()
      other[:, j, columns] = value
      got = run(query, cache, other, lengths, words)
      blind = ~mask[:, :, j]
      np.testing.assert_array_equal(got[blind], want[blind])
      if columns == slice(None) or np.isnan(value):
        assert np.isnan(got[~blind]).all()
  # A committed row is seen by every node of its sequence.
  cache[1, 1, 3, 4] = np.nan
  got = run(query, cache, rows, lengths, words)
  np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
  assert np.isnan(got[1]).all()


def test_sibling_order_permutes_the_output():
  #  0 -> 1, 2;  1 -> 3;  2 -> 4: swapping both branches
  parents = np.array([[-1, 0, 0, 1, 2]] * B, np.int32)
  order = np.array([0, 2, 1, 4, 3])
  words = _bits.ancestors_from_parents(jnp.asarray(parents), 2)
  query, cache, rows, _ = make_arrays(5)
  want = run(query, cache, rows, [4, 0, S], words)
  # The same parents describe the swapped tree, whose nodes moved.
  got = run(query[:, order], cache, rows[:, order], [4, 0, S], words)
  np.testing.assert_allclose(got, want[:, order], rtol=1e-5, atol=1e-6)


def test_every_node_equals_its_path_as_a_chain():
  query, cache, rows, _ = make_arrays(6)
  parents = np.array([[-1, 0, 0, 2, 3]] * B, np.int32)
  words = _bits.ancestors_from_parents(jnp.asarray(parents), 3)
  tree = run(query, cache, rows, [4, 7, 1], words)
  path = [0, 2, 3, 4]
  chain = run(query[:, path], cache, rows[:, path], [4, 7, 1], None)
  np.testing.assert_allclose(tree[:, path], chain, rtol=1e-5, atol=1e-6)


def test_batch_rows_are_independent():
  query, cache, rows, mask = make_arrays(7)
  lengths = [2, 9, 0]
  want = run(query, cache, rows, lengths, pack(mask))
  query[1], cache[:, 1], rows[1] = np.nan, np.nan, np.nan
  got = run(query, cache, rows, lengths, pack(mask))
  np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
  assert np.isnan(got[1]).all()


def test_bfloat16_stays_within_its_rounding():
  arrays = make_arrays(8)
  query, cache, rows = (jnp.asarray(a, jnp.bfloat16) for a in arrays[:3])
  got = run(query, cache, rows, [2, S, 0], pack(arrays[3]))
  assert got.dtype == jnp.bfloat16
  want = expected(
    *(np.asarray(a, np.float32) for a in (query, cache, rows)),
    [2, S, 0],
    arrays[3],
  )
  # Weights and result are each rounded once, to half of 2^-8 of values <= 4.
  np.testing.assert_allclose(
    got.astype(np.float32), want, rtol=2**-8, atol=2**-7
  )


@pytest.mark.parametrize(
  'name,change',
  [
    ('query', dict(query=np.zeros((B, N, C), np.float32))),
    ('query', dict(query=np.zeros((B, N, H, C), np.int32))),
    ('cache', dict(cache=np.zeros((L, B, S, C + 1), np.float32))),
    ('rows', dict(rows=np.zeros((B, N + 1, C), np.float32))),
    ('lengths', dict(lengths=np.zeros((B,), np.float32))),
    ('layer', dict(layer=L)),
    ('layer', dict(layer=-1)),
    ('value_dim', dict(value_dim=0)),
    ('value_dim', dict(value_dim=C + 1)),
    ('scale', dict(scale=float('nan'))),
    ('ancestors', dict(ancestors=np.zeros((B, N, 2), np.uint32))),
    ('ancestors', dict(ancestors=np.zeros((B, N, 1), np.int32))),
    ("implementation.*'reference'", dict(implementation='flash')),
  ],
)
def test_invalid_arguments_name_the_argument(name, change):
  query, cache, rows, _ = make_arrays()
  arguments = dict(
    query=query,
    cache=cache,
    rows=rows,
    lengths=np.zeros((B,), np.int32),
    layer=0,
    value_dim=R,
    scale=SCALE,
    ancestors=None,
  )
  with pytest.raises(ValueError, match=f'^{name}'):
    api.verify_attention(**(arguments | change))
