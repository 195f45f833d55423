"""Elementary operations of the reference, on the last axes of arrays."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Fields of a Hugging Face config, or of its rope_scaling.
Config = Mapping[str, Any]


def linear(
  x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
  """The product `[..., out]` of `x [..., in]` with a weight `[out, in]`."""
  y = x @ weight.T
  return y if bias is None else y + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
  """`x [..., n]` divided by its root mean square, then scaled by `weight`."""
  variance = np.mean(np.square(x), axis=-1, keepdims=True)
  return x / np.sqrt(variance + np.float32(eps)) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
  """The logistic function, without overflow or loss of small values."""
  return np.exp(-np.logaddexp(np.float32(0), -x))


def softmax(x: np.ndarray) -> np.ndarray:
  """Softmax over the last axis."""
  weights = np.exp(x - x.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def masked_softmax(x: np.ndarray, visible: np.ndarray) -> np.ndarray:
  """Softmax of `x` over the keys where `visible` (broadcast) is True.

  A row that sees no key is all zeros, not NaN, as for padded queries.
  """
  x = np.where(visible, x, -np.inf)
  highest = x.max(axis=-1, keepdims=True)
  weights = np.exp(x - np.where(np.isneginf(highest), 0, highest))
  total = weights.sum(axis=-1, keepdims=True)
  return weights / np.where(total == 0, 1, total)


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Log softmax over the last axis, float64, never above zero."""
  shifted = logits.astype(np.float64)
  shifted -= shifted.max(axis=-1, keepdims=True)
  total = np.exp(shifted).sum(axis=-1, keepdims=True)
  return np.minimum(shifted - np.log(total), 0.0)


def swiglu(
  x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> np.ndarray:
  """`down(silu(gate x) * up x)`, each weight `[out, in]`."""
  gated = linear(x, gate)
  return linear(gated * sigmoid(gated) * linear(x, up), down)


def yarn_mscale(factor: float, mscale: float) -> float:
  """YaRN's magnitude correction: `0.1 * mscale * ln(factor) + 1`."""
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(
  dim: int, theta: float, scaling: Config | None
) -> np.ndarray:
  """Rotation frequencies of RoPE, blended by YaRN if `scaling` is given.

  Source: Peng et al., "YaRN", section 3.2: dimensions that turn more than
  `beta_fast` times within the original context keep their frequency, those that
  turn less than `beta_slow` times are slowed by `factor`, with a linear ramp
  between.

  Args:
    dim: rotated dimensions, even.
    theta: the base of the frequencies.
    scaling: None or a mapping with `factor`,
      `original_max_position_embeddings`, `beta_fast` and `beta_slow`.

  Returns:
    Radians per position, float32 `[dim / 2]`.
  """
  frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
  if scaling is None:
    return frequencies.astype(np.float32)

  def dimension_of(rotations: float) -> float:
    span = scaling['original_max_position_embeddings']
    turns = math.log(span / (rotations * 2 * math.pi))
    return dim * turns / (2 * math.log(theta))

  low = max(math.floor(dimension_of(scaling.get('beta_fast') or 32)), 0)
  high = min(math.ceil(dimension_of(scaling.get('beta_slow') or 1)), dim - 1)
  width = (high - low) or 0.001
  ramp = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
  slowed = frequencies / scaling['factor']
  return (slowed * ramp + frequencies * (1 - ramp)).astype(np.float32)


def rope_amplitude(scaling: Config | None) -> float:
  """The factor on cosines and sines; 1 without YaRN."""
  if scaling is None:
    return 1.0
  if scaling.get('attention_factor') is not None:
    return float(scaling['attention_factor'])
  factor = scaling['factor']
  mscale, all_dim = scaling.get('mscale'), scaling.get('mscale_all_dim')
  if mscale and all_dim:
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
  return yarn_mscale(factor, 1.0)


def apply_rope(
  x: np.ndarray,
  positions: np.ndarray,
  frequencies: np.ndarray,
  amplitude: float,
  interleave: bool,
) -> np.ndarray:
  """`x [T, heads, dim]` rotated to `positions [T]`, in the same layout.

  The angles are float32 products, as in the published implementations: exact
  angles would differ from theirs by `position * 6e-8` radians.

  Args:
    x: float32 `[T, heads, dim]`.
    positions: integers `[T]`.
    frequencies: float32 `[dim / 2]`.
    amplitude: factor on cosine and sine.
    interleave: True if dimensions `(2i, 2i + 1)` form a pair, False if
      `(i, i + dim / 2)` do.
  """
  angles = positions.astype(np.float32)[:, None, None] * frequencies
  cos = np.cos(angles) * np.float32(amplitude)
  sin = np.sin(angles) * np.float32(amplitude)
  half = x.shape[-1] // 2
  if interleave:
    first, second = x[..., 0::2], x[..., 1::2]
  else:
    first, second = x[..., :half], x[..., half:]
  rotated = (first * cos - second * sin, second * cos + first * sin)
  if interleave:
    return np.stack(rotated, axis=-1).reshape(x.shape)
  return np.concatenate(rotated, axis=-1)
