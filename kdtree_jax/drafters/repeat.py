"""A stub that proposes to repeat the last token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.registry import register


@register('drafter', 'repeat')
class RepeatDrafter(StubDrafter):
  """Most probability on the root's token at every depth, ties elsewhere.

  It is right only where the text repeats itself. It exercises verification
  and rollback, with trees in which many scores are equal.
  """

  def propose(
    self,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    golden: Int32[Array, 'B D'],
  ) -> Float32[Array, 'B D V']:
    root = jnp.take_along_axis(tokens, length[:, None], axis=1)
    logits = 4.0 * jax.nn.one_hot(root, self.vocab_size, dtype=jnp.float32)
    shape = (logits.shape[0], self.block_size - 1, self.vocab_size)
    return jnp.broadcast_to(logits, shape)
