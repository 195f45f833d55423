"""The oracle: proposes what the target is known to say."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kdtree_jax.drafters.base import StubDrafter, TargetHead
from kdtree_jax.registry import register


@register('drafter', 'oracle')
class OracleDrafter(StubDrafter):
  """Puts nearly all probability on the golden continuation.

  It isolates the engine from a drafter's quality: every round accepts all
  that it proposes, which no real drafter does. Where the continuation is not
  known it is uniform.
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
    return 20.0 * jax.nn.one_hot(golden, self.vocab_size, dtype=jnp.float32)
