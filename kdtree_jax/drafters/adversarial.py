"""A stub that is always wrong, so that no draft token is ever accepted."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.registry import register


@register('drafter', 'adversarial')
class AdversarialDrafter(StubDrafter):
  """Random distributions that give the golden token no probability at all.

  It is the worst possible drafter: every round commits one token, the target's
  own, at the full cost of a verify. It tests that rejected branches leave no
  trace.
  """

  needs_golden: ClassVar[bool] = True

  def propose(
    self,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    golden: Int32[Array, 'B D'],
  ) -> Float32[Array, 'B D V']:
    right = jax.nn.one_hot(golden, self.vocab_size, dtype=jnp.bool_)
    return jnp.where(right, -jnp.inf, self.noise(length))
