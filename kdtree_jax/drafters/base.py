"""The interface between the decoding loop and a drafter."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, PyTree

from kdtree_jax.config import ModelConfig
from kdtree_jax.keys import Purpose, key_for


class TargetHead(NamedTuple):
  """The target's own embedding and head, which a DFlash drafter shares.

  Attributes:
    embed: maps token ids to embeddings.
    unembed: maps normed hidden states to logits.
    implementation: the kernels that the target runs on, and so the drafter;
      None takes the best.
  """

  embed: Callable[[Int32[Array, '*batch']], Float[Array, '*batch M']]
  unembed: Callable[[Float[Array, '*batch M']], Float32[Array, '*batch V']]
  implementation: str | None = None


class Drafter(Protocol):
  """A frozen, hashable object: a static argument of the compiled programs.

  All arrays live in `params` and `state`. `length` counts the committed
  tokens; the root, `tokens[b, length[b]]`, is not among them.

  Attributes:
    needs_golden: `params` must be `{'golden': [B, T] int32}`, the sequence that
      greedy decoding would produce, -1 where it is unknown.
  """

  needs_golden: ClassVar[bool]

  @property
  def block_size(self) -> int:
    """1 + the positions that one draft proposes."""
    ...

  @property
  def tap_layers(self) -> tuple[int, ...]:
    """Target layers whose outputs `commit` receives as features."""
    ...

  @property
  def max_positions(self) -> int | None:
    """No block may reach beyond these positions; None for no limit."""
    ...

  @property
  def target_sizes(self) -> dict[str, int]:
    """Fields of the target's config and the values that they must have.

    `vocab_size` and, for a drafter that looks at the target, `hidden_size`
    and `num_hidden_layers`.
    """
    ...

  def init_state(self, batch: int, rows: int, dtype: DTypeLike) -> PyTree:
    """An empty state for sequences of up to `rows` tokens.

    `rows` includes the space for one write after the last token.
    """
    ...

  def draft(
    self,
    params: PyTree,
    state: PyTree,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    head: TargetHead,
  ) -> Float[Array, 'B D V']:
    """Logits for the positions after the root.

    Args:
      params: parameters of the drafter.
      state: what `commit` returned.
      tokens: the sequences up to and including the root.
      length: committed tokens.
      head: the target's embedding and head, and which kernels to use.
    """
    ...

  def commit(
    self,
    params: PyTree,
    state: PyTree,
    features: Float[Array, 'B W F'],
    start: Int32[Array, ' B'],
  ) -> PyTree:
    """The state with the context of committed tokens appended.

    Args:
      params: parameters of the drafter.
      state: the state to extend.
      features: the target's tapped layers for the positions `start ..
        start + W - 1`. Those that are not committed are garbage and are
        overwritten before `length` reaches them.
      start: the committed length before.
    """
    ...


class NamedDrafter(Drafter, Protocol):
  """A drafter class that is registered: it is made for a target by name."""

  @classmethod
  def create(cls, target: ModelConfig, block_size: int) -> 'NamedDrafter':
    """A drafter for a target, at sizes that the class chooses."""
    ...

  def init_params(self, key: jax.Array, dtype: DTypeLike) -> PyTree:
    """Fresh parameters; an empty dict if there are none."""
    ...


@dataclasses.dataclass(frozen=True)
class StubDrafter(abc.ABC):
  """A drafter without parameters, state or taps: it looks at tokens only."""

  vocab_size: int
  block_size: int
  needs_golden: ClassVar[bool] = False

  @property
  def tap_layers(self) -> tuple[int, ...]:
    return ()

  @property
  def max_positions(self) -> int | None:
    return None

  @property
  def target_sizes(self) -> dict[str, int]:
    return {'vocab_size': self.vocab_size}

  @classmethod
  def create(cls, target: ModelConfig, block_size: int) -> 'StubDrafter':
    return cls(target.vocab_size, block_size)

  def init_params(self, key: jax.Array, dtype: DTypeLike) -> PyTree:
    return {}

  def init_state(self, batch: int, rows: int, dtype: DTypeLike) -> PyTree:
    return ()

  def commit(
    self,
    params: PyTree,
    state: PyTree,
    features: Float[Array, 'B W F'],
    start: Int32[Array, ' B'],
  ) -> PyTree:
    return state

  def draft(
    self,
    params: PyTree,
    state: PyTree,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    head: TargetHead,
  ) -> Float32[Array, 'B D V']:
    positions = self._positions(length)
    if not self.needs_golden:
      return self.propose(tokens, length, jnp.full_like(positions, -1))
    golden = params['golden']
    known = positions < golden.shape[1]
    found = jnp.take_along_axis(golden, jnp.where(known, positions, 0), axis=1)
    return self.propose(tokens, length, jnp.where(known, found, -1))

  @abc.abstractmethod
  def propose(
    self,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    golden: Int32[Array, 'B D'],
  ) -> Float32[Array, 'B D V']:
    """Logits for the positions after the root.

    Args:
      tokens: the sequences up to and including the root, `tokens[b, length]`.
      length: committed tokens.
      golden: the right tokens after the root, -1 where they are unknown: all
        of them, for a stub that does not set `needs_golden`.
    """

  def _positions(self, length: Int32[Array, ' B']) -> Int32[Array, 'B D']:
    """The positions that a draft proposes tokens for."""
    ahead = jnp.arange(1, self.block_size, dtype=jnp.int32)
    return length[:, None] + ahead[None, :]

  def noise(self, length: Int32[Array, ' B']) -> Float32[Array, 'B D V']:
    """Normal logits, a function of the position alone."""
    key = key_for(Purpose.DRAFTER_NOISE)

    def at(position):
      keyed = jax.random.fold_in(key, position)
      return jax.random.normal(keyed, (self.vocab_size,))

    return jax.vmap(jax.vmap(at))(self._positions(length))
