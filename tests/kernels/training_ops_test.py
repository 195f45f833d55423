"""The implementations for training against the references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_mlp.api import expert_mlp
from pallas_kernels.quantized import QuantizedArray
from pallas_kernels.verify_attention import training
from pallas_kernels.verify_attention.api import verify_attention


def normal(rng, *shape):
  return jnp.asarray(rng.normal(size=shape).astype(np.float32))


def ancestors(rng, batch, n):
  """Random sets of earlier nodes; node 3 sees nothing."""
  mask = np.tril(rng.random((batch, n, n)) < 0.5)
  mask[:, 3] = False
  padded = np.pad(mask, ((0, 0), (0, 0), (0, -n % 32)))
  words = padded.reshape(batch, n, -1, 32).astype(np.uint32)
  return jnp.asarray(
    (words << np.arange(32, dtype=np.uint32)).sum(-1, np.uint32)
  )


@pytest.mark.parametrize('masked', (True, False))
def test_attention_and_its_gradient(masked, monkeypatch):
  monkeypatch.setattr(training, '_BLOCK', 16)
  rng = np.random.default_rng(0)
  batch, n, heads, width = 2, 37, 3, 11
  query, rows = (
    normal(rng, batch, n, heads, width),
    normal(rng, batch, n, width),
  )
  bits = ancestors(rng, batch, n) if masked else None
  weights = normal(rng, batch, n, heads, 7)

  def loss(query, rows, implementation):
    out = verify_attention(
      query,
      jnp.zeros((1, batch, 0, width)),
      rows,
      jnp.zeros((batch,), jnp.int32),
      layer=0,
      value_dim=7,
      scale=0.4,
      ancestors=bits,
      implementation=implementation,
    )
    return jnp.sum(out * weights), out

  compute = jax.jit(
    jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2
  )
  (_, ours), gradients = compute(query, rows, 'training')
  (_, wanted), wanted_gradients = compute(query, rows, 'reference')
  np.testing.assert_allclose(ours, wanted, atol=1e-5)
  if masked:
    assert not ours[:, 3].any()
  for a, b in zip(gradients, wanted_gradients, strict=True):
    np.testing.assert_allclose(a, jnp.nan_to_num(b), atol=2e-5)


def test_experts_and_their_gradient():
  rng = np.random.default_rng(1)
  x, down = normal(rng, 21, 6), normal(rng, 5, 6, 4)
  gate_up = normal(rng, 5, 8, 6)
  # Padding is expert 5, one row has an expert twice.
  ids = rng.integers(0, 6, (21, 3)).astype(np.int32)
  ids[4] = (2, 2, 5)
  weights, mix = normal(rng, 21, 3), normal(rng, 21, 6)

  def loss(x, gate_up, down, weights, implementation):
    y = expert_mlp(
      x, gate_up, down, ids, weights, implementation=implementation
    )
    return jnp.sum(y * mix), y

  compute = jax.jit(
    jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), static_argnums=4
  )
  arguments = (x, gate_up, down, weights)
  (_, ours), gradients = compute(*arguments, 'training')
  (_, wanted), wanted_gradients = compute(*arguments, 'reference')
  np.testing.assert_allclose(ours, wanted, atol=1e-4)
  for a, b in zip(gradients, wanted_gradients, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)
  # What an expert makes of rows that did not choose it does not matter.
  chosen = (ids == 0).any(axis=1)
  broken = gate_up.at[0].set(1e30)
  y = expert_mlp(x, broken, down, ids, weights, implementation='training')
  np.testing.assert_allclose(y[~chosen], ours[~chosen], atol=1e-4)
  assert not jnp.isfinite(y[chosen]).all()


def test_quantised_experts_are_refused():
  stack = QuantizedArray(
    jnp.zeros((2, 128, 128), jnp.float8_e4m3fn),
    jnp.ones((2, 1, 1)),
    'fp8',
    (128, 128),
  )
  with pytest.raises(ValueError, match='no quantised weights'):
    expert_mlp(
      jnp.zeros((1, 128)),
      jnp.zeros((2, 256, 128)),
      stack,
      jnp.zeros((1, 1), jnp.int32),
      jnp.ones((1, 1)),
      implementation='training',
    )
