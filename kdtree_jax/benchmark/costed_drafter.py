"""A stub's proposals at the cost of a real drafter."""

import dataclasses
from typing import ClassVar

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PyTree

from kdtree_jax.drafters.base import Drafter, StubDrafter, TargetHead

# Real logits, added at this scale, keep XLA from removing the drafter's work
# and order what the stub leaves tied; they change no probability in float32.
WEIGHT = 1e-20


@dataclasses.dataclass(frozen=True)
class CostedDrafter:
  """Runs `real`, then proposes what `stub` proposes.

  Parameters are `{'golden': ..., 'real': ...}`. An end-to-end run with it costs
  as much as with a real drafter, but its acceptance is set.
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

  def init_state(self, batch: int, rows: int, dtype: DTypeLike) -> PyTree:
    """The real drafter's state."""
    return self.real.init_state(batch, rows, dtype)

  def draft(
    self,
    params: PyTree,
    state: PyTree,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    head: TargetHead,
  ) -> Float[Array, 'B D V']:
    """The stub's logits."""
    real = self.real.draft(params['real'], state, tokens, length, head)
    stub = self.stub.draft(params, (), tokens, length, head)
    return stub + WEIGHT * real

  def commit(
    self,
    params: PyTree,
    state: PyTree,
    features: Float[Array, 'B W F'],
    start: Int32[Array, ' B'],
  ) -> PyTree:
    """The real drafter's state with the context appended."""
    return self.real.commit(params['real'], state, features, start)
