"""Always wrong: every round must fall back on the target's own token."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kdtree_jax.drafters.base import StubDrafter, TargetHead
from kdtree_jax.registry import register


@register('drafter', 'adversarial')
class AdversarialDrafter(StubDrafter):
  """Random distributions that give the golden token no probability at all.

  The worst drafter there can be: one token a round, at the full price of a
  verify. What it tests is that rejected branches leave no trace.
  """

  needs_golden: ClassVar[bool] = True

  def draft(
    self,
    params: Any,
    state: Any,
    tokens: jax.Array,
    length: jax.Array,
    head: TargetHead,
  ) -> jax.Array:
    golden = self.golden_tokens(params, length)
    right = jax.nn.one_hot(golden, self.vocab_size, dtype=jnp.bool_)
    return jnp.where(right, -jnp.inf, self.noise(length))
