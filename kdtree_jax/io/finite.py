"""Weights that are no numbers are refused, in one look at each of them."""

import numpy as np

from kdtree_jax.io.files import show
from kdtree_jax.io.tensors import CheckpointError

# The bit pattern of infinity, that of NaN in a float8 that has no infinity:
# from here on, patterns of positive values are not finite.
_FIRST = {
  'float32': 0x7F800000,
  'float16': 0x7C00,
  'bfloat16': 0x7F80,
  'float8_e4m3fn': 0x7F,
}


def all_finite(values: np.ndarray, factor: int = 1) -> bool:
  """Whether all values, and their products with a factor, are finite.

  Copies nothing. Bit patterns are ordered as integers: as signed ones by the
  positive values, as unsigned ones by the negative values.

  Args:
    values: of any shape, in a dtype that weights are stored in.
    factor: the largest number that they will be multiplied by.
  """
  dtype, size = values.dtype, values.dtype.itemsize
  first = _FIRST[dtype.name]
  if factor > 1:
    largest = float(np.array(first - 1, f'u{size}').view(dtype)) / factor
    # The largest value that would do is itself taken for too large.
    first = int(np.array(largest, dtype).view(f'u{size}'))
  signed = values.view(f'i{size}').max(initial=0)
  unsigned = values.view(f'u{size}').max(initial=0)
  return int(signed) < first and int(unsigned) < first + (1 << 8 * size - 1)


def check_finite(name: str, values: np.ndarray, factor: int = 1) -> None:
  """Refuses what would make NaN of other weights or of hidden states.

  Raises:
    CheckpointError: names the tensor.
  """
  if not all_finite(values, factor):
    many = ', or products that are too large' if factor > 1 else ''
    raise CheckpointError(f'tensor {show(name)} holds NaN or infinity{many}')
