"""Weights as quantised checkpoints store them, in one pytree for all formats.

Only weights are quantised, never activations. A product takes the dequantised
weight, `value * scale`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Weights in a word of the packed format; the lowest nibble comes first.
INT4_PER_WORD = 8
VALUE_DTYPES = {'int4': 'int32', 'fp8': 'float8_e4m3fn'}


def _static(**kwargs: Any) -> Any:
  return dataclasses.field(metadata={'static': True}, **kwargs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
  """A weight `[..., O, I]` as blocks of small values with one scale each.

  Attributes:
    values: `[..., O, I]` float8_e4m3fn (`fp8`), or `[..., O, I / 8]` int32
      words of eight nibbles u along I, the lowest first, each meaning u - 8
      (`int4`).
    scales: `[..., parts * ceil(O / parts / rows), ceil(I / columns)]` float32
      or bfloat16; a weight is its value times the scale of its block.
    format: `int4` or `fp8`.
    block: rows and columns of a block. The last one of an axis may be ragged.
    parts: number of equal runs of rows, each with blocks of its own: 2 where
      gate and up projections were quantised separately and then stacked.
  """

  values: jax.Array
  scales: jax.Array
  format: str = _static()
  block: tuple[int, int] = _static()
  parts: int = _static(default=1)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dequantised weight."""
    *rest, last = self.values.shape
    return (*rest, last * INT4_PER_WORD if self.format == 'int4' else last)

  @property
  def ndim(self) -> int:
    return self.values.ndim

  def __getitem__(self, index: Any) -> 'QuantizedArray':
    """One weight of a stack; the index of the leading axis may be traced."""
    return dataclasses.replace(
      self, values=self.values[index], scales=self.scales[index]
    )

  def dequantize(self, dtype: Any) -> jax.Array:
    """The weight `[..., O, I]`: float32 products, rounded once to `dtype`."""
    *rest, rows, columns = self.shape
    if self.format == 'int4':
      shifts = jnp.arange(0, 32, 4, dtype=jnp.int32)
      shifts = shifts.reshape((1,) * self.ndim + (INT4_PER_WORD,))
      # The shift repeats the sign bit; the mask cuts it off.
      values = ((self.values[..., None] >> shifts) & 15) - 8
    else:
      values = self.values
    run = rows // self.parts
    values = values.astype(jnp.float32)
    values = values.reshape(*rest, self.parts, run, columns)
    scales = self.scales.astype(jnp.float32)
    scales = scales.reshape(*rest, self.parts, -1, scales.shape[-1])
    scales = _spread(scales, self.block[0], run, scales.ndim - 2)
    scales = _spread(scales, self.block[1], columns, scales.ndim - 1)
    return (values * scales).reshape(self.shape).astype(dtype)

  def check(self, name: str) -> None:
    """Validates dtypes and shapes.

    Raises:
      ValueError: names the argument.
    """
    wanted = VALUE_DTYPES.get(self.format)
    if wanted is None:
      raise ValueError(f'{name}: unknown format {self.format!r}')
    if self.values.dtype.name != wanted:
      raise ValueError(
        f'{name}: expected {self.format} values as {wanted}, got '
        f'{self.values.dtype.name}'
      )
    if self.scales.dtype.name not in ('float32', 'bfloat16', 'float16'):
      raise ValueError(f'{name}: scales of dtype {self.scales.dtype.name}')
    *rest, rows, columns = self.shape
    if rows % self.parts:
      raise ValueError(f'{name}: {rows} rows are not {self.parts} equal parts')
    row_blocks = self.parts * -(-rows // self.parts // self.block[0])
    expected = (*rest, row_blocks, -(-columns // self.block[1]))
    if self.scales.shape != expected:
      raise ValueError(
        f'{name}: expected scales of shape {list(expected)}, got '
        f'{list(self.scales.shape)}'
      )


def _spread(scales: jax.Array, block: int, size: int, axis: int) -> jax.Array:
  """Repeats every scale over its block, of which the last may be shorter."""
  if block > 1:
    count = scales.shape[axis]
    scales = jnp.repeat(scales, block, axis, total_repeat_length=block * count)
  return jax.lax.slice_in_dim(scales, 0, size, axis=axis)


def dequantize(weight: Any, dtype: Any) -> jax.Array:
  """A weight that may be quantised, as a plain array.

  Only a quantised weight is converted to `dtype`.
  """
  if isinstance(weight, QuantizedArray):
    return weight.dequantize(dtype)
  return weight
