"""The bytes that a step must move: the physical limit at batch 1."""

import collections
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from kdtree_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class WeightBytes:
  """Bytes of weights as they lie in memory, quantised ones with their scales.

  Attributes:
    dense: all of the target but routed experts, embedding and head: attention,
      norms, routers, shared experts, dense layers. Every forward reads them.
    head: of the target (its embedding where the two are tied); the drafter
      reads it once more.
    embedding: the target's table, of which a step reads single rows.
    expert: of one routed expert, one entry for each MoE layer.
    experts: all routed experts.
    drafter: the drafter's own, its embedding left out.
  """

  dense: int
  head: int
  embedding: int
  expert: tuple[int, ...]
  experts: int
  drafter: int

  @property
  def total(self) -> int:
    """Everything that lies in memory but the drafter's embedding."""
    parts = (self.dense, self.head, self.embedding, self.experts, self.drafter)
    return sum(parts)


def weight_bytes(
  config: ModelConfig, target: Any, drafter: Any = ()
) -> WeightBytes:
  """Sorts parameters, or shapes of them, by what reads them."""
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


def flat(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
  """Leaves with the names on their paths."""
  return [
    (tuple(str(getattr(key, 'key', key)) for key in path), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _bytes(leaf: Any) -> int:
  return math.prod(leaf.shape) * leaf.dtype.itemsize


def unique_experts(ids: np.ndarray, rows: int) -> list[int]:
  """Experts of each layer that the first `rows` rows go to.

  Args:
    ids: `[layers, N, K]` expert ids; negative is none.
    rows: the root and the nodes that are counted.
  """
  return [len(set(layer[layer >= 0].tolist())) for layer in ids[:, :rows]]


def step_bytes(
  weights: WeightBytes,
  touched: list[float],
  *,
  target_cache: int,
  drafter_cache: int = 0,
  drafts: bool = False,
  own_head: bool = False,
) -> dict[str, int]:
  """What one step moves at least, by kind.

  Every dense weight once, the head once for each of the two models that end
  in it, of the experts those that a row goes to, the committed rows once. Not
  counted, because none need reach the memory: activations and logits.

  Args:
    weights: as they lie in memory.
    touched: unique experts of each MoE layer, averages allowed.
    target_cache: bytes of the target's committed rows.
    drafter_cache: likewise the drafter's.
    drafts: the step is a round, not one of AR.
    own_head: the drafter has a head of its own, counted among its weights.
  """
  pairs = zip(weights.expert, touched, strict=True)
  return {
    'dense': weights.dense,
    'head': weights.head * (2 if drafts and not own_head else 1),
    'experts': round(sum(size * count for size, count in pairs)),
    'drafter': weights.drafter if drafts else 0,
    'cache': target_cache + (drafter_cache if drafts else 0),
  }


def attention_flops(config: ModelConfig, rows: int, context: int) -> int:
  """Operations of attention in the absorbed form over a context.

  Scores over the whole latent row, values over its first part: `2 (C + R)` a
  row, head, layer and cached token. Bound by arithmetic where rows are many.
  """
  width = config.latent_dim + config.kv_lora_rank
  heads = config.num_attention_heads * config.num_hidden_layers
  return 2 * width * heads * rows * context
