"""Latent attention and a mixture of experts, in plain NumPy.

Sources of the formulas: DeepSeek-AI, "DeepSeek-V2" (latent attention, grouped
softmax routing) and "DeepSeek-V3" (sigmoid routing with a selection bias).
Keys and values are expanded for each head, where the engine absorbs the
projections: the same algebra in different code.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from kdtree_jax.reference import layers as ops
from kdtree_jax.reference.cache import ListCache, Rows
from kdtree_jax.reference.layers import Config


@dataclasses.dataclass(frozen=True)
class ForwardOutput:
  """The result of one forward over T tokens.

  Attributes:
    logits: float32 `[T, V]`.
    layers: the residual stream after every layer, each float32 `[T, M]`.
    rows: the cache rows of the T tokens, for every layer `(latent [T, R],
      k_rope [T, P])`; the latent is normed, k_rope is rotated, in the layout
      of the checkpoint.
  """

  logits: np.ndarray
  layers: list[np.ndarray]
  rows: list[Rows]


def is_sparse(config: Config, layer: int) -> bool:
  """Whether `layer` is a mixture of experts."""
  if not config['n_routed_experts']:
    return False
  if config['mlp_layer_types'] is not None:
    return config['mlp_layer_types'][layer] == 'sparse'
  return (
    layer >= config['first_k_dense_replace']
    and layer % config['moe_layer_freq'] == 0
  )


def top_indices(values: np.ndarray, count: int) -> np.ndarray:
  """Indices of the `count` largest of the last axis, ties to the lowest."""
  return np.argsort(-values, axis=-1, kind='stable')[..., :count]


def route(
  config: Config, logits: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
  """The experts of every token.

  Args:
    config: the model's flat configuration.
    logits: float32 `[T, E]`, the router's output.
    bias: float32 `[E]` for `noaux_tc`, else None. It affects the choice only;
      the weights come from the unbiased scores.

  Returns:
    `indices [T, K]` and their weights, float32 `[T, K]`.
  """
  method = config['topk_method']
  sigmoid = config['scoring_func'] == 'sigmoid'
  scores = ops.sigmoid(logits) if sigmoid else ops.softmax(logits)
  choice = scores + bias if method == 'noaux_tc' else scores
  if method != 'greedy':
    grouped = choice.reshape(len(choice), config['n_group'], -1)
    if method == 'noaux_tc':
      group_scores = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
      masked = -np.inf
    else:
      group_scores, masked = grouped.max(axis=-1), 0.0
    kept = top_indices(group_scores, config['topk_group'])
    keep = np.zeros(group_scores.shape, bool)
    np.put_along_axis(keep, kept, True, axis=-1)
    choice = np.where(keep[..., None], grouped, masked).reshape(choice.shape)
  indices = top_indices(choice, config['num_experts_per_tok'])
  weights = np.take_along_axis(scores, indices, axis=-1)
  if config['norm_topk_prob']:
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
  weights = weights * config['routed_scaling_factor']
  return indices, weights.astype(np.float32)


class ReferenceModel:
  """A decoder of the DeepSeek-V2/V3 family, batch of one, float32."""

  def __init__(self, config: Config, tensors: Mapping[str, np.ndarray]):
    """Copies the weights to float32.

    Args:
      config: a flat mapping with Hugging Face field names and
        `latent_norm_eps`, the eps of the norms on the latents.
      tensors: Hugging Face names (`model.layers.0...`) to arrays of any
        float type; experts one by one or fused.
    """
    self.config = config
    self.tensors = {k: v.astype(np.float32) for k, v in tensors.items()}
    scaling = config['rope_scaling']
    self._frequencies = ops.inverse_frequencies(
      config['qk_rope_head_dim'], config['rope_theta'], scaling
    )
    self._amplitude = ops.rope_amplitude(scaling)
    qk_head_dim = config['qk_nope_head_dim'] + config['qk_rope_head_dim']
    self._softmax_scale = qk_head_dim**-0.5
    all_dim = scaling.get('mscale_all_dim') if scaling else None
    if all_dim:
      # YaRN's temperature, once for the queries and once for the keys.
      mscale = ops.yarn_mscale(scaling['factor'], all_dim)
      self._softmax_scale *= mscale**2

  def embed(self, tokens: ArrayLike) -> np.ndarray:
    """The embeddings of `tokens [T]`, float32 `[T, M]`."""
    return self.tensors['model.embed_tokens.weight'][np.asarray(tokens)]

  def head(self, hidden: np.ndarray) -> np.ndarray:
    """Logits `[T, V]` of normed states `[T, M]`."""
    tied = self.config['tie_word_embeddings']
    name = 'model.embed_tokens.weight' if tied else 'lm_head.weight'
    return ops.linear(hidden, self.tensors[name])

  def forward(
    self,
    tokens: ArrayLike,
    positions: ArrayLike,
    cache: ListCache | None = None,
    visible: np.ndarray | None = None,
  ) -> ForwardOutput:
    """Runs T new tokens after those of a cache, which is only read.

    Args:
      tokens: integers `[T]`.
      positions: absolute positions `[T]`, for RoPE only.
      cache: committed rows, all of them seen by every new token; or None.
      visible: bool `[T, T]`, True where new token i sees new token j;
        causal if None.
    """
    positions = np.asarray(positions)
    if cache is None:
      cache = ListCache(self.config)
    if visible is None:
      visible = np.tri(len(positions), dtype=bool)
    before = np.ones((len(positions), len(cache)), bool)
    visible = np.concatenate([before, visible], axis=1)

    hidden = self.embed(tokens)
    states, rows = [], []
    for layer in range(self.config['num_hidden_layers']):
      prefix = f'model.layers.{layer}.'
      x = self._norm(hidden, prefix + 'input_layernorm')
      attended, new = self._attention(
        x, positions, cache[layer], visible, prefix + 'self_attn.'
      )
      hidden = hidden + attended
      x = self._norm(hidden, prefix + 'post_attention_layernorm')
      hidden = hidden + self._mlp(x, layer)
      states.append(hidden)
      rows.append(new)
    logits = self.head(self._norm(hidden, 'model.norm'))
    return ForwardOutput(logits, states, rows)

  def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
    eps = self.config['rms_norm_eps']
    return ops.rms_norm(x, self.tensors[name + '.weight'], eps)

  def _latent_norm(self, x: np.ndarray, name: str) -> np.ndarray:
    eps = self.config['latent_norm_eps']
    return ops.rms_norm(x, self.tensors[name + '.weight'], eps)

  def _linear(
    self, x: np.ndarray, name: str, has_bias: bool = False
  ) -> np.ndarray:
    bias = self.tensors[name + '.bias'] if has_bias else None
    return ops.linear(x, self.tensors[name + '.weight'], bias)

  def _rope(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return ops.apply_rope(
      x,
      positions,
      self._frequencies,
      self._amplitude,
      self.config['rope_interleave'],
    )

  def _queries(
    self, x: np.ndarray, positions: np.ndarray, prefix: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """The heads' q_nope and rotated q_rope `[T, H, P]`."""
    config = self.config
    if config['q_lora_rank'] is None:
      q = self._linear(x, prefix + 'q_proj')
    else:
      q = self._linear(x, prefix + 'q_a_proj', config['attention_bias'])
      q = self._latent_norm(q, prefix + 'q_a_layernorm')
      q = self._linear(q, prefix + 'q_b_proj')
    q = q.reshape(len(x), config['num_attention_heads'], -1)
    q_nope, q_rope = np.split(q, [config['qk_nope_head_dim']], axis=-1)
    return q_nope, self._rope(q_rope, positions)

  def _attention(
    self,
    x: np.ndarray,
    positions: np.ndarray,
    cached: Rows,
    visible: np.ndarray,
    prefix: str,
  ) -> tuple[np.ndarray, Rows]:
    """Attends from `x [T, M]` to S cached and T new rows.

    `visible` is bool `[T, S + T]`. The result is the update of the residual
    stream `[T, M]` and the new cache rows.
    """
    config = self.config
    q_nope, q_rope = self._queries(x, positions, prefix)
    compressed = self._linear(
      x, prefix + 'kv_a_proj_with_mqa', config['attention_bias']
    )
    latent, k_rope = np.split(compressed, [config['kv_lora_rank']], axis=-1)
    latent = self._latent_norm(latent, prefix + 'kv_a_layernorm')
    k_rope = self._rope(k_rope[:, None], positions)[:, 0]
    all_latents = np.concatenate([cached[0], latent])
    all_k_ropes = np.concatenate([cached[1], k_rope])

    expanded = self._linear(all_latents, prefix + 'kv_b_proj')
    expanded = expanded.reshape(
      len(all_latents), config['num_attention_heads'], -1
    )
    k_nope, v = np.split(expanded, [config['qk_nope_head_dim']], axis=-1)
    scores = np.einsum('tnd,snd->nts', q_nope, k_nope, optimize=True)
    scores += np.einsum('tnd,sd->nts', q_rope, all_k_ropes, optimize=True)
    probs = ops.masked_softmax(scores * self._softmax_scale, visible)
    # 0 times NaN is NaN, so masked rows must be finite. A token that sees a NaN
    # row has a NaN weight already.
    v = np.where(np.isfinite(v), v, 0)
    mixed = np.einsum('nts,snd->tnd', probs, v, optimize=True)
    out = self._linear(
      mixed.reshape(len(x), -1), prefix + 'o_proj', config['attention_bias']
    )
    return out, (latent, k_rope)

  def _mlp(self, x: np.ndarray, layer: int) -> np.ndarray:
    prefix = f'model.layers.{layer}.mlp.'
    if not is_sparse(self.config, layer):
      return self._swiglu(x, prefix)
    y = self._routed(x, prefix)
    if self.config['n_shared_experts']:
      y = y + self._swiglu(x, prefix + 'shared_experts.')
    return y

  def _routed(self, x: np.ndarray, prefix: str) -> np.ndarray:
    """The weighted sum of every row's experts, without capacity limits."""
    bias = self.tensors.get(prefix + 'gate.e_score_correction_bias')
    logits = self._linear(x, prefix + 'gate')
    indices, weights = route(self.config, logits, bias)
    y = np.zeros_like(x)
    for expert in np.unique(indices):
      row, slot = np.nonzero(indices == expert)
      out = ops.swiglu(x[row], *self._expert(prefix, expert))
      y[row] += weights[row, slot, None] * out
    return y

  def _expert(self, prefix: str, expert: int) -> tuple[np.ndarray, ...]:
    """gate, up and down of one expert, stored fused or one by one."""
    fused = self.tensors.get(prefix + 'experts.gate_up_proj')
    if fused is None:
      return self._swiglu_weights(f'{prefix}experts.{expert}.')
    gate, up = np.split(fused[expert], 2)
    return gate, up, self.tensors[prefix + 'experts.down_proj'][expert]

  def _swiglu_weights(self, prefix: str) -> tuple[np.ndarray, ...]:
    names = ('gate_proj', 'up_proj', 'down_proj')
    return tuple(self.tensors[f'{prefix}{name}.weight'] for name in names)

  def _swiglu(self, x: np.ndarray, prefix: str) -> np.ndarray:
    return ops.swiglu(x, *self._swiglu_weights(prefix))
