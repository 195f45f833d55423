"""Noise: accepts about as often as chance does."""

from typing import Any

import jax

from kdtree_jax.drafters.base import StubDrafter, TargetHead
from kdtree_jax.registry import register


@register('drafter', 'random')
class RandomDrafter(StubDrafter):
  """Normal logits drawn from the position: bushy trees, the same each run."""

  def draft(
    self,
    params: Any,
    state: Any,
    tokens: jax.Array,
    length: jax.Array,
    head: TargetHead,
  ) -> jax.Array:
    return self.noise(length)
