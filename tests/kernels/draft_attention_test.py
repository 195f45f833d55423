"""draft_attention against float64 NumPy, one slot at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.draft_attention import api, cases

L, S, K, G, D, LAYER = 2, 19, 2, 3, 8, cases.LAYER
SCALE = 0.37
MASKS = (
  {},
  {'causal': True},
  {'causal': True, 'window': 5},
  {'window': 5, 'window_from_root': True},
  {'window': 1},
)

attend = jax.jit(
  api.draft_attention,
  static_argnames=(
    *('layer', 'scale', 'causal', 'window', 'window_from_root'),
    'implementation',
  ),
)


@pytest.fixture(autouse=True, scope='module')
def strict():
  with (
    jax.numpy_dtype_promotion('strict'),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


def make_arrays(slots, lengths, seed=0):
  """Float64 inputs; other layers and rows from the lengths on are NaN."""
  rng = np.random.default_rng(seed)
  return cases.make_arrays(slots, lengths, (L, S, K, G, D), rng)


def expected(
  query,
  context,
  rows,
  lengths,
  scale=SCALE,
  causal=False,
  window=None,
  window_from_root=False,
):
  """Softmax over exactly the visible rows, in float64."""
  query, context, rows = (
    np.asarray(a, np.float64) for a in (query, context, rows)
  )
  batch, slots, heads, group, dim = query.shape
  out = np.zeros(query.shape)
  for b, w, k in np.ndindex(batch, slots, heads):
    length = int(lengths[b])
    every = np.concatenate([context[LAYER, b, :length], rows[b]])
    seen = np.ones(len(every), bool)
    if causal:
      seen[length + w + 1 :] = False
    if window is not None:
      at = length + (0 if window_from_root else w)
      seen &= at - np.arange(len(every)) < window
    every = every[seen].reshape(-1, 2, heads, dim)[:, :, k]
    scores = scale * query[b, w, k] @ every[:, 0].T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out[b, w, k] = weights @ every[:, 1]
  return out


def run(arrays, **options):
  *values, lengths = arrays
  values = [np.asarray(a, np.float32) for a in values]
  options = {'layer': LAYER, 'scale': SCALE} | options
  return np.asarray(attend(*values, lengths, **options))


@pytest.mark.parametrize('masks', MASKS, ids=str)
@pytest.mark.parametrize('slots', (1, 7, 16))
def test_equals_float64_with_nan_behind_the_length(slots, masks):
  arrays = make_arrays(slots, [0, 1, 7, S - 1, S])
  np.testing.assert_allclose(
    run(arrays, **masks), expected(*arrays, **masks), rtol=3e-5, atol=3e-6
  )


def test_a_row_does_not_depend_on_its_neighbours():
  arrays = make_arrays(7, [3, S])
  out = run(arrays)
  query, context, rows, lengths = (a.copy() for a in arrays)
  query[1] = context[:, 1] = rows[1] = np.nan
  changed = run((query, context, rows, lengths))
  np.testing.assert_array_equal(changed[0], out[0])
  assert np.isnan(changed[1]).all()


@pytest.mark.parametrize('value', (np.nan, np.inf))
@pytest.mark.parametrize('masks', MASKS, ids=str)
def test_what_is_not_finite_reaches_only_those_that_see_it(masks, value):
  """One value of a row: of its key or of its value, of one of two heads."""
  arrays = make_arrays(7, [3, 12])
  out = run(arrays, **masks)
  for place, column in ((1, 0), (2, 2 * K * D - 1)):  # context and block
    for at in (0, 6) if place == 2 else (2, 9):
      changed = [a.copy() for a in arrays]
      # Finite, it would change the weights of those that see it.
      seen_by = [a.copy() for a in arrays]
      for copy, x in ((changed, value), (seen_by, 50.0)):
        row = copy[1][LAYER, 1] if place == 1 else copy[2][1]
        row[at, column] = x
      got, finite = run(changed, **masks), run(seen_by, **masks)
      reached = finite != out
      assert reached.any() or 'window' in masks
      seen = reached.any(axis=-1)
      np.testing.assert_array_equal(got[~seen], out[~seen])
      if np.isnan(value):
        assert np.isnan(got[seen]).all()


def test_bfloat16_is_as_exact_as_its_weights():
  arrays = make_arrays(16, [0, 11])
  values = [jnp.asarray(a, jnp.bfloat16) for a in arrays[:3]]
  out = attend(*values, arrays[3], layer=LAYER, scale=SCALE)
  truth = expected(*(a.astype(jnp.float32) for a in values), arrays[3])
  assert out.dtype == jnp.bfloat16
  difference = np.asarray(out.astype(jnp.float32)) - truth
  assert np.linalg.norm(difference) < 0.01 * np.linalg.norm(truth)


@pytest.mark.parametrize(
  ('name', 'value'),
  (
    ('query', jnp.zeros((1, 7, K, G))),
    ('query', jnp.zeros((1, 0, K, G, D))),
    ('context', jnp.zeros((L, 1, S, 2 * K * D + 1))),
    ('context', jnp.zeros((L, 1, S, 2 * K * D), jnp.bfloat16)),
    ('rows', jnp.zeros((1, 6, 2 * K * D))),
    ('lengths', jnp.zeros((1,))),
    ('layer', L),
    ('window', 0),
    ('scale', float('nan')),
    ('implementation', 'mosaic_gpu'),
    ('implementation', 'training'),
  ),
)
def test_what_is_refused(name, value):
  arguments = {
    'query': jnp.zeros((1, 7, K, G, D)),
    'context': jnp.zeros((L, 1, S, 2 * K * D)),
    'rows': jnp.zeros((1, 7, 2 * K * D)),
    'lengths': jnp.zeros((1,), jnp.int32),
    'layer': 0,
    'scale': 1.0,
  }
  api.draft_attention(**arguments)
  with pytest.raises(ValueError, match=f'^{name}: '):
    api.draft_attention(**arguments | {name: value})
