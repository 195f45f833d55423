"""A stub that is right with a set probability."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.keys import Purpose, key_for
from kdtree_jax.registry import register


@register('drafter', 'acceptance_rate')
@dataclasses.dataclass(frozen=True)
class AcceptanceRateDrafter(StubDrafter):
  """The oracle's token with probability `acceptance_rate` at each position.

  Otherwise it proposes another token and gives the right one no probability at
  all, so that no tree of any budget holds it. Whether it is right depends on
  the position alone, and a position decides the walk of one round only. So
  rounds are independent: with D positions a round accepts the sum of p^k, k =
  1..D, on average. It shows how an engine's speed follows from a drafter's
  quality.

  Attributes:
    acceptance_rate: p, 0..1.
  """

  acceptance_rate: float = 0.8
  needs_golden: ClassVar[bool] = True

  def propose(
    self,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    golden: Int32[Array, 'B D'],
  ) -> Float32[Array, 'B D V']:
    key = key_for(Purpose.HITS)

    def is_right(position):
      sample = jax.random.uniform(jax.random.fold_in(key, position))
      return sample < self.acceptance_rate

    hit = jax.vmap(jax.vmap(is_right))(self._positions(length))
    right = jax.nn.one_hot(golden, self.vocab_size, dtype=jnp.bool_)
    # Where the golden token is unknown, the logits are uniform.
    other = jnp.where(golden < 0, -1, (golden + 1) % self.vocab_size)
    top = jnp.where(hit, golden, other)
    logits = 20.0 * jax.nn.one_hot(top, self.vocab_size, dtype=jnp.float32)
    return jnp.where(right & ~hit[:, :, None], -jnp.inf, logits)
