"""The decoder: embedding, blocks, final norm and head."""

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, UInt32

from kdtree_jax.config import ModelConfig
from kdtree_jax.keys import Purpose, key_for
from kdtree_jax.model.cache import KVCache, init_cache
from kdtree_jax.model.layers import Matrix, RMSNorm, SwiGLU, lookup
from kdtree_jax.model.mla import Attend, MultiHeadLatentAttention
from kdtree_jax.model.moe import MixtureOfExperts, Routing
from kdtree_jax.model.rope import rope_tables
from pallas_kernels.dense import matmul
from pallas_kernels.verify_attention.api import verify_attention


class ForwardOutput(flax.struct.PyTreeNode):
  """The result of a forward, which only reads the cache.

  Attributes:
    hidden: the residual stream before the final norm.
    features: the residual stream after the tapped layers, side by side in the
      order of `tap_layers`.
    rows: the new tokens' cache rows.
    routing: one for each MoE layer, fields `[B, N, ...]`; for audits. XLA
      removes it from programs that do not use it.
  """

  hidden: Float[Array, 'B N M']
  features: Float[Array, 'B N F']
  rows: Float[Array, 'L B N C']
  routing: tuple[Routing, ...]


class Block(nn.Module):
  """One decoder layer with pre-norm residuals."""

  config: ModelConfig
  layer: int
  dtype: DTypeLike
  implementation: str | None

  @nn.compact
  def __call__(
    self,
    hidden: Float[Array, 'B N M'],
    cos: Float32[Array, 'B N half'],
    sin: Float32[Array, 'B N half'],
    valid: Bool[Array, 'B N'],
    attend: Attend,
  ) -> tuple[Float[Array, 'B N M'], Float[Array, 'B N C'], Routing | None]:
    c = self.config
    norm = functools.partial(RMSNorm, c.rms_norm_eps, self.dtype)
    attention = MultiHeadLatentAttention(c, self.dtype, name='self_attn')
    x = norm(name='input_layernorm')(hidden)
    attended, rows = attention(x, cos, sin, attend)
    hidden = hidden + attended
    x = norm(name='post_attention_layernorm')(hidden)
    if c.is_moe_layer(self.layer):
      moe = MixtureOfExperts(c, self.dtype, self.implementation, name='mlp')
      y, routing = moe(x, valid)
      return hidden + y, rows, routing
    dense = SwiGLU(c.intermediate_size, self.dtype, name='mlp')
    return hidden + dense(x), rows, None


class Transformer(nn.Module):
  """A target of the DeepSeek-V2/V3 family.

  Attributes:
    config: the architecture.
    tap_layers: 0-based layers whose raw output becomes `features`.
    dtype: the dtype of the parameters that `init` makes; a forward computes in
      the dtype of the parameters that it is given.
    implementation: which kernels to use: None takes the best available, and
      `training` those with fast gradients, for an empty cache.
  """

  config: ModelConfig
  tap_layers: tuple[int, ...] = ()
  dtype: DTypeLike = jnp.float32
  implementation: str | None = None

  def setup(self):
    c = self.config
    self.embed_tokens = Matrix(c.vocab_size, c.hidden_size, self.dtype)
    self.layers = [
      Block(c, i, self.dtype, self.implementation)
      for i in range(c.num_hidden_layers)
    ]
    self.norm = RMSNorm(c.rms_norm_eps, self.dtype)
    if not c.tie_word_embeddings:
      self.lm_head = Matrix(c.vocab_size, c.hidden_size, self.dtype)

  def __call__(
    self,
    tokens: Int32[Array, 'B N'],
    positions: Int32[Array, 'B N'],
    cache: KVCache,
    valid: Bool[Array, 'B N'],
    ancestors: UInt32[Array, 'B N words'] | None = None,
  ) -> ForwardOutput:
    """Runs N new tokens over the committed rows of a cache.

    Args:
      tokens: the new tokens.
      positions: their absolute positions.
      cache: its first `length` rows are seen by every new token.
      valid: False for padding, which is routed to no expert; the mask must hide
        it from valid rows.
      ancestors: bit j of row i is set if i sees j. None is the causal mask of a
        chain.
    """
    c = self.config
    hidden = lookup(self.embed_tokens(), tokens)
    cos, sin = rope_tables(
      positions, c.qk_rope_head_dim, c.rope_theta, c.rope_scaling
    )
    all_rows, outputs, routings = [], [], []
    for i, block in enumerate(self.layers):

      def attend(query, rows, layer=i):
        return verify_attention(
          query,
          cache.latent,
          rows,
          cache.length,
          layer=layer,
          value_dim=c.kv_lora_rank,
          scale=c.softmax_scale,
          ancestors=ancestors,
          implementation=self.implementation,
        )

      hidden, rows, routing = block(hidden, cos, sin, valid, attend)
      all_rows.append(rows)
      routings.append(routing)
      outputs.append(hidden)
    taps = [outputs[layer] for layer in self.tap_layers]
    features = jnp.concatenate(taps or [hidden[..., :0]], axis=-1)
    return ForwardOutput(
      hidden=hidden,
      features=features,
      rows=jnp.stack(all_rows),
      routing=tuple(r for r in routings if r is not None),
    )

  def logits(
    self, hidden: Float[Array, '*batch M']
  ) -> Float32[Array, '*batch V']:
    """Logits of the residual stream before the final norm."""
    return self.unembed(self.norm(hidden))

  def embed(self, tokens: Int32[Array, '*batch']) -> Float[Array, '*batch M']:
    """The tokens' embeddings."""
    return lookup(self.embed_tokens(), tokens)

  def unembed(
    self, hidden: Float[Array, '*batch M']
  ) -> Float32[Array, '*batch V']:
    """Logits of normed hidden states."""
    tied = self.config.tie_word_embeddings
    return matmul(hidden, self.embed_tokens() if tied else self.lm_head())

  def initialize(self) -> Float32[Array, 'B N V']:
    """Uses every parameter once, for `init`."""
    cache = init_cache(self.config, 1, 1, self.dtype)
    zeros = jnp.zeros((1, 1), jnp.int32)
    out = self(zeros, zeros, cache, jnp.ones((1, 1), jnp.bool_))
    return self.logits(out.hidden)


def init_params(
  config: ModelConfig, key: jax.Array, dtype: DTypeLike
) -> dict[str, PyTree]:
  """Random parameters with the family's initializer_range. Consumes `key`."""
  # All kernels have the same parameters.
  model = Transformer(config, dtype=dtype, implementation='reference')
  return dict(model.init(key, method='initialize')['params'])


def abstract_params(config: ModelConfig, dtype: DTypeLike) -> dict[str, PyTree]:
  """Shapes and dtypes of a model's parameters, without their memory."""
  key = key_for(Purpose.WEIGHTS)
  return jax.eval_shape(lambda: init_params(config, key, dtype))
