"""The pair that is measured, and the engines of a sweep."""

import dataclasses

import jax

from kdtree_jax.api import LoadedDrafter, Target
from kdtree_jax.config import DecodeConfig, DrafterConfig
from kdtree_jax.decode import Engine
from kdtree_jax.decode.engine import Params
from kdtree_jax.drafters.dflash import DFlashDrafter, default_target_layer_ids
from kdtree_jax.keys import Purpose, key_for
from kdtree_jax.model.random_params import random_params

LAYERS = 5
PREFILL = 2048


def random_drafter(
  target: Target, block_size: int, positions: int
) -> LoadedDrafter:
  """A DFlash drafter of 5 layers with random weights, for any target.

  The sizes follow those that are published: heads of 128, one for 64 of the
  hidden size up to 64 of them, a key head for 8 of those, a SwiGLU three times
  as wide as the model (hidden 2048: 32 and 4 heads, 6144).

  Args:
    target: that it drafts for.
    block_size: the root included.
    positions: most tokens of a sequence.
  """
  c = target.config
  heads = max(1, min(64, c.hidden_size // 64))
  taps = default_target_layer_ids(c.num_hidden_layers, LAYERS)
  last = c.num_hidden_layers - 1
  config = DrafterConfig(
    hidden_size=c.hidden_size,
    num_hidden_layers=LAYERS,
    num_attention_heads=heads,
    num_key_value_heads=max(1, heads // 8),
    head_dim=128,
    intermediate_size=3 * c.hidden_size,
    vocab_size=c.vocab_size,
    block_size=block_size,
    mask_token_id=c.vocab_size - 1,
    # A target of few layers has no third last: its taps repeat.
    target_layer_ids=tuple(min(max(tap, 0), last) for tap in taps),
    num_target_layers=c.num_hidden_layers,
    rope_theta=c.rope_theta,
    max_position_embeddings=positions,
  )
  drafter = DFlashDrafter(config, block_size)
  shapes = jax.eval_shape(
    lambda: drafter.init_params(key_for(Purpose.WEIGHTS), target.dtype)
  )
  return LoadedDrafter('random weights', drafter, random_params(shapes, 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
  """A target and a drafter at one capacity.

  Attributes:
    target: with the config that the engines run on.
    drafter: likewise.
    capacity: rows of every cache, whatever the context.
    room: of those, what lies behind the longest context.
    prefill_chunk: tokens of a prefill step, at least a block.
    kernels: `auto` or an implementation.
  """

  target: Target
  drafter: LoadedDrafter
  capacity: int
  room: int
  prefill_chunk: int
  kernels: str

  def params(self, engine: Engine) -> Params:
    """What the engine's programs take; AR has no use for a drafter's."""
    drafter = self.drafter.params if engine.drafter else {}
    return {'target': self.target.params, 'drafter': drafter}

  @property
  def nbytes(self) -> int:
    """Of all parameters."""
    both = (self.target.params, self.drafter.params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(both))

  def engine(self, tree_budget: int | None) -> Engine:
    """Of a round at this budget; None: of an AR step."""
    drafts = tree_budget is not None
    decode = DecodeConfig(
      tree_budget=tree_budget or 0,
      draft_depth=self.drafter.block_size - 1 if drafts else 0,
      capacity=self.capacity,
      prefill_chunk=self.prefill_chunk,
      kernels=self.kernels,
    )
    drafter = self.drafter.drafter if drafts else None
    return Engine(self.target.config, drafter, decode)
