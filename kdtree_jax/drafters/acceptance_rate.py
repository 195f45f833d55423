"""A drafter that is right as often as it is told to be."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kdtree_jax.drafters.base import StubDrafter, TargetHead
from kdtree_jax.keys import Purpose, key_for
from kdtree_jax.registry import register


@register('drafter', 'acceptance_rate')
@dataclasses.dataclass(frozen=True)
class AcceptanceRateDrafter(StubDrafter):
  """The oracle's token with probability `acceptance_rate` at each position.

  Otherwise another token, and the right one gets no probability at all, so
  that no tree of any budget holds it. Whether a position is hit depends on the
  position alone, and each one's draw decides a single walk, so that rounds are
  independent: with D positions a round accepts the sum of p^k, k = 1..D, on
  average. It shows what an engine makes of a drafter's quality.

  Attributes:
    acceptance_rate: p, 0..1.
  """

  acceptance_rate: float = 0.8
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
    ahead = jnp.arange(1, self.block_size, dtype=jnp.int32)
    key = key_for(Purpose.HITS)

    def is_hit(position):
      draw = jax.random.uniform(jax.random.fold_in(key, position))
      return draw < self.acceptance_rate

    hit = jax.vmap(jax.vmap(is_hit))(length[:, None] + ahead[None, :])
    right = jax.nn.one_hot(golden, self.vocab_size, dtype=jnp.bool_)
    # Where nothing is known there is no right token, and no other one.
    other = jnp.where(golden < 0, -1, (golden + 1) % self.vocab_size)
    top = jnp.where(hit, golden, other)
    logits = 20.0 * jax.nn.one_hot(top, self.vocab_size, dtype=jnp.float32)
    return jnp.where(right & ~hit[:, :, None], -jnp.inf, logits)
