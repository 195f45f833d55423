"""DFlash, the block-diffusion drafter, in float32 NumPy.

Source: the layout of z-lab's checkpoints. One forward over a block, which is
the last committed token and mask tokens, predicts every position of the block.
The block sees all of itself, and features from the target's layers for all
earlier tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kdtree_jax.reference import layers as ops
from kdtree_jax.reference.layers import Config
from kdtree_jax.reference.model import ReferenceModel


def drafter_rope(config: Config) -> tuple[float, Config | None, float]:
  """RoPE's theta, YaRN's scaling or None, and the amplitude of cos and sin."""
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  theta = rope.get('rope_theta') or config['rope_theta']
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  if kind == 'default':
    return theta, None, 1.0
  if kind not in ('yarn', 'deepseek_yarn'):
    raise ValueError(f'drafter rope type {kind!r} is not supported')
  # deepseek_yarn is YaRN with an amplitude of 1.
  amplitude = ops.rope_amplitude(rope) if kind == 'yarn' else 1.0
  return theta, rope, amplitude


class ReferenceDrafter:
  """A drafter without state: the caller keeps the context features."""

  def __init__(
    self,
    config: Config,
    tensors: Mapping[str, np.ndarray],
    target: ReferenceModel,
  ):
    """Copies the weights to float32.

    Args:
      config: a `config.json` of z-lab.
      tensors: its tensors, with or without the prefix `model.`.
      target: the model whose embedding and head the drafter uses.

    Raises:
      ValueError: the configuration has windows or causal blocks.
    """
    if 'sliding_attention' in config.get('layer_types', ()):
      raise ValueError('sliding_attention is not supported')
    options = config['dflash_config']
    unknown = set(options) - {'target_layer_ids', 'mask_token_id'}
    unknown -= {'block_size', 'num_target_layers'}
    if unknown:
      raise ValueError(f'dflash_config keys not supported: {sorted(unknown)}')
    self.config = config
    self.target_layer_ids = tuple(options['target_layer_ids'])
    self.mask_token_id = options['mask_token_id']
    self.block_size = config.get('block_size') or options['block_size']
    self._target = target
    self._tensors = {
      name.removeprefix('model.'): value.astype(np.float32)
      for name, value in tensors.items()
    }
    theta, scaling, self._amplitude = drafter_rope(config)
    self._frequencies = ops.inverse_frequencies(
      config['head_dim'], theta, scaling
    )

  def features(self, layers: Sequence[np.ndarray]) -> np.ndarray:
    """Features `[T, M]` from the target's states of T tokens.

    Args:
      layers: the residual stream after every target layer, each `[T, M]`.
    """
    taps = [layers[layer] for layer in self.target_layer_ids]
    fused = self._linear(np.concatenate(taps, axis=-1), 'fc')
    return self._norm(fused, 'hidden_norm')

  def draft(
    self, context: np.ndarray, root: int, block_size: int | None = None
  ) -> np.ndarray:
    """Logits of the positions after the root, float32 `[block_size - 1, V]`.

    Args:
      context: features `[S, M]` of all committed tokens before the root, at
        positions 0 to S - 1; the root is at S.
      root: the last committed token.
      block_size: tokens in the block, root included; the config's if None.
    """
    masks = (block_size or self.block_size) - 1
    hidden = self._target.embed([root] + [self.mask_token_id] * masks)
    for layer in range(self.config['num_hidden_layers']):
      prefix = f'layers.{layer}.'
      x = self._norm(hidden, prefix + 'input_layernorm')
      hidden = hidden + self._attention(context, x, prefix + 'self_attn.')
      x = self._norm(hidden, prefix + 'post_attention_layernorm')
      names = ('gate_proj', 'up_proj', 'down_proj')
      weights = (self._tensors[f'{prefix}mlp.{n}.weight'] for n in names)
      hidden = hidden + ops.swiglu(x, *weights)
    return self._target.head(self._norm(hidden, 'norm')[1:])

  def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
    eps = self.config['rms_norm_eps']
    return ops.rms_norm(x, self._tensors[name + '.weight'], eps)

  def _linear(
    self, x: np.ndarray, name: str, has_bias: bool = False
  ) -> np.ndarray:
    bias = self._tensors[name + '.bias'] if has_bias else None
    return ops.linear(x, self._tensors[name + '.weight'], bias)

  def _heads(self, x: np.ndarray, name: str) -> np.ndarray:
    """The projection of `x [T, M]` to heads `[T, n, head_dim]`."""
    projected = self._linear(x, name, self.config['attention_bias'])
    return projected.reshape(len(x), -1, self.config['head_dim'])

  def _attention(
    self, context: np.ndarray, x: np.ndarray, prefix: str
  ) -> np.ndarray:
    """Attends from the block `x [T, M]` to the context and all of itself."""
    config = self.config
    both = np.concatenate([context, x])
    positions = np.arange(len(both))

    def rotate(heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
      return ops.apply_rope(
        heads, positions, self._frequencies, self._amplitude, interleave=False
      )

    q = self._norm(self._heads(x, prefix + 'q_proj'), prefix + 'q_norm')
    k = self._norm(self._heads(both, prefix + 'k_proj'), prefix + 'k_norm')
    q = rotate(q, positions[len(context) :])
    k = rotate(k, positions)
    v = self._heads(both, prefix + 'v_proj')
    # Grouped queries: consecutive query heads share one key and value head.
    group = config['num_attention_heads'] // config['num_key_value_heads']
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum('tnd,snd->nts', q, k, optimize=True)
    probs = ops.softmax(scores * np.float32(config['head_dim'] ** -0.5))
    mixed = np.einsum('nts,snd->tnd', probs, v, optimize=True)
    return self._linear(
      mixed.reshape(len(x), -1), prefix + 'o_proj', config['attention_bias']
    )
