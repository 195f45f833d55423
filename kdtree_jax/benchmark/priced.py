"""What a stub proposes, at the price of a drafter that computes."""

import dataclasses
from typing import Any, ClassVar

import jax

from kdtree_jax.drafters.base import Drafter, StubDrafter, TargetHead

# Added at this scale, real logits keep the drafter's work from being removed
# and order what the stub leaves tied; they move no probability in float32.
WEIGHT = 1e-20


@dataclasses.dataclass(frozen=True)
class PricedDrafter:
  """Drafts with `real`, then proposes what `stub` says.

  Parameters are `{'golden': ..., 'real': ...}`. So an end-to-end run pays for
  a drafter of real size whose acceptance is set.
  """

  real: Drafter
  stub: StubDrafter
  needs_golden: ClassVar[bool] = False

  @property
  def block_size(self) -> int:
    return self.real.block_size

  @property
  def tap_layers(self) -> tuple[int, ...]:
    return self.real.tap_layers

  @property
  def max_positions(self) -> int | None:
    return self.real.max_positions

  @property
  def target_sizes(self) -> dict[str, int]:
    return self.real.target_sizes

  def init_state(self, batch: int, rows: int, dtype: Any) -> Any:
    """That of the real drafter."""
    return self.real.init_state(batch, rows, dtype)

  def draft(
    self,
    params: Any,
    state: Any,
    tokens: jax.Array,
    length: jax.Array,
    head: TargetHead,
  ) -> jax.Array:
    """`[B, D, V]` logits of the stub."""
    real = self.real.draft(params['real'], state, tokens, length, head)
    told = self.stub.draft(params, (), tokens, length, head)
    return told + WEIGHT * real

  def commit(
    self, params: Any, state: Any, features: jax.Array, start: jax.Array
  ) -> Any:
    """That of the real drafter."""
    return self.real.commit(params['real'], state, features, start)
