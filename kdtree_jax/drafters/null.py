"""Proposes nothing: a verify of N rows of which only the root is real."""

from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.drafters.base import StubDrafter, TargetHead
from kdtree_jax.registry import register


@register('drafter', 'null')
class NullDrafter(StubDrafter):
  """Bars every token, so that each tree is its root and padding.

  Autoregressive decoding at the shape and the price of a verify: an audit
  measures by it what the shape alone does to the rounding.
  """

  def draft(
    self,
    params: Any,
    state: Any,
    tokens: jax.Array,
    length: jax.Array,
    head: TargetHead,
  ) -> jax.Array:
    shape = (tokens.shape[0], self.block_size - 1, self.vocab_size)
    return jnp.full(shape, -jnp.inf, jnp.float32)
