"""Multi-head latent attention in the absorbed form (DeepSeek-V2, sec. 2.1)."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.layers import Linear, RMSNorm, matrix_init, weight
from kdtree_jax.model.rope import apply_rope
from pallas_kernels.dense import prevent_fusion

# From queries and the new tokens' own cache rows to each head's output.
Attend = Callable[
  [Float[Array, 'B N H C'], Float[Array, 'B N C']], Float[Array, 'B N H R']
]


def _per_head(
  x: Float[Array, 'B N H inputs'], w: Float[Array, 'H outputs inputs']
) -> Float[Array, 'B N H outputs']:
  """A separate product for each head, in the dtype of `x`.

  XLA's CPU backend has no batched product from bfloat16 to float32. The rows
  are the first operand: with the weights first, a GPU would write the result
  transposed.
  """
  out = lax.dot_general(
    x,
    w,
    (((3,), (2,)), ((2,), (0,))),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=x.dtype,
  )
  return out.transpose(1, 2, 0, 3)


class MultiHeadLatentAttention(nn.Module):
  """Attention between queries and latents, with `kv_b_proj` absorbed.

  The checkpoint's `kv_b_proj` is stored as two weights, one absorbed by the
  queries and one by the output: `k_b_proj [n, r, dn]` (W_UK, transposed) and
  `v_b_proj [n, dv, r]` (W_UV). Neither is a strided slice, and the products sum
  over their last axis, which is contiguous in memory.
  """

  config: ModelConfig
  dtype: DTypeLike

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B N M'],
    cos: Float32[Array, 'B N half'],
    sin: Float32[Array, 'B N half'],
    attend: Attend,
  ) -> tuple[Float[Array, 'B N M'], Float[Array, 'B N C']]:
    """Attends from N new tokens.

    Args:
      x: normed hidden states.
      cos: RoPE's table at the tokens' positions; half is `P / 2`.
      sin: like `cos`.
      attend: the attention op, bound to the cache and the mask.

    Returns:
      The update of the residual stream and the tokens' own cache rows.
    """
    c = self.config
    n, r = c.num_attention_heads, c.kv_lora_rank
    query = self._queries(x).reshape(*x.shape[:2], n, c.qk_head_dim)
    q_nope, q_rope = jnp.split(query, [c.qk_nope_head_dim], axis=-1)
    kv = self._linear(r + c.qk_rope_head_dim, 'kv_a_proj_with_mqa')(
      prevent_fusion(x)
    )
    latent, k_rope = jnp.split(kv, [r], axis=-1)
    latent = self._norm('kv_a_layernorm')(latent)

    def rotate(y, cos, sin):
      return apply_rope(y, cos, sin, interleave=c.rope_interleave)

    q_rope = rotate(q_rope, cos[:, :, None], sin[:, :, None])
    rows = jnp.concatenate([latent, rotate(k_rope, cos, sin)], axis=-1)
    k_b = weight(
      self, 'k_b_proj', matrix_init, (n, r, c.qk_nope_head_dim), self.dtype
    )
    v_b = weight(
      self, 'v_b_proj', matrix_init, (n, c.v_head_dim, r), self.dtype
    )
    # Without the barrier, XLA fuses a single row's product into the
    # concatenation, whose code sums slowly.
    q_latent = lax.optimization_barrier(_per_head(q_nope, k_b))
    out = attend(jnp.concatenate([q_latent, q_rope], axis=-1), rows)
    out = _per_head(out, v_b)
    out = out.reshape(*x.shape[:2], n * c.v_head_dim)
    return self._linear(c.hidden_size, 'o_proj')(out), rows

  def _queries(self, x: Float[Array, 'B N M']) -> Float[Array, 'B N width']:
    c = self.config
    width = c.num_attention_heads * c.qk_head_dim
    if c.q_lora_rank is None:
      return Linear(width, self.dtype, name='q_proj')(x)
    low = self._linear(c.q_lora_rank, 'q_a_proj')(x)
    low = self._norm('q_a_layernorm')(low)
    return Linear(width, self.dtype, name='q_b_proj')(low)

  def _linear(self, features: int, name: str) -> Linear:
    bias = self.config.attention_bias
    return Linear(features, self.dtype, use_bias=bias, name=name)

  def _norm(self, name: str) -> RMSNorm:
    return RMSNorm(self.config.latent_norm_eps, self.dtype, name=name)
