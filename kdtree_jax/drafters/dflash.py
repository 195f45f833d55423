"""DFlash: one forward drafts a whole block, conditioned on target features.

Layers of the Qwen3 kind run over the block [root, MASK, ...]. They attend to
the block and to the context, whose keys and values are projected from the
target's hidden states once, when the tokens are committed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, PyTree

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.drafters.attention import View, block_attention, visible_rows
from kdtree_jax.drafters.base import TargetHead
from kdtree_jax.model.layers import Linear, Matrix, RMSNorm, SwiGLU, weight
from kdtree_jax.model.rope import apply_rope, rope_tables
from kdtree_jax.registry import register
from pallas_kernels.cache_compact.api import cache_compact
from pallas_kernels.dense import matmul
from pallas_kernels.draft_attention.api import draft_attention

# From a layer's index, its queries and the block's own keys and values to what
# the queries find.
Attend = Callable[
  [
    int,
    Float[Array, '*batch slots kv_heads group head_dim'],
    Float[Array, '*batch slots keys_values'],
  ],
  Float[Array, '*batch slots kv_heads group head_dim'],
]


def default_target_layer_ids(
  num_target_layers: int, num_taps: int
) -> tuple[int, ...]:
  """The layers that z-lab taps by default.

  They are evenly spaced between layer 1 and the third last.
  """
  if num_taps == 1:
    return (num_target_layers // 2,)
  step = (num_target_layers - 4) / (num_taps - 1)
  return tuple(round(1 + i * step) for i in range(num_taps))


class DFlashState(flax.struct.PyTreeNode):
  """The projected context.

  Attributes:
    context: rotated keys and values side by side; rows from the committed
      length on are garbage.
  """

  context: Float[Array, 'drafter_layers B S keys_values']


class DFlashAttention(nn.Module):
  """Grouped-query attention from blocks to their context and themselves."""

  config: DrafterConfig
  dtype: DTypeLike
  layer: int

  def setup(self):
    c = self.config
    kv, q = c.num_key_value_heads, c.num_attention_heads

    def linear(features):
      return Linear(features, self.dtype, use_bias=c.attention_bias)

    self.q_proj = linear(q * c.head_dim)
    self.k_proj = linear(kv * c.head_dim)
    self.v_proj = linear(kv * c.head_dim)
    self.o_proj = linear(c.hidden_size)
    self.q_norm = RMSNorm(c.rms_norm_eps, self.dtype)
    self.k_norm = RMSNorm(c.rms_norm_eps, self.dtype)

  def keys_values(
    self,
    x: Float[Array, '*batch M'],
    cos: Float32[Array, '*batch 1 half'],
    sin: Float32[Array, '*batch 1 half'],
  ) -> Float[Array, '*batch keys_values']:
    """Rotated keys and values of each row, side by side."""
    c = self.config
    shape = (*x.shape[:-1], c.num_key_value_heads, c.head_dim)
    keys = self.k_norm(self.k_proj(x).reshape(shape))
    keys = apply_rope(keys, cos, sin, interleave=False)
    return jnp.concatenate(
      [keys.reshape(*x.shape[:-1], -1), self.v_proj(x)], axis=-1
    )

  def __call__(
    self,
    x: Float[Array, '*batch slots M'],
    cos: Float32[Array, '*batch slots 1 half'],
    sin: Float32[Array, '*batch slots 1 half'],
    attend: Attend,
  ) -> Float[Array, '*batch slots M']:
    """Attends from the block; `attend` is bound to the context."""
    c = self.config
    queries = self.q_proj(x).reshape(*x.shape[:-1], -1, c.head_dim)
    queries = apply_rope(self.q_norm(queries), cos, sin, interleave=False)
    queries = queries.reshape(
      *x.shape[:-1], c.num_key_value_heads, -1, c.head_dim
    )
    out = attend(self.layer, queries, self.keys_values(x, cos, sin))
    return self.o_proj(out.reshape(*x.shape[:-1], -1))


class DFlashBlock(nn.Module):
  """A Qwen3 decoder layer whose attention also sees the context."""

  config: DrafterConfig
  dtype: DTypeLike
  layer: int

  def setup(self):
    c = self.config
    self.input_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
    self.self_attn = DFlashAttention(c, self.dtype, self.layer)
    self.post_attention_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
    self.mlp = SwiGLU(c.intermediate_size, self.dtype)

  def __call__(
    self,
    hidden: Float[Array, '*batch slots M'],
    cos: Float32[Array, '*batch slots 1 half'],
    sin: Float32[Array, '*batch slots 1 half'],
    attend: Attend,
  ) -> Float[Array, '*batch slots M']:
    x = self.input_layernorm(hidden)
    hidden = hidden + self.self_attn(x, cos, sin, attend)
    return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashModel(nn.Module):
  """The drafter's layers; embedding and head are usually the target's."""

  config: DrafterConfig
  dtype: DTypeLike = jnp.float32

  def setup(self):
    c = self.config
    self.fc = Linear(c.hidden_size, self.dtype)
    self.hidden_norm = RMSNorm(c.rms_norm_eps, self.dtype)
    self.layers = [
      DFlashBlock(c, self.dtype, i) for i in range(c.num_hidden_layers)
    ]
    self.norm = RMSNorm(c.rms_norm_eps, self.dtype)
    if c.own_embedding:
      self.embed_tokens = Matrix(c.vocab_size, c.hidden_size, self.dtype)
    if c.draft_vocab_size is not None:
      size, zeros = c.draft_vocab_size, nn.initializers.zeros_init()
      self.lm_head = Matrix(size, c.hidden_size, self.dtype)
      # Target id of draft id i: i + d2t[i].
      self.d2t = weight(self, 'd2t', zeros, (size,), jnp.int32)

  def __call__(
    self,
    embedded: Float[Array, 'B slots M'],
    state: DFlashState,
    length: Int32[Array, ' B'],
    implementation: str | None = None,
  ) -> Float[Array, 'B slots M']:
    """Normed hidden states of one block a sequence.

    Args:
      embedded: the embeddings at the positions from `length` on.
      state: the context; its rows from `length` on may hold anything.
      length: committed tokens.
      implementation: the attention kernel's.
    """
    c = self.config

    def attend(layer, queries, rows):
      return draft_attention(
        queries,
        state.context,
        rows,
        length,
        layer=layer,
        scale=c.head_dim**-0.5,
        causal=c.is_causal(layer),
        window=c.window(layer),
        window_from_root=c.window_from_root,
        implementation=implementation,
      )

    return self._forward(embedded, length, attend)

  def blocks(
    self,
    embedded: Float[Array, 'B A slots M'],
    context: Float[Array, 'drafter_layers B S keys_values']
    | Sequence[Float[Array, 'B S keys_values']],
    view: View,
  ) -> Float[Array, 'B A slots M']:
    """Normed hidden states of A blocks a sequence, for training.

    Args:
      embedded: the embeddings of each root and of the masks after it.
      context: the rows of each layer, as `project` makes them, shared by all
        blocks of a sequence; finite everywhere.
      view: what each block sees of the context.
    """
    c = self.config

    def halves(rows):
      shape = (*rows.shape[:-1], 2, c.num_key_value_heads, c.head_dim)
      rows = rows.reshape(shape)
      return rows[..., 0, :, :], rows[..., 1, :, :]

    def attend(layer, queries, rows):
      return block_attention(
        queries,
        halves(context[layer]),
        halves(rows),
        visible_rows(c, layer, view, queries.shape[2]),
        c.head_dim**-0.5,
      )

    return self._forward(embedded, view.start, attend)

  def _forward(
    self,
    embedded: Float[Array, '*batch slots M'],
    start: Int32[Array, '*batch'],
    attend: Attend,
  ) -> Float[Array, '*batch slots M']:
    """Runs the layers over slots at the positions from `start` on."""
    slots = jnp.arange(embedded.shape[-2], dtype=jnp.int32)
    slots = lax.expand_dims(slots, range(start.ndim))
    cos, sin = self._tables(start[..., None] + slots)
    hidden = embedded
    for layer in self.layers:
      hidden = layer(hidden, cos, sin, attend)
    return self.norm(hidden)

  def project(
    self, features: Float[Array, '*batch F'], positions: Int32[Array, '*batch']
  ) -> Float[Array, 'drafter_layers *batch keys_values']:
    """Each layer's context rows of features at their positions.

    A projected feature goes to k_proj and v_proj as it is: the layers' input
    norms apply to the block only.
    """
    cos, sin = self._tables(positions)
    z = self.hidden_norm(self.fc(features))
    rows = [layer.self_attn.keys_values(z, cos, sin) for layer in self.layers]
    return jnp.stack(rows)

  def embed(self, tokens: Int32[Array, '*batch']) -> Float[Array, '*batch M']:
    """The tokens' embeddings in the drafter's own table."""
    return self.embed_tokens()[tokens]

  def unembed(
    self, hidden: Float[Array, '*batch M']
  ) -> Float32[Array, '*batch V']:
    """Logits of the drafter's own head.

    Tokens that the draft vocabulary lacks have no probability.
    """
    c = self.config
    logits = matmul(hidden, self.lm_head())
    ids = jnp.arange(c.draft_vocab_size, dtype=jnp.int32) + self.d2t
    out = jnp.full((*hidden.shape[:-1], c.vocab_size), -jnp.inf, jnp.float32)
    return out.at[..., ids].set(logits)

  def _tables(self, positions):
    c = self.config
    cos, sin = rope_tables(positions, c.head_dim, c.rope_theta, c.rope_scaling)
    return cos[..., None, :], sin[..., None, :]

  def initialize(self) -> Float[Array, 'B N width']:
    """Uses every parameter once, for `init`."""
    c = self.config
    width = len(c.target_layer_ids) * c.hidden_size
    start = jnp.zeros((1,), jnp.int32)
    rows = self.project(jnp.zeros((1, 1, width), self.dtype), start[:, None])
    embedded = jnp.zeros((1, 1, c.hidden_size), self.dtype)
    if c.own_embedding:
      embedded = self.embed(jnp.zeros((1, 1), jnp.int32))
    # All kernels have the same parameters.
    hidden = self(embedded, DFlashState(context=rows), start, 'reference')
    return hidden if c.draft_vocab_size is None else self.unembed(hidden)


@register('drafter', 'dflash')
@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
  """A DFlash model, bound to the decoding loop.

  The drafter that is loaded by this name is untrained: its random weights
  exercise the whole path, and next to nothing is accepted. Trained drafters
  are loaded from a folder or a bundle.

  Attributes:
    config: the architecture; its whole block is always drafted.
    block_size: positions used, the root included; at most the trained block.
  """

  config: DrafterConfig
  block_size: int
  needs_golden: ClassVar[bool] = False

  @property
  def tap_layers(self) -> tuple[int, ...]:
    return self.config.target_layer_ids

  @property
  def max_positions(self) -> int:
    # The whole trained block is drafted, however little of it is used.
    unused = self.config.block_size - self.block_size
    return self.config.max_position_embeddings - unused

  @property
  def target_sizes(self) -> dict[str, int]:
    return {
      'hidden_size': self.config.hidden_size,
      'vocab_size': self.config.vocab_size,
      'num_hidden_layers': self.config.num_target_layers,
    }

  @classmethod
  def create(cls, target: ModelConfig, block_size: int) -> 'DFlashDrafter':
    layers = target.num_hidden_layers
    taps = (0, layers // 2) if layers > 1 else (0,)
    config = DrafterConfig(
      hidden_size=target.hidden_size,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=2,
      head_dim=16,
      intermediate_size=2 * target.hidden_size,
      vocab_size=target.vocab_size,
      block_size=block_size,
      mask_token_id=target.vocab_size - 1,
      target_layer_ids=taps,
      num_target_layers=layers,
      rope_theta=target.rope_theta,
      max_position_embeddings=target.max_position_embeddings,
    )
    return cls(config, block_size)

  def init_params(self, key: jax.Array, dtype: DTypeLike) -> PyTree:
    model = DFlashModel(self.config, dtype)
    return model.init(key, method='initialize')['params']

  def init_state(self, batch: int, rows: int, dtype: DTypeLike) -> DFlashState:
    c = self.config
    width = 2 * c.num_key_value_heads * c.head_dim
    shape = (c.num_hidden_layers, batch, rows, width)
    return DFlashState(context=jnp.zeros(shape, dtype))

  def draft(
    self,
    params: PyTree,
    state: DFlashState,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    head: TargetHead,
  ) -> Float[Array, 'B D V']:
    root = jnp.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    embed, unembed, _ = self.ends(params, head)
    block = embed(self.block(root))
    hidden = self._apply(params, block, state, length, head.implementation)
    # Slot j predicts the token at its own position; slot 0 is the root.
    return unembed(hidden[:, 1 : self.block_size])

  def _apply(
    self, params: PyTree, *args: Any, method: str | None = None
  ) -> Any:
    """The result of a method of the model with its parameters."""
    return DFlashModel(self.config).apply(
      {'params': params}, *args, method=method
    )

  def block(
    self, roots: Int32[Array, '*batch']
  ) -> Int32[Array, '*batch {self.config.block_size}']:
    """The tokens of a trained block: the root, then masks."""
    c = self.config
    shape = (*roots.shape, c.block_size - 1)
    masks = jnp.full(shape, c.mask_token_id, jnp.int32)
    return jnp.concatenate([roots[..., None], masks], axis=-1)

  def ends(self, params: PyTree, head: TargetHead) -> TargetHead:
    """The drafter's own embedding and head; the target's where it has none."""
    apply = functools.partial(self._apply, params)
    if self.config.own_embedding:
      head = head._replace(embed=functools.partial(apply, method='embed'))
    if self.config.draft_vocab_size is not None:
      head = head._replace(unembed=functools.partial(apply, method='unembed'))
    return head

  def commit(
    self,
    params: PyTree,
    state: DFlashState,
    features: Float[Array, 'B W F'],
    start: Int32[Array, ' B'],
  ) -> DFlashState:
    every = jnp.arange(features.shape[1], dtype=jnp.int32)[None, :]
    positions = start[:, None] + every
    rows = self._apply(params, features, positions, method='project')
    path = jnp.broadcast_to(every, features.shape[:2])
    return DFlashState(context=cache_compact(state.context, rows, path, start))
