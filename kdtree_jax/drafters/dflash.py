"""DFlash: one forward drafts a whole block, conditioned on target features.

Qwen3-type layers over the block [root, MASK, ...]. Keys and values are those
of the block and of the context, which is projected from the target's hidden
states; the context's are computed once, when its tokens are committed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.drafters.attention import block_attention
from kdtree_jax.drafters.base import TargetHead
from kdtree_jax.model.layers import Linear, Matrix, RMSNorm, SwiGLU, weight
from kdtree_jax.model.rope import apply_rope, rope_tables
from kdtree_jax.registry import register
from pallas_kernels.cache_compact.api import cache_compact
from pallas_kernels.dense import matmul
from pallas_kernels.draft_attention.api import draft_attention

# (layer, queries [..., W, K, G, d], the slots' rows [..., W, 2 K d]) -> what
# the queries find, of their shape: W slots, K heads of keys and values.
Attend = Callable[[int, jax.Array, jax.Array], jax.Array]


def default_target_layer_ids(
  num_target_layers: int, num_taps: int
) -> tuple[int, ...]:
  """z-lab's default taps: evenly spaced between layer 1 and the third last."""
  if num_taps == 1:
    return (num_target_layers // 2,)
  step = (num_target_layers - 4) / (num_taps - 1)
  return tuple(int(round(1 + i * step)) for i in range(num_taps))


@flax.struct.dataclass
class DFlashState:
  """Projected context.

  Attributes:
    context: `[layers, B, S, 2 * num_key_value_heads * head_dim]`: rotated keys
      and values side by side; rows from the committed length on are garbage.
  """

  context: jax.Array


@flax.struct.dataclass
class View:
  """Which rows of a shared context blocks in training see; A in a sequence.

  The context is of several documents, each from position 0.

  Attributes:
    start: `[B, A]` int32, the position of every block's root.
    positions: `[B, S]` int32, of the context's rows.
    seen: `[B, A, S]` bool: rows before the root, of its own document.
  """

  start: jax.Array
  positions: jax.Array
  seen: jax.Array


class DFlashAttention(nn.Module):
  """Grouped-query attention from blocks to their context and themselves."""

  config: DrafterConfig
  dtype: Any
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
    self, x: jax.Array, cos: jax.Array, sin: jax.Array
  ) -> jax.Array:
    """`[..., H]` -> `[..., 2 * kv heads * head_dim]`; keys are rotated."""
    c = self.config
    shape = (*x.shape[:-1], c.num_key_value_heads, c.head_dim)
    keys = self.k_norm(self.k_proj(x).reshape(shape))
    keys = apply_rope(keys, cos, sin, interleave=False)
    return jnp.concatenate(
      [keys.reshape(*x.shape[:-1], -1), self.v_proj(x)], axis=-1
    )

  def __call__(
    self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend
  ) -> jax.Array:
    """`x [..., W, H]` -> `[..., W, H]`; `attend` knows the context."""
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
  dtype: Any
  layer: int

  def setup(self):
    c = self.config
    self.input_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
    self.self_attn = DFlashAttention(c, self.dtype, self.layer)
    self.post_attention_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
    self.mlp = SwiGLU(c.intermediate_size, self.dtype)

  def __call__(self, hidden, cos, sin, attend):
    x = self.input_layernorm(hidden)
    hidden = hidden + self.self_attn(x, cos, sin, attend)
    return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashModel(nn.Module):
  """The drafter's layers; embedding and head are usually the target's."""

  config: DrafterConfig
  dtype: Any = jnp.float32

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
    embedded: jax.Array,
    state: DFlashState,
    length: jax.Array,
    implementation: str | None = None,
  ) -> jax.Array:
    """One block a row: `[B, block_size, H]` -> normed hidden.

    Args:
      embedded: the embeddings at the positions `length ..`.
      state: what is committed; behind the length it may be anything.
      length: `[B]` int32.
      implementation: of the attention's kernel.
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
    embedded: jax.Array,
    context: Sequence[jax.Array],
    view: View,
  ) -> jax.Array:
    """A blocks a row at once: `[B, A, block_size, H]` -> normed hidden.

    Args:
      embedded: the embeddings of each root and the masks behind it.
      context: one a layer, as `project` makes them; finite everywhere. It is
        one for all blocks of a row and stays `[B, S, 2 * kv * hd]`.
      view: what each block sees of it.
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
        _visible(c, layer, view, queries.shape[2]),
        c.head_dim**-0.5,
      )

    return self._forward(embedded, view.start, attend)

  def _forward(self, embedded, start, attend):
    """`[..., W, H]` at the positions from `start [...]` on."""
    slots = jnp.arange(embedded.shape[-2], dtype=jnp.int32)
    slots = lax.expand_dims(slots, range(start.ndim))
    cos, sin = self._tables(start[..., None] + slots)
    hidden = embedded
    for layer in self.layers:
      hidden = layer(hidden, cos, sin, attend)
    return self.norm(hidden)

  def project(self, features: jax.Array, positions: jax.Array) -> jax.Array:
    """`[B, W, F]` at `positions [B, W]` -> `[layers, B, W, 2 * kv * hd]`.

    The projected feature goes to k_proj and v_proj as it is: the layers'
    input norms see the block only.
    """
    cos, sin = self._tables(positions)
    z = self.hidden_norm(self.fc(features))
    rows = [layer.self_attn.keys_values(z, cos, sin) for layer in self.layers]
    return jnp.stack(rows)

  def embed(self, tokens: jax.Array) -> jax.Array:
    """`[...]` int32 -> `[..., H]`, by the drafter's own embedding."""
    return self.embed_tokens()[tokens]

  def unembed(self, hidden: jax.Array) -> jax.Array:
    """`[..., H]` -> `[..., V]` float32, by the drafter's own head.

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

  def initialize(self):
    """Touches every parameter once, for `init`."""
    c = self.config
    width = len(c.target_layer_ids) * c.hidden_size
    start = jnp.zeros((1,), jnp.int32)
    rows = self.project(jnp.zeros((1, 1, width), self.dtype), start[:, None])
    embedded = jnp.zeros((1, 1, c.hidden_size), self.dtype)
    if c.own_embedding:
      embedded = self.embed(jnp.zeros((1, 1), jnp.int32))
    # Whatever the kernels, the parameters are the same.
    hidden = self(embedded, DFlashState(context=rows), start, 'reference')
    return hidden if c.draft_vocab_size is None else self.unembed(hidden)


def _visible(
  config: DrafterConfig, layer: int, view: View, width: int
) -> tuple[jax.Array, jax.Array]:
  """Which of W slots sees which rows, `[B, A, W or 1, S]` and `[W, W]` bool.

  Every slot sees the context and, unless the layer is causal, the block.
  """
  slots = np.arange(width, dtype=np.int32)
  block = np.ones((width, width), bool)
  if config.is_causal(layer):
    block = slots[:, None] >= slots[None, :]
  context = view.seen[:, :, None]
  window = config.window(layer)
  if window is not None:
    # Measured from the slot itself or from the root, which has slot 0.
    at = slots * (not config.window_from_root)
    block &= at[:, None] - slots[None, :] < window
    behind = view.start[:, :, None] - view.positions[:, None]
    behind = behind[:, :, None] + at[None, None, :, None]
    context &= behind < window
  return context, jnp.asarray(block)


@register('drafter', 'dflash')
@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
  """Binds a DFlash model to the decoding loop.

  By name it is untrained: random weights, which exercise the whole path and
  accept next to nothing. Trained ones are loaded from a folder.

  Attributes:
    config: the architecture; its block is always drafted whole.
    block_size: positions used, the root included; at most the trained block.
  """

  config: DrafterConfig
  block_size: int
  needs_golden: ClassVar[bool] = False

  @property
  def tap_layers(self) -> tuple[int, ...]:
    return self.config.target_layer_ids

  @property
  def target_sizes(self) -> dict[str, int]:
    names = ('hidden_size', 'vocab_size', 'num_target_layers')
    return {name: getattr(self.config, name) for name in names}

  @property
  def max_positions(self) -> int:
    # The trained block is drafted whole, however little of it is used.
    unused = self.config.block_size - self.block_size
    return self.config.max_position_embeddings - unused

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

  def init_params(self, key: jax.Array, dtype: Any) -> Any:
    model = DFlashModel(self.config, dtype)
    return model.init(key, method='initialize')['params']

  def init_state(self, batch: int, rows: int, dtype: Any) -> DFlashState:
    c = self.config
    width = 2 * c.num_key_value_heads * c.head_dim
    shape = (c.num_hidden_layers, batch, rows, width)
    return DFlashState(context=jnp.zeros(shape, dtype))

  def draft(
    self,
    params: Any,
    state: DFlashState,
    tokens: jax.Array,
    length: jax.Array,
    head: TargetHead,
  ) -> jax.Array:
    root = jnp.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    embed, unembed, _ = self.ends(params, head)
    hidden = DFlashModel(self.config).apply(
      {'params': params},
      embed(self.block(root)),
      state,
      length,
      head.implementation,
    )
    # Slot j predicts the token at its own position; slot 0 is the root.
    return unembed(hidden[:, 1 : self.block_size])

  def block(self, roots: jax.Array) -> jax.Array:
    """`[...]` int32 -> `[..., trained block]`: the roots, masks behind them."""
    c = self.config
    shape = (*roots.shape, c.block_size - 1)
    masks = jnp.full(shape, c.mask_token_id, jnp.int32)
    return jnp.concatenate([roots[..., None], masks], axis=-1)

  def ends(self, params: Any, head: TargetHead) -> TargetHead:
    """Embedding and head: the target's, but for those of its own."""
    embed, unembed, _ = head
    model, variables = DFlashModel(self.config), {'params': params}
    if self.config.own_embedding:
      embed = functools.partial(model.apply, variables, method='embed')
    if self.config.draft_vocab_size is not None:
      unembed = functools.partial(model.apply, variables, method='unembed')
    return head._replace(embed=embed, unembed=unembed)

  def commit(
    self,
    params: Any,
    state: DFlashState,
    features: jax.Array,
    start: jax.Array,
  ) -> DFlashState:
    every = jnp.arange(features.shape[1], dtype=jnp.int32)[None, :]
    rows = DFlashModel(self.config).apply(
      {'params': params}, features, start[:, None] + every, method='project'
    )
    path = jnp.broadcast_to(every, features.shape[:2])
    return DFlashState(context=cache_compact(state.context, rows, path, start))
