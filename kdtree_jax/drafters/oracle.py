"""The oracle: proposes the tokens that the target is known to choose."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.registry import register


@register('drafter', 'oracle')
class OracleDrafter(StubDrafter):
  """Puts nearly all probability on the golden continuation.

  It isolates the engine from a drafter's quality: every round accepts all
  that it proposes, which no real drafter achieves. Where the continuation is
  unknown, its logits are uniform.
  """

  needs_golden: ClassVar[bool] = True

  def propose(
    self,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    golden: Int32[Array, 'B D'],
  ) -> Float32[Array, 'B D V']:
    return 20.0 * jax.nn.one_hot(golden, self.vocab_size, dtype=jnp.float32)
