"""Tensors of a checkpoint to parameters on the device, one after the other."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdtree_jax.config import ModelConfig
from kdtree_jax.io.checkpoint_extras import NO_EXTRAS, Extras
from kdtree_jax.io.checkpoint_tensors import (
  Match,
  match_target,
)
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
from pallas_kernels.quantized import QuantizedArray, dequantize

# Called with the bytes of a tensor when it has been read.
Progress = Callable[[int], None]

_SCALES = {'int4': SCALE, 'fp8': SCALE_INV}
# The largest magnitudes that scales multiply.
_LARGEST = {'int4': 8, 'fp8': 448}

# Tensors of which the system is told in advance; it reads them in parallel.
_PREFETCH = 16


def target_params(
  config: ModelConfig,
  source: TensorSource,
  dtype: Any,
  *,
  source_name: str,
  quantization: Quantization | None = None,
  extras: Extras = NO_EXTRAS,
  expanded: Any = None,
  progress: Progress | None = None,
) -> dict[str, Any]:
  """Loads a target: the tree of `model.abstract_params(config, dtype)`.

  All names, shapes and dtypes are checked before anything is read. A tensor
  goes to the device as it is read, an expert into its place in the stack, so
  that the host never holds more than one.

  Args:
    config: the architecture.
    source: tensors under Hugging Face names, experts fused or one by one.
    dtype: of all parameters but the router's, which are float32.
    source_name: the checkpoint's name for messages.
    quantization: how quantised tensors are stored, if there are any.
    extras: what the checkpoint may hold that is not run.
    expanded: None keeps quantised weights as they are stored; a dtype rounds
      every weight but the router's to it, and then makes it a `dtype`.
    progress: called with the bytes of each tensor that was read.

  Returns:
    Nested dict of arrays. `kv_b_proj` is split into `k_b_proj [n, r, dn]` and
    `v_b_proj [n, dv, r]`; experts are stacked, gate rows before up rows. What
    stays quantised is a QuantizedArray, except `kv_b_proj`, which is expanded
    always: its blocks of scales do not end where its heads do.

  Raises:
    CheckpointError: see `match_target`; a weight or scale that is not finite;
      or a head that is tied to the embedding and is not equal to it.
  """
  match = match_target(
    config,
    source,
    source_name=source_name,
    quantization=quantization,
    extras=extras,
  )
  reader = Reader(
    source, match, quantization, np.dtype(dtype), expanded, source_name
  )
  reader.progress = progress
  reader.check_tied_head()
  params: dict[str, Any] = {}
  for name in _weights(match):
    if '.mlp.experts.' in name:
      continue
    elif name.endswith('.kv_b_proj.weight'):
      prefix = name.removesuffix('kv_b_proj.weight')
      k_b, v_b = _split_kv_b(config, reader.expanded(name))
      insert(params, prefix + 'k_b_proj', k_b)
      insert(params, prefix + 'v_b_proj', v_b)
    elif '.mlp.gate.' in name:
      insert(params, name, reader.plain(name, np.dtype(np.float32)))
    else:
      insert(params, name, reader.parameter(name))
  for layer in range(config.num_hidden_layers):
    if config.is_moe_layer(layer):
      for name, value in _experts(config, reader, layer):
        insert(params, name, value)
  return params


def _weights(match: Match) -> Iterator[str]:
  """Names of parameters, those of quantised ones without their parts."""
  for name in match.names:
    stem, _, part = name.rpartition('.')
    if part == PACKED:
      yield f'{stem}.weight'
    elif part not in (SCALE, SCALE_INV, SHAPE):
      yield name


def _experts(
  config: ModelConfig, reader: 'Reader', layer: int
) -> Iterator[tuple[str, Any]]:
  """The two stacks of a layer's routed experts."""
  e, h = config.n_routed_experts, config.hidden_size
  width = config.moe_intermediate_size
  prefix = f'model.layers.{layer}.mlp.experts.'
  for stack, projections, rows, columns in (
    ('gate_up_proj', ('gate_proj', 'up_proj'), width, h),
    ('down_proj', ('down_proj',), h, width),
  ):
    if prefix + stack in reader.match.names:
      yield prefix + stack, reader.plain(prefix + stack)
      continue
    names = [
      [f'{prefix}{expert}.{projection}.weight' for projection in projections]
      for expert in range(e)
    ]
    yield prefix + stack, reader.stacked(names, (rows, columns))


