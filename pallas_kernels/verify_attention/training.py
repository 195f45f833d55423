"""Attention of a packed sequence with itself, with a gradient of its own.

The gradient that JAX derives would keep every layer's float32 scores, and would
multiply in float32 wherever the forward pass has float32 results.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _bits

_BLOCK = 256  # Queries that share one set of keys.


def why_not(
  query: jax.Array, cache: jax.Array, *others: jax.Array, **static: Any
) -> str | None:
  """Why it cannot take these arguments; None if it can."""
  del query, others, static
  if cache.shape[2]:
    return f'it takes an empty cache, not one of {cache.shape[2]} rows'
  return None


def verify_attention(
  query: jax.Array,
  cache: jax.Array,
  rows: jax.Array,
  lengths: jax.Array,
  *,
  layer: int,
  value_dim: int,
  scale: float,
  ancestors: jax.Array | None,
) -> jax.Array:
  """See `api.verify_attention`; the cache is empty, and rows are finite.

  No node sees a later one, in a tree as in a sequence: a block of queries
  meets the rows up to its own end, which spares almost half of the scores.
  """
  del cache, lengths, layer
  batch, n = query.shape[:2]
  if ancestors is None:
    causal = np.tril(np.ones((n, n), bool))
    visible = jnp.broadcast_to(causal, (batch, n, n))
  else:
    visible = _bits.unpack_bits(ancestors, n)
  parts = []
  for start in range(0, n, _BLOCK):
    end = min(start + _BLOCK, n)
    parts.append(
      _attend(
        query[:, start:end],
        rows[:, :end],
        visible[:, start:end, :end],
        value_dim,
        scale,
      )
    )
  return jnp.concatenate(parts, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(query, rows, visible, value_dim, scale):
  return _forward(query, rows, visible, value_dim, scale)[0]


def _forward(query, rows, visible, value_dim, scale):
  scores = _scores(query, rows, visible, scale)
  highest = jnp.max(scores, axis=3, keepdims=True)
  # For a node that sees nothing, -inf - (-inf) would be NaN.
  highest = jnp.where(highest == -jnp.inf, 0.0, highest)
  weights = jnp.exp(scores - highest)
  total = jnp.sum(weights, axis=3, keepdims=True)
  total = jnp.where(total == 0, 1.0, total)
  values = rows[:, :, :value_dim]
  out = _einsum('bnhx,bxr->bnhr', weights.astype(values.dtype), values)
  out = (out / total).astype(query.dtype)
  log_total = highest + jnp.log(total)
  return out, (query, rows, visible, out, log_total)


def _backward(value_dim, scale, saved, gradient):
  """Gradients as in FlashAttention: the scores are computed again.

  Source: arXiv:2205.14135, appendix B.2.
  """
  query, rows, visible, out, log_total = saved
  dtype, values = query.dtype, rows[:, :, :value_dim]
  weights = jnp.exp(_scores(query, rows, visible, scale) - log_total)
  d_weights = _einsum('bnhr,bxr->bnhx', gradient, values)
  inner = jnp.sum(
    gradient.astype(jnp.float32) * out.astype(jnp.float32),
    axis=3,
    keepdims=True,
  )
  d_scores = (weights * (d_weights - inner) * scale).astype(dtype)
  d_values = _einsum('bnhx,bnhr->bxr', weights.astype(dtype), gradient)
  d_query = _einsum('bnhx,bxc->bnhc', d_scores, rows)
  d_rows = _einsum('bnhx,bnhc->bxc', d_scores, query)
  rope = rows.shape[2] - value_dim
  d_rows = d_rows + jnp.pad(d_values, ((0, 0), (0, 0), (0, rope)))
  return d_query.astype(dtype), d_rows.astype(dtype), None


_attend.defvjp(_forward, _backward)


def _scores(query, rows, visible, scale):
  """Scaled float32 scores `[B, N, H, X]`, -inf where a row is not visible."""
  scores = _einsum('bnhc,bxc->bnhx', query, rows) * scale
  return jnp.where(visible[:, :, None, :], scores, -jnp.inf)


def _einsum(spec, x, y):
  return jnp.einsum(
    spec,
    x,
    y,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
