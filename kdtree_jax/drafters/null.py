"""A stub that proposes nothing: of a verify's N rows only the root is real."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.registry import register


@register('drafter', 'null')
class NullDrafter(StubDrafter):
  """No probability for any token, so that a tree is its root and padding.

  This is autoregressive decoding at the shape and the cost of a verify. An
  audit uses it to measure how the shape alone changes the rounding.
  """

  def propose(
    self,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    golden: Int32[Array, 'B D'],
  ) -> Float32[Array, 'B D V']:
    shape = (tokens.shape[0], self.block_size - 1, self.vocab_size)
    return jnp.full(shape, -jnp.inf, jnp.float32)
