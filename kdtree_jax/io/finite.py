"""Fast checks that weights hold neither NaN nor infinity."""

import numpy as np

from kdtree_jax.io.files import show
from kdtree_jax.io.tensors import CheckpointError

# The smallest bit pattern of a positive value that is not finite: infinity, or
# NaN in a float8 without infinity.
_FIRST = {
  'float32': 0x7F800000,
  'float16': 0x7C00,
  'bfloat16': 0x7F80,
  'float8_e4m3fn': 0x7F,
}


def all_finite(values: np.ndarray, factor: int = 1) -> bool:
  """Whether all values, and their products with a factor, are finite.

  Copies nothing. As signed integers, bit patterns are ordered as the positive
  values are; as unsigned ones, the largest pattern is of a negative value.

  Args:
    values: array of any shape, in a dtype of stored weights.
    factor: the largest magnitude that they will be multiplied by.
  """
  dtype, size = values.dtype, values.dtype.itemsize
  first = _FIRST[dtype.name]
  if factor > 1:
    largest = float(np.array(first - 1, f'u{size}').view(dtype)) / factor
    # The largest allowed value itself is refused too.
    first = int(np.array(largest, dtype).view(f'u{size}'))
  signed = values.view(f'i{size}').max(initial=0)
  unsigned = values.view(f'u{size}').max(initial=0)
  return int(signed) < first and int(unsigned) < first + (1 << 8 * size - 1)


def check_finite(name: str, values: np.ndarray, factor: int = 1) -> None:
  """Refuses a tensor that holds, or whose products hold, NaN or infinity.

  Raises:
    CheckpointError: names the tensor.
  """
  if not all_finite(values, factor):
    many = ', or products that are too large' if factor > 1 else ''
    raise CheckpointError(f'tensor {show(name)} holds NaN or infinity{many}')
