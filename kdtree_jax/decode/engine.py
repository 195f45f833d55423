"""The static half of a decoding program: everything but arrays."""

import dataclasses
import functools
from typing import Any

import jax

import pallas_kernels
from kdtree_jax.config import DecodeConfig, ModelConfig
from kdtree_jax.drafters.base import Drafter, TargetHead
from kdtree_jax.errors import UserError
from kdtree_jax.model import Transformer

KERNELS = ('auto', *pallas_kernels.IMPLEMENTATIONS)

# {'target': ..., 'drafter': ...}
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Engine:
  """A hashable description; one compiled program for each.

  Attributes:
    config: the target.
    drafter: None decodes autoregressively: the same round, an empty tree.
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
        'kernels=mosaic_gpu needs a Hopper GPU; kernels=auto takes what there '
        'is'
      )
    if d.capacity > self.config.max_position_embeddings:
      raise UserError(
        f'capacity={d.capacity} exceeds the max_position_embeddings='
        f'{self.config.max_position_embeddings} of the target'
      )

  @property
  def drafts(self) -> bool:
    """Whether a round asks the drafter."""
    return self.drafter is not None and self.decode.tree_budget > 0

  @property
  def outlives_drafter(self) -> bool:
    """Whether rows may grow beyond the positions that the drafter has."""
    limit = self.drafter.max_positions if self.drafts else None
    return limit is not None and self.decode.capacity > limit

  def for_prefill(self) -> 'Engine':
    """The engine of prefill, which does not look at the tree.

    So a sweep over budgets and policies compiles prefill once.
    """
    return self.without_tree()

  def without_tree(self) -> 'Engine':
    """The engine whose round is AR's step; it still feeds the drafter."""
    decode = dataclasses.replace(
      self.decode,
      tree_budget=0,
      tree_policy='best_first',
      keep_top1_chain=False,
    )
    return dataclasses.replace(self, decode=decode)

  @functools.cached_property
  def model(self) -> Transformer:
    taps = self.drafter.tap_layers if self.drafter else ()
    return Transformer(
      self.config,
      tap_layers=taps,
      implementation=self.decode.implementation,
    )

  def apply(self, params: Params, *args, method: str | None = None) -> Any:
    """A method of the target with its parameters."""
    variables = {'params': params['target']}
    return self.model.apply(variables, *args, method=method)

  def head(self, params: Params) -> TargetHead:
    """The target's embedding and head, for a drafter."""

    def embed(tokens: jax.Array) -> jax.Array:
      return self.apply(params, tokens, method='embed')

    def unembed(hidden: jax.Array) -> jax.Array:
      return self.apply(params, hidden, method='unembed')

    return TargetHead(embed, unembed, self.decode.implementation)
