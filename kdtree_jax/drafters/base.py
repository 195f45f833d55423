"""What the decoding loop asks of a drafter."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from kdtree_jax.config import ModelConfig
from kdtree_jax.keys import Purpose, key_for


class TargetHead(NamedTuple):
  """The target's own embedding and head, which a DFlash drafter shares.

  Attributes:
    embed: `[...]` int32 -> `[..., hidden_size]`.
    unembed: `[..., hidden_size]` -> `[..., V]` float32.
    implementation: of the kernels, the target's and so the drafter's; None
      takes the best.
  """

  embed: Callable[[jax.Array], jax.Array]
  unembed: Callable[[jax.Array], jax.Array]
  implementation: str | None = None


class Drafter(Protocol):
  """A frozen, hashable object: a static argument of the compiled programs.

  All arrays live in `params` and `state`. `length [B]` counts the committed
  tokens; the root, `tokens[b, length[b]]`, is not among them.

  Attributes:
    block_size: 1 + the positions that one draft proposes.
    tap_layers: target layers whose outputs `commit` receives as features.
    needs_golden: `params` must be `{'golden': [B, T] int32}`, the sequence
      that greedy decoding would produce, -1 where it is unknown.
    max_positions: no block may reach beyond them; None for no limit.
    target_sizes: what the target's config must say, by its field names:
      `vocab_size` and, if it looks at the target, `hidden_size` and
      `num_hidden_layers`.
  """

  block_size: int
  tap_layers: tuple[int, ...]
  needs_golden: ClassVar[bool]
  max_positions: int | None
  target_sizes: dict[str, int]

  @classmethod
  def create(cls, target: ModelConfig, block_size: int) -> 'Drafter':
    """A drafter for a target, at sizes of its own choosing."""
    ...

  def init_params(self, key: jax.Array, dtype: Any) -> Any:
    """Fresh parameters; an empty dict if there are none."""
    ...

  def init_state(self, batch: int, rows: int, dtype: Any) -> Any:
    """State for sequences of up to `rows` tokens, the write slack included."""
    ...

  def draft(
    self,
    params: Any,
    state: Any,
    tokens: jax.Array,
    length: jax.Array,
    head: TargetHead,
  ) -> jax.Array:
    """`[B, block_size - 1, V]` logits for the positions after the root.

    Args:
      params: of the drafter.
      state: what `commit` left.
      tokens: `[B, T]` int32, the sequences up to and including the root.
      length: `[B]` int32.
      head: the target's embedding and head, and which kernels to use.
    """
    ...

  def commit(
    self, params: Any, state: Any, features: jax.Array, start: jax.Array
  ) -> Any:
    """Appends the context of committed tokens.

    Args:
      params: of the drafter.
      state: to extend.
      features: `[B, W, F]`, the target's tapped layers for the positions
        `start .. start + W - 1`. Those that are not committed are garbage and
        will be overwritten before `length` reaches them.
      start: `[B]` int32, the committed length before.
    """
    ...


@dataclasses.dataclass(frozen=True)
class StubDrafter:
  """A drafter without parameters, state or taps: it looks at tokens only."""

  vocab_size: int
  block_size: int
  tap_layers: ClassVar[tuple[int, ...]] = ()
  needs_golden: ClassVar[bool] = False
  max_positions: ClassVar[int | None] = None

  @property
  def target_sizes(self) -> dict[str, int]:
    return {'vocab_size': self.vocab_size}

  @classmethod
  def create(cls, target: ModelConfig, block_size: int) -> 'StubDrafter':
    return cls(target.vocab_size, block_size)

  def init_params(self, key: jax.Array, dtype: Any) -> Any:
    return {}

  def init_state(self, batch: int, rows: int, dtype: Any) -> Any:
    return ()

  def commit(
    self, params: Any, state: Any, features: jax.Array, start: jax.Array
  ) -> Any:
    return state

  def golden_tokens(self, params: Any, length: jax.Array) -> jax.Array:
    """`[B, block_size - 1]` golden tokens after the root, -1 if unknown."""
    golden = params['golden']
    ahead = jnp.arange(1, self.block_size, dtype=jnp.int32)
    positions = length[:, None] + ahead[None, :]
    known = positions < golden.shape[1]
    tokens = jnp.take_along_axis(golden, jnp.where(known, positions, 0), axis=1)
    return jnp.where(known, tokens, -1)

  def noise(self, length: jax.Array) -> jax.Array:
    """`[B, block_size - 1, V]` normal logits, a function of position alone."""
    ahead = jnp.arange(1, self.block_size, dtype=jnp.int32)
    key = key_for(Purpose.DRAFTER_NOISE)

    def at(position):
      keyed = jax.random.fold_in(key, position)
      return jax.random.normal(keyed, (self.vocab_size,))

    return jax.vmap(jax.vmap(at))(length[:, None] + ahead[None, :])
