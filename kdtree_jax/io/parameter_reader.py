"""One tensor after another from a checkpoint to the device."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import DTypeLike

from kdtree_jax.io.checkpoint_tensors import Match
from kdtree_jax.io.files import show
from kdtree_jax.io.finite import all_finite, check_finite
from kdtree_jax.io.quantization import (
  PACKED,
  SCALE,
  SCALE_INV,
  SHAPE,
  Quantization,
)
from kdtree_jax.io.tensors import CheckpointError, TensorSource
from pallas_kernels.quantized import INT4_PER_WORD, QuantizedArray, dequantize

# Called with the size in bytes of each tensor that was read.
Progress = Callable[[int], None]

_SCALES = {'int4': SCALE, 'fp8': SCALE_INV}
# The largest magnitude of a value, which its scale multiplies.
_LARGEST = {'int4': 8, 'fp8': 448}

# Tensors announced to the operating system at once; it reads them in parallel.
_PREFETCH = 16

_dequantize = jax.jit(dequantize, static_argnums=1)


class ParameterReader:
  """Reads parameters by canonical name onto the device.

  Attributes:
    match: which tensor is which parameter.
  """

  def __init__(
    self,
    source: TensorSource,
    match: Match,
    dtype: DTypeLike,
    *,
    source_name: str,
    quantization: Quantization | None = None,
    weights_dtype: DTypeLike | None = None,
    progress: Progress | None = None,
  ):
    """Prepares reading; the arguments are those of `target_params`."""
    self.match = match
    self._source, self._source_name = source, source_name
    self._dtype = np.dtype(dtype)
    self._weights_dtype = (
      None if weights_dtype is None else np.dtype(weights_dtype)
    )
    self._block = (1, 1) if quantization is None else quantization.block
    self._progress = progress
    self._order = list(match.names)
    self._index = {name: i for i, name in enumerate(self._order)}

  def plain(self, name: str, dtype: DTypeLike | None = None) -> jax.Array:
    """A tensor that is stored plain; `dtype` None: that of the model.

    Always a copy: on a CPU JAX would otherwise share the source's memory.
    """
    value = self._view(name)
    if dtype is None:
      if self._weights_dtype is not None:
        value = _cast(value, self._weights_dtype)
      dtype = self._dtype
    value = _cast(value, np.dtype(dtype))
    if not all_finite(value):
      raise CheckpointError(
        f'{self._source_name}: tensor {show(self._own(name))} holds NaN or '
        f'infinity, or is too large for {value.dtype.name}'
      )
    out = jnp.array(value, copy=True)
    self._done(name)
    return out

  def parameter(self, name: str) -> jax.Array | QuantizedArray:
    """A tensor, still quantised where it is and `weights_dtype` is None."""
    format = self.match.format(name)
    if format is None or self._weights_dtype is not None:
      return self.dequantized(name)
    return self._quantized(name, format)

  def dequantized(self, name: str) -> jax.Array:
    """A tensor in the model's dtype."""
    format = self.match.format(name)
    if format is None:
      return self.plain(name)
    array = self._quantized(name, format)
    return _dequantize(array, self._weights_dtype or self._dtype).astype(
      self._dtype
    )

  def stacked(self, names: list[list[str]]) -> jax.Array | QuantizedArray:
    """A stack `[E, parts * O, I]` of the named projections of each expert."""
    formats = {self._storage(name): name for row in names for name in row}
    if len(formats) > 1:
      odd = show(list(formats.values())[-1])
      raise CheckpointError(
        f'{self._source_name}: {odd} is not stored as the other experts of '
        'its layer'
      )
    stacks: list[jax.Array] = []
    part = None
    for expert, row in enumerate(names):
      for i, name in enumerate(row):
        part = self.parameter(name)
        leaves = jax.tree.leaves(part)
        if not stacks:
          shape = (len(names), len(row))
          stacks = [
            jnp.zeros((shape[0], shape[1] * x.shape[0], x.shape[1]), x.dtype)
            for x in leaves
          ]
        stacks = [
          _store(stack, leaf, expert, i * leaf.shape[0])
          for stack, leaf in zip(stacks, leaves, strict=True)
        ]
    jax.block_until_ready(stacks)
    if not isinstance(part, QuantizedArray):
      return stacks[0]
    values, scales = stacks
    return QuantizedArray(
      values, scales, part.format, part.block, len(names[0])
    )

  def _storage(self, name: str) -> tuple[str | None, str | None]:
    """Format and dtype of scales, which all parts of a stack must share."""
    format = self.match.format(name)
    if format is None:
      return None, None
    scales = name.removesuffix('weight') + _SCALES[format]
    return format, self._source.dtype(self._own(scales))

  def _quantized(self, name: str, format: str) -> QuantizedArray:
    """A weight as it is stored, checked."""
    stem = name.removesuffix('weight')
    values = stem + PACKED if format == 'int4' else name
    scales = stem + _SCALES[format]
    view = self._view(values)
    try:
      if format == 'int4':
        self._check_shape(stem, view.shape)
      else:
        check_finite(self._own(values), view)
      check_finite(self._own(scales), self._view(scales), _LARGEST[format])
    except CheckpointError as e:
      raise CheckpointError(f'{self._source_name}: {e}') from e
    array = QuantizedArray(
      jnp.array(view, copy=True),
      jnp.array(self._view(scales), copy=True),
      format,
      self._block,
    )
    self._done(values)
    self._done(scales)
    return array

  def check_tied_head(self) -> None:
    """Refuses a stored head that differs from the embedding it is tied to.

    Raises:
      CheckpointError: names both tensors.
    """
    head = self.match.tied_head
    if head is None:
      return
    embedding = self._own('model.embed_tokens.weight')
    tables = (self._source.view(name) for name in (head, embedding))
    # Row by row, because a comparison copies both sides.
    rows = zip(*tables, strict=True)
    wide = np.dtype(np.float32)
    if not all(
      np.array_equal(_cast(one, wide), _cast(other, wide))
      for one, other in rows
    ):
      raise CheckpointError(
        f'{self._source_name}: tensor {show(head)} differs from '
        f'{show(embedding)}, to which tie_word_embeddings ties it; remove the '
        'tensor, or set tie_word_embeddings to false'
      )
    self._source.release(head)

  def _check_shape(self, stem: str, packed: tuple[int, ...]) -> None:
    """Compares `weight_shape`, if there is one, with the packed weight."""
    if stem + SHAPE not in self.match.names:
      return
    stated = self._view(stem + SHAPE).tolist()
    known = [packed[0], packed[1] * INT4_PER_WORD]
    if stated != known:
      raise CheckpointError(
        f'tensor {show(self._own(stem + SHAPE))} is {stated}, but the packed '
        f'weight is {known}'
      )

  def _own(self, name: str) -> str:
    """The source's name of a tensor."""
    return self.match.names.get(name, name)

  def _view(self, name: str) -> np.ndarray:
    index = self._index[name]
    if index % _PREFETCH == 0:
      ahead = self._order[index : index + 2 * _PREFETCH]
      self._source.prefetch(self._own(each) for each in ahead)
    return self._source.view(self._own(name))

  def _done(self, name: str) -> None:
    own = self._own(name)
    size = self._source.view(own).nbytes
    self._source.release(own)
    if self._progress is not None:
      self._progress(size)


@functools.partial(jax.jit, donate_argnums=0)
def _store(
  stack: jax.Array, part: jax.Array, expert: int, row: int
) -> jax.Array:
  """Writes one projection into a stack, in place.

  float8 is written as bytes: XLA's CPU backend would convert the whole stack.
  """
  dtype = stack.dtype
  if dtype.itemsize == 1:
    stack, part = (
      lax.bitcast_convert_type(x, jnp.uint8) for x in (stack, part)
    )
  stack = lax.dynamic_update_slice(stack, part[None], (expert, row, 0))
  return lax.bitcast_convert_type(stack, dtype)


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
  # Rounds to nearest even. Overflow gives infinity, which is refused later.
  with np.errstate(over='ignore', invalid='ignore'):
    return value.astype(dtype, copy=False)
