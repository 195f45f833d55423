"""Proposes that the last token goes on for ever."""

from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.drafters.base import StubDrafter, TargetHead
from kdtree_jax.registry import register


@register('drafter', 'repeat')
class RepeatDrafter(StubDrafter):
  """Puts most probability on the root at every depth, ties elsewhere.

  Right only where the text repeats itself: it exercises verification and
  rollback, with trees whose scores are full of ties.
  """

  def draft(
    self,
    params: Any,
    state: Any,
    tokens: jax.Array,
    length: jax.Array,
    head: TargetHead,
  ) -> jax.Array:
    root = jnp.take_along_axis(tokens, length[:, None], axis=1)
    logits = 4.0 * jax.nn.one_hot(root, self.vocab_size, dtype=jnp.float32)
    shape = (logits.shape[0], self.block_size - 1, self.vocab_size)
    return jnp.broadcast_to(logits, shape)