@functools.partial(jax.jit, donate_argnums=0)
def _store(stack: jax.Array, part: jax.Array, expert: Any, row: Any):
  """Writes one projection into its place, in place.

  float8 goes as bytes: XLA's CPU backend would convert the whole stack.
  """
  dtype = stack.dtype
  if dtype.itemsize == 1:
    stack, part = (
      lax.bitcast_convert_type(x, jnp.uint8) for x in (stack, part)
    )
  stack = lax.dynamic_update_slice(stack, part[None], (expert, row, 0))
  return lax.bitcast_convert_type(stack, dtype)


_dequantize = jax.jit(dequantize, static_argnums=1)


class Reader:
  """Reads parameters by canonical name onto the device.

  Attributes:
    match: which tensor is which parameter.
    progress: see `target_params`.
  """

  def __init__(
    self,
    source: TensorSource,
    match: Match,
    quantization: Quantization | None,
    dtype: np.dtype,
    rounded: Any,
    source_name: str,
  ):
    self.match, self.progress = match, None
    self._source, self._quantization = source, quantization
    self._dtype, self._source_name = dtype, source_name
    self._rounded = None if rounded is None else np.dtype(rounded)
    self._order = list(match.names)
    self._places = {name: i for i, name in enumerate(self._order)}

  def plain(self, name: str, dtype: np.dtype | None = None) -> jax.Array:
    """A tensor that is stored as numbers.

    Always a copy: on a CPU JAX would otherwise share the source's memory.
    """
    value = self._view(name)
    if dtype is None:
      if self._rounded is not None:
        value = _cast(value, self._rounded)
      dtype = self._dtype
    value = _cast(value, dtype)
    if not all_finite(value):
      raise CheckpointError(
        f'{self._source_name}: tensor {show(self._own(name))} holds NaN or '
        f'infinity, or is too large for {dtype.name}'
      )
    out = jnp.array(value, copy=True)
    self._done(name)
    return out

  def parameter(self, name: str) -> jax.Array | QuantizedArray:
    """A linear weight, or whatever else is stored as numbers."""
    if self._form(name) is None:
      return self.plain(name)
    array = self._quantized(name)
    return array if self._rounded is None else self._dequantize(array)

  def expanded(self, name: str) -> jax.Array:
    """A linear weight as numbers, in the model's dtype."""
    if self._form(name) is None:
      return self.plain(name)
    return self._dequantize(self._quantized(name))

  def stacked(
    self, names: list[list[str]], shape: tuple[int, int]
  ) -> jax.Array | QuantizedArray:
    """`[E, parts * O, I]`: for each expert its parts below each other."""
    forms = {self._storage(name): name for row in names for name in row}
    if len(forms) > 1:
      odd = show(list(forms.values())[-1])
      raise CheckpointError(
        f'{self._source_name}: {odd} is not stored as the other experts of '
        'its layer'
      )
    ((form, _),) = forms
    keep = form is not None and self._rounded is None
    parts = len(names[0])
    stacks: list[jax.Array] = []
    for expert, row in enumerate(names):
      for i, name in enumerate(row):
        part = self._quantized(name) if keep else self.expanded(name)
        stacks = _store_leaves(stacks, part, expert, i, len(names), parts)
    jax.block_until_ready(stacks)
    if not keep:
      return stacks[0]
    return QuantizedArray(*stacks, form, self._quantization.block, parts)

  def _form(self, name: str) -> str | None:
    return self.match.form(name)

  def _storage(self, name: str) -> tuple[str | None, str | None]:
    """What the parts of one stack have in common."""
    form = self._form(name)
    if form is None:
      return None, None
    scales = name.removesuffix('weight') + _SCALES[form]
    return form, self._source.dtype(self._own(scales))

  def _dequantize(self, array: QuantizedArray) -> jax.Array:
    rounded = self._dtype if self._rounded is None else self._rounded
    return _dequantize(array, rounded).astype(self._dtype)

  def _quantized(self, name: str) -> QuantizedArray:
    """One projection as it is stored, checked."""
    stem, form = name.removesuffix('weight'), self._form(name)
    values = stem + PACKED if form == 'int4' else name
    scales = stem + _SCALES[form]
    view = self._view(values)
    try:
      if form == 'int4':
        self._check_shape(stem, view.shape)
      else:
        check_finite(self._own(values), view)
      largest = _LARGEST[form]
      check_finite(self._own(scales), self._view(scales), largest)
    except CheckpointError as e:
      raise CheckpointError(f'{self._source_name}: {e}') from e
    array = QuantizedArray(
      jnp.array(view, copy=True),
      jnp.array(self._view(scales), copy=True),
      form,
      self._quantization.block,
    )
    self._done(values)
    self._done(scales)
    return array

  def check_tied_head(self) -> None:
    """A stored head of a model without one of its own repeats the embedding.

    Raises:
      CheckpointError: it does not.
    """
    head = self.match.tied_head
    if head is None:
      return
    embedding = self._own('model.embed_tokens.weight')
    tables = (self._source.view(name) for name in (head, embedding))
    # Row by row: a comparison makes an array of what it compares.
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
    """`weight_shape`, which may be absent, repeats what is known."""
    if stem + SHAPE not in self.match.names:
      return
    stated = self._view(stem + SHAPE).tolist()
    known = [packed[0], packed[1] * 8]
    if stated != known:
      raise CheckpointError(
        f'tensor {show(self._own(stem + SHAPE))} is {stated}, but the packed '
        f'weight is {known}'
      )

  def _own(self, name: str) -> str:
    return self.match.names.get(name, name)

  def _view(self, name: str) -> np.ndarray:
    place = self._places[name]
    if place % _PREFETCH == 0:
      ahead = self._order[place : place + 2 * _PREFETCH]
      self._source.prefetch(self._own(each) for each in ahead)
    return self._source.view(self._own(name))

  def _done(self, name: str) -> None:
    own = self._own(name)
    size = self._source.view(own).nbytes
    self._source.release(own)
    if self.progress is not None:
      self.progress(size)


