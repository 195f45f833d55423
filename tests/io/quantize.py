"""Quantises weights as checkpoints hold them, in plain NumPy loops.

Written from the formats' descriptions and sharing nothing with the reader.
"""

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def int4(weight, group=32, scale_dtype=ml_dtypes.bfloat16):
  """`[O, I]` -> packed `[O, I / 8]` int32, scales `[O, I / group]`, exact."""
  rows, columns = weight.shape
  packed = np.zeros((rows, columns // 8), np.uint32)
  scales = np.zeros((rows, columns // group), scale_dtype)
  exact = np.zeros((rows, columns), np.float32)
  for o in range(rows):
    for g in range(columns // group):
      run = slice(g * group, (g + 1) * group)
      scale = scale_dtype(max(np.abs(weight[o, run]).max(), 1e-6) / 7)
      scales[o, g] = scale
      q = np.clip(np.rint(weight[o, run] / np.float32(scale)), -8, 7)
      exact[o, run] = q * np.float32(scale)
      for i, value in enumerate(q.astype(int), run.start):
        packed[o, i // 8] |= np.uint32(int(value + 8) << (4 * (i % 8)))
  return packed.view(np.int32), scales, exact


def fp8(weight, block=(128, 128)):
  """`[O, I]` -> float8 `[O, I]`, float32 scales of its blocks, exact."""
  rows, columns = weight.shape
  values = np.zeros((rows, columns), FP8)
  row_blocks, column_blocks = -(-rows // block[0]), -(-columns // block[1])
  scales = np.zeros((row_blocks, column_blocks), np.float32)
  exact = np.zeros((rows, columns), np.float32)
  for r in range(row_blocks):
    for c in range(column_blocks):
      at = (
        slice(r * block[0], (r + 1) * block[0]),
        slice(c * block[1], (c + 1) * block[1]),
      )
      scale = np.float32(max(np.abs(weight[at]).max(), 1e-6) / 448)
      scales[r, c] = scale
      values[at] = (weight[at] / scale).astype(FP8)
      exact[at] = values[at].astype(np.float32) * scale
  return values, scales, exact
