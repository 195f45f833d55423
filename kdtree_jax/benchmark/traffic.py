"""The bytes that a step must move, its physical limit at batch 1."""

import collections
import dataclasses
import math

import jax
import numpy as np
from jaxtyping import Int32, PyTree

from kdtree_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class WeightBytes:
  """Bytes of weights in memory, those of scales included.

  Attributes:
    dense: all of the target but routed experts, embedding and head: attention,
      norms, routers, shared experts, dense layers. Every forward reads them.
    head: the target's head (its embedding if the two are tied); the drafter
      reads it once more.
    embedding: the target's embedding, of which a step reads single rows.
    expert: one routed expert, an entry for each MoE layer.
    experts: all routed experts.
    drafter: the drafter's own weights without its embedding.
  """

  dense: int
  head: int
  embedding: int
  expert: tuple[int, ...]
  experts: int
  drafter: int

  @property
  def total(self) -> int:
    """All weights in memory but the drafter's embedding."""
    parts = (self.dense, self.head, self.embedding, self.experts, self.drafter)
    return sum(parts)


def weight_bytes(
  config: ModelConfig, target: PyTree, drafter: PyTree = ()
) -> WeightBytes:
  """Bytes of parameters, or of their shapes, by what reads them."""
  kinds = collections.Counter()
  layers = collections.Counter()
  for names, leaf in flat(target):
    if 'experts' in names:
      layers[int(names[0].removeprefix('layers_'))] += _bytes(leaf)
    elif names[0] in ('embed_tokens', 'lm_head'):
      kinds[names[0]] += _bytes(leaf)
    else:
      kinds['dense'] += _bytes(leaf)
  own = sum(
    _bytes(leaf) for names, leaf in flat(drafter) if names[0] != 'embed_tokens'
  )
  tied = config.tie_word_embeddings
  return WeightBytes(
    dense=kinds['dense'],
    head=kinds['embed_tokens' if tied else 'lm_head'],
    embedding=0 if tied else kinds['embed_tokens'],
    expert=tuple(
      layers[i] // config.n_routed_experts
      for i in range(config.num_hidden_layers)
      if config.is_moe_layer(i)
    ),
    experts=sum(layers.values()),
    drafter=own,
  )


def flat(tree: PyTree) -> list[tuple[tuple[str, ...], jax.Array]]:
  """Leaves, or their shapes, with the names on their paths."""
  return [
    (tuple(str(getattr(key, 'key', key)) for key in path), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _bytes(leaf: jax.Array) -> int:
  return math.prod(leaf.shape) * leaf.dtype.itemsize


def active_experts(
  ids: Int32[np.ndarray, 'moe_layers N K'], rows: int
) -> list[int]:
  """The number of active experts of each MoE layer.

  Args:
    ids: expert ids; negative is none.
    rows: how many rows count, the root's first.
  """
  return [len(set(layer[layer >= 0].tolist())) for layer in ids[:, :rows]]


def step_bytes(
  weights: WeightBytes,
  active: list[float],
  *,
  target_cache: int,
  drafter_cache: int = 0,
  drafts: bool = False,
  own_head: bool = False,
) -> dict[str, int]:
  """The bytes that one step moves at least, by kind.

  Every dense weight counts once, the head once for each of the two models that
  use it, each active expert once, and the committed rows once. Activations and
  logits do not count, because they need not reach the memory.

  Args:
    weights: bytes of the weights.
    active: active experts of each MoE layer, averages allowed.
    target_cache: bytes of the target's committed rows.
    drafter_cache: bytes of the drafter's committed rows.
    drafts: the step is a DDTree round, not an AR step.
    own_head: the drafter has its own head, counted among its weights.
  """
  pairs = zip(weights.expert, active, strict=True)
  return {
    'dense': weights.dense,
    'head': weights.head * (2 if drafts and not own_head else 1),
    'experts': round(sum(size * count for size, count in pairs)),
    'drafter': weights.drafter if drafts else 0,
    'cache': target_cache + (drafter_cache if drafts else 0),
  }


def attention_flops(config: ModelConfig, rows: int, context: int) -> int:
  """Operations of attention in the absorbed form over a context.

  Scores use the whole latent row and values its first part: `2 (C + R)` for
  each row, head, layer and cached token. With many rows attention is bound by
  arithmetic.
  """
  width = config.latent_dim + config.kv_lora_rank
  heads = config.num_attention_heads * config.num_hidden_layers
  return 2 * width * heads * rows * context