def _store_leaves(
  stacks: list[jax.Array],
  part: jax.Array | QuantizedArray,
  expert: int,
  index: int,
  experts: int,
  parts: int,
) -> list[jax.Array]:
  """Puts the arrays of one projection into stacks, made with the first one."""
  leaves = jax.tree.leaves(part)
  if not stacks:
    stacks = [
      jnp.zeros((experts, parts * leaf.shape[0], leaf.shape[1]), leaf.dtype)
      for leaf in leaves
    ]
  return [
    _store(stack, leaf, expert, index * leaf.shape[0])
    for stack, leaf in zip(stacks, leaves, strict=True)
  ]


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
  # Rounds to nearest even; what overflows becomes infinite. NaN is met later.
  with np.errstate(over='ignore', invalid='ignore'):
    return value.astype(dtype, copy=False)


def _split_kv_b(
  config: ModelConfig, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """`[n * (dn + dv), r]`, a head's keys before its values, in two.

  The half of the keys `[n, r, dn]`, that of the values `[n, dv, r]`.
  """
  heads, nope = config.num_attention_heads, config.qk_nope_head_dim
  weight = weight.reshape(heads, nope + config.v_head_dim, -1)
  return weight[:, :nope].swapaxes(1, 2), weight[:, nope:]


def insert(params: dict[str, Any], name: str, value: Any) -> None:
  """Files `model.layers.0.mlp.x` under `layers_0`, `mlp`, `x`."""
  path = re.sub(r'(^|\.)layers\.(\d+)\.', r'\1layers_\2.', name)
  *parents, leaf = path.removeprefix('model.').split('.')
  for parent in parents:
    params = params.setdefault(parent, {})
  params[leaf] = value
