"""The reference's cache: the committed rows of every layer, in order."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kdtree_jax.reference.layers import Config

# One layer's rows: latent [T, kv_lora_rank], k_rope [T, qk_rope_head_dim].
Rows = tuple[np.ndarray, np.ndarray]


class ListCache:
  """A cache that chosen rows are appended to; `len` is its committed tokens."""

  def __init__(self, config: Config):
    latent = np.zeros((0, config['kv_lora_rank']), np.float32)
    k_rope = np.zeros((0, config['qk_rope_head_dim']), np.float32)
    self._layers = [(latent, k_rope)] * config['num_hidden_layers']

  def __len__(self) -> int:
    return len(self._layers[0][0])

  def __getitem__(self, layer: int) -> Rows:
    """The rows `(latent [S, R], k_rope [S, P])` of one layer."""
    return self._layers[layer]

  def append(self, rows: Sequence[Rows], indices: ArrayLike) -> None:
    """Appends `rows[layer][indices]` of every layer, in that order."""
    taken = np.asarray(indices, np.int64)
    self._layers = [
      (
        np.concatenate([latent, new_latent[taken]]),
        np.concatenate([k_rope, new_k_rope[taken]]),
      )
      for (latent, k_rope), (new_latent, new_k_rope) in zip(
        self._layers, rows, strict=True
      )
    ]
