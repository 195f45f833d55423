"""Attention from blocks to a shared context and to themselves.

It has a gradient of its own. The one that JAX derives would keep the float32
attention weights of every layer, and would multiply in float32 wherever the
forward's results are float32.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kdtree_jax.config import DrafterConfig


class View(flax.struct.PyTreeNode):
  """The rows of a shared context that each of A blocks sees in training.

  The context may hold several documents, each from position 0.

  Attributes:
    start: the position of every block's root.
    positions: positions of the context's rows.
    seen: the rows before the root, of its own document.
  """

  start: Int32[Array, 'B A']
  positions: Int32[Array, 'B S']
  seen: Bool[Array, 'B A S']


def visible_rows(
  config: DrafterConfig, layer: int, view: View, width: int
) -> tuple[Bool[Array, 'B A #slots S'], Bool[Array, 'slots slots']]:
  """The rows of the context and the slots of its block that each slot sees.

  That is all rows of its view and, unless the layer is causal, all slots.
  """
  slots = np.arange(width, dtype=np.int32)
  block = np.ones((width, width), bool)
  if config.is_causal(layer):
    block = slots[:, None] >= slots[None, :]
  context = view.seen[:, :, None]
  window = config.window(layer)
  if window is not None:
    # Measured from the slot itself or from the root, which has slot 0.
    origin = slots * (not config.window_from_root)
    block &= origin[:, None] - slots[None, :] < window
    distance = view.start[:, :, None] - view.positions[:, None]
    distance = distance[:, :, None] + origin[None, None, :, None]
    context &= distance < window
  return context, jnp.asarray(block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def block_attention(
  queries: Float[Array, 'B A slots kv_heads group head_dim'],
  context: tuple[
    Float[Array, 'B S kv_heads head_dim'], Float[Array, 'B S kv_heads head_dim']
  ],
  block: tuple[
    Float[Array, 'B A slots kv_heads head_dim'],
    Float[Array, 'B A slots kv_heads head_dim'],
  ],
  visible: tuple[Bool[Array, 'B A #slots S'], Bool[Array, 'slots slots']],
  scale: float,
) -> Float[Array, 'B A slots kv_heads group head_dim']:
  """One softmax over what a slot sees of the context and of its block.

  Args:
    queries: the queries of A blocks in each sequence.
    context: keys and values, shared by all A blocks. A value that is not
      finite reaches the slots that see its row and no others.
    block: keys and values of the blocks themselves, under the same rule.
    visible: which rows of the context, and which slots of its block, each slot
      sees; every slot sees something.
    scale: factor on the scores.

  Returns:
    The attended values in the queries' dtype. Scores and softmax are float32.
  """
  return _forward(queries, context, block, visible, scale)[0]


def _forward(queries, context, block, visible, scale):
  given = context, block
  context, block = _nan_to_keys(context), _nan_to_keys(block)
  scores = _scores(queries, context[0], block[0], visible, scale)
  highest = jnp.maximum(*(s.max(axis=-1, keepdims=True) for s in scores))
  weights = [jnp.exp(s - highest) for s in scores]
  total = weights[0].sum(axis=-1, keepdims=True)
  total = total + weights[1].sum(axis=-1, keepdims=True)
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
  """The gradient of FlashAttention, from recomputed scores.

  Source: arXiv:2205.14135, appendix B.2.
  """
  queries, context, block, visible, out, log_total = saved
  dtype = queries.dtype
  context, block = _nan_to_keys(context), _nan_to_keys(block)
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
  p_context, p_block = (p.astype(dtype) for p in probs)
  keys, own_keys = _finite(context[0]), _finite(block[0])
  d_queries = _product('bkgaws,bskd->bawkgd', d_context, keys)
  d_queries = d_queries + _product('bkgawv,bavkd->bawkgd', d_block, own_keys)
  gathered = [
    _product(spec, x, y).astype(dtype)
    for spec, x, y in (
      ('bkgaws,bawkgd->bskd', d_context, queries),
      ('bkgaws,bawkgd->bskd', p_context, gradient),
      ('bkgawv,bawkgd->bavkd', d_block, queries),
      ('bkgawv,bawkgd->bavkd', p_block, gradient),
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
  """Scaled scores of context and block, -inf where a slot sees nothing."""
  context = _product('bawkgd,bskd->bkgaws', queries, keys) * scale
  block = _product('bawkgd,bavkd->bkgawv', queries, own_keys) * scale
  return (
    jnp.where(visible[0][:, None, None], context, -jnp.inf),
    jnp.where(lax.expand_dims(visible[1], range(4)), block, -jnp.inf),
  )


def _nan_to_keys(rows):
  """Finite values, and NaN keys where a value was not finite.

  A masked row has weight 0, but 0 times NaN is NaN. With the NaN in its key,
  the row's weight is NaN for the slots that see it, and 0 for all others.
  """
  keys, values = rows
  is_finite = jnp.isfinite(values).all(axis=-1, keepdims=True)
  return jnp.where(is_finite, keys, jnp.nan), _finite(values)


def _finite(x: jax.Array) -> jax.Array:
  return jnp.where(jnp.isfinite(x), x, 0)


def _slots_first(x: jax.Array) -> jax.Array:
  """Sums of weights, whose axes are `bkgaw1`, in the order `bawkg1`."""
  return jnp.transpose(x, (0, 3, 4, 1, 2, 5))


def _product(spec, x, y):
  return jnp.einsum(
    spec,
    x,
    y,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
