"""The target and drafter that are measured, and the engines of a sweep."""

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

  Its sizes follow those of published drafters: heads of size 128; hidden_size /
  64 of them, at most 64; a key-value head for 8 of them; and a SwiGLU three
  times as wide as the model. A hidden size of 2048 gives 32 heads, 4 key-value
  heads and 6144.

  Args:
    target: the target that it drafts for.
    block_size: positions of a block, the root included.
    positions: the most tokens of a sequence.
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
    # A target of few layers has no third last one: its taps repeat.
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
class ModelPair:
  """A target and a drafter at one capacity.

  Attributes:
    target: the target, with the config that the engines run on.
    drafter: the drafter.
    capacity: rows of every cache, whatever the context.
    room: how many of those are left after the longest context.
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
    """Parameters for an engine's programs; AR's take no drafter's."""
    drafter = self.drafter.params if engine.drafter else {}
    return {'target': self.target.params, 'drafter': drafter}

  @property
  def block_size(self) -> int:
    return self.drafter.block_size

  @property
  def nbytes(self) -> int:
    """Bytes of all parameters."""
    both = (self.target.params, self.drafter.params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(both))

  def engine(self, tree_budget: int | None) -> Engine:
    """The engine of a round at this budget, or of an AR step for None."""
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
