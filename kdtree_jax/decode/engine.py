"""The static part of a decoding program: everything but arrays."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float, Float32, Int32, PyTree

import pallas_kernels
from kdtree_jax.config import DecodeConfig, ModelConfig
from kdtree_jax.drafters.base import Drafter, TargetHead
from kdtree_jax.errors import UserError
from kdtree_jax.model import Transformer

KERNELS = ('auto', *pallas_kernels.IMPLEMENTATIONS)

# {'target': ..., 'drafter': ..., 'costs': ...}; the last where rounds choose.
Params = dict[str, PyTree]


@dataclasses.dataclass(frozen=True)
class Engine:
  """A hashable description of how to decode; each compiles its own programs.

  Attributes:
    config: the target's.
    drafter: None for autoregressive decoding: the same round, an empty tree.
    decode: budgets and sizes.
  """

  config: ModelConfig
  drafter: Drafter | None
  decode: DecodeConfig

  def __post_init__(self):
    d = self.decode
    if self.drafter is None:
      if d.tree_budget or d.draft_depth:
        raise UserError(
          f'tree_budget={d.tree_budget} needs a drafter; without one it is 0'
        )
    elif d.draft_depth != self.drafter.block_size - 1:
      raise UserError(
        f'block_size={d.draft_depth + 1}, but the drafter drafts blocks of '
        f'{self.drafter.block_size}'
      )
    if d.kernels not in KERNELS:
      raise UserError(f'kernels={d.kernels} is none of {", ".join(KERNELS)}')
    if d.kernels == 'mosaic_gpu' and pallas_kernels.why_not_hopper():
      raise UserError(
        'kernels=mosaic_gpu needs a Hopper GPU; kernels=auto chooses kernels '
        'for this machine'
      )
    if d.capacity > self.config.max_position_embeddings:
      raise UserError(
        f'capacity={d.capacity} exceeds the max_position_embeddings='
        f'{self.config.max_position_embeddings} of the target'
      )

  @property
  def drafts(self) -> bool:
    """Whether a round calls the drafter."""
    return self.drafter is not None and self.decode.tree_budget > 0

  @property
  def outlives_drafter(self) -> bool:
    """Whether rows may grow beyond the drafter's last position."""
    if self.drafter is None or self.decode.tree_budget == 0:
      return False
    positions = self.drafter.max_positions
    return positions is not None and self.decode.capacity > positions

  @property
  def chooses(self) -> bool:
    """Whether each round chooses its number of nodes by cost."""
    return bool(self.decode.widths)

  @property
  def may_pause(self) -> bool:
    """Whether some rounds of a run may be AR's."""
    return self.drafts and (self.chooses or self.outlives_drafter)

  def for_prefill(self) -> 'Engine':
    """The engine of prefill, the same for all budgets and policies.

    So a sweep over those compiles prefill once.
    """
    engine = self.without_tree()
    decode = dataclasses.replace(engine.decode, widths=())
    return dataclasses.replace(engine, decode=decode)

  def without_tree(self) -> 'Engine':
    """The engine whose round is an AR step that still updates the drafter.

    It keeps the state of a choice by cost, which pauses and resumes drafting.
    """
    decode = dataclasses.replace(
      self.decode,
      tree_budget=0,
      tree_policy='best_first',
      keep_top1_chain=False,
    )
    return dataclasses.replace(self, decode=decode)

  @functools.cached_property
  def model(self) -> Transformer:
    """The target's module, with the drafter's taps."""
    taps = self.drafter.tap_layers if self.drafter else ()
    return Transformer(
      self.config,
      tap_layers=taps,
      implementation=self.decode.implementation,
    )

  def apply(self, params: Params, *args: Any, method: str | None = None) -> Any:
    """The result of a method of the target with its parameters."""
    variables = {'params': params['target']}
    return self.model.apply(variables, *args, method=method)

  def head(self, params: Params) -> TargetHead:
    """The target's embedding and head, for a drafter."""

    def embed(tokens: Int32[Array, '*batch']) -> Float[Array, '*batch M']:
      return self.apply(params, tokens, method='embed')

    def unembed(hidden: Float[Array, '*batch M']) -> Float32[Array, '*batch V']:
      return self.apply(params, hidden, method='unembed')

    return TargetHead(embed, unembed, self.decode.implementation)
