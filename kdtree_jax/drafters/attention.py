"""Attention from blocks to a shared context and to themselves.

Left to itself, the gradient would keep every layer's float32 weights, and
would multiply in float32 wherever the forward has float32 results.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def block_attention(
  queries: jax.Array,
  context: tuple[jax.Array, jax.Array],
  block: tuple[jax.Array, jax.Array],
  visible: tuple[jax.Array, jax.Array],
  scale: float,
) -> jax.Array:
  """One softmax over what a slot sees of the context and of its block.

  Args:
    queries: `[B, A, W, K, G, d]`, A blocks of W slots; G heads share a key.
    context: keys and values, `[B, S, K, d]` each, of all A blocks. What is not
      finite in a row reaches the slots that see it and no others.
    block: keys and values, `[B, A, W, K, d]` each, likewise.
    visible: bool, `[B, A, W or 1, S]` and `[W, W]`; every slot sees something.
    scale: of the scores.

  Returns:
    `[B, A, W, K, G, d]` in the queries' dtype. Scores and softmax are float32.
  """
  return _forward(queries, context, block, visible, scale)[0]


def _forward(queries, context, block, visible, scale):
  given = context, block
  context, block = _tainted(context), _tainted(block)
  scores = _scores(queries, context[0], block[0], visible, scale)
  highest = jnp.maximum(*(s.max(axis=-1, keepdims=True) for s in scores))
  weights = [jnp.exp(s - highest) for s in scores]
  total = sum(w.sum(axis=-1, keepdims=True) for w in weights)
  out = _product(
    'bkgaws,bskd->bawkgd', weights[0].astype(queries.dtype), context[1]
  )
  out = out + _product(
    'bkgawv,bavkd->bawkgd', weights[1].astype(queries.dtype), block[1]
  )
  out = (out / _slots_first(total)).astype(queries.dtype)
  saved = (queries, *given, visible, out, highest + jnp.log(total))
  return out, saved


def _backward(scale, saved, gradient):
  """As in FlashAttention (arXiv:2205.14135, appendix B.2): scores anew."""
  queries, context, block, visible, out, log_total = saved
  dtype = queries.dtype
  context, block = _tainted(context), _tainted(block)
  probs = [
    jnp.exp(s - log_total)
    for s in _scores(queries, context[0], block[0], visible, scale)
  ]
  d_probs = (
    _product('bawkgd,bskd->bkgaws', gradient, context[1]),
    _product('bawkgd,bavkd->bkgawv', gradient, block[1]),
  )
  inner = jnp.sum(
    gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1
  )
  inner = jnp.transpose(inner, (0, 3, 4, 1, 2))[..., None]
  d_context, d_block = (
    (p * (d - inner) * scale).astype(dtype)
    for p, d in zip(probs, d_probs, strict=True)
  )
  of_context, of_block = (p.astype(dtype) for p in probs)
  keys, own_keys = _finite(context[0]), _finite(block[0])
  d_queries = _product('bkgaws,bskd->bawkgd', d_context, keys)
  d_queries = d_queries + _product('bkgawv,bavkd->bawkgd', d_block, own_keys)
  gathered = [
    _product(spec, x, y).astype(dtype)
    for spec, x, y in (
      ('bkgaws,bawkgd->bskd', d_context, queries),
      ('bkgaws,bawkgd->bskd', of_context, gradient),
      ('bkgawv,bawkgd->bavkd', d_block, queries),
      ('bkgawv,bawkgd->bavkd', of_block, gradient),
    )
  ]
  return (
    d_queries.astype(dtype),
    tuple(gathered[:2]),
    tuple(gathered[2:]),
    (None, None),
  )


block_attention.defvjp(_forward, _backward)


def _scores(queries, keys, own_keys, visible, scale):
  """Scaled scores of context and block, -inf where a slot may not look."""
  context = _product('bawkgd,bskd->bkgaws', queries, keys) * scale
  block = _product('bawkgd,bavkd->bkgawv', queries, own_keys) * scale
  return (
    jnp.where(visible[0][:, None, None], context, -jnp.inf),
    jnp.where(lax.expand_dims(visible[1], range(4)), block, -jnp.inf),
  )


def _tainted(rows):
  """Keys and values of which a value that is not finite is in the key instead.

  A weight of 0 does not silence a NaN: so values are finite, and whoever sees
  such a row has a weight of NaN.
  """
  keys, values = rows
  sound = jnp.isfinite(values).all(axis=-1, keepdims=True)
  return jnp.where(sound, keys, jnp.nan), _finite(values)


def _finite(x: jax.Array) -> jax.Array:
  return jnp.where(jnp.isfinite(x), x, 0)


def _slots_first(x: jax.Array) -> jax.Array:
  """`[B, K, G, A, W, 1]` -> `[B, A, W, K, G, 1]`."""
  return jnp.transpose(x, (0, 3, 4, 1, 2, 5))


def _product(spec, x, y):
  return jnp.einsum(
    spec,
    x,
    y,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
