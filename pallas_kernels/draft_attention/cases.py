"""Inputs of draft attention, for the tests and the bench."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import (
  INTERPRET,
  Case,
  check_attention,
  random_generator,
)
from pallas_kernels.draft_attention import api, mosaic_gpu

_DIM = 128
_LAYERS, LAYER = 2, 1
_CAPACITY = 32832
SMALL_STATIC: dict[str, Any] = {
  'scale': _DIM**-0.5,
  'causal': False,
  'window': None,
  'window_from_root': False,
}


def cases() -> list[Case]:
  """The shapes of published drafters, 16 slots and 32 heads; small ones."""
  return [
    _case('16 slots x 8 x 4 heads, context 2048 of 32832', 8, 4, 2048),
    _case('16 slots x 8 x 4 heads, context 32768 of 32832', 8, 4, 32768),
    _case('16 slots x 4 x 8 heads, context 2048 of 32832', 4, 8, 2048),
    _case(
      '16 slots x 8 x 4 heads, window 2048, context 32768', 8, 4, 32768, 2048
    ),
    *small_cases(),
  ]


def small_cases() -> list[Case]:
  """Edges of every size and all masks; all run in the interpreter."""
  causal = {'causal': True, 'window': 70}
  from_root = {'window': 3, 'window_from_root': True}
  return [
    # Four heads of 16 slots are a tile.
    _small('16 slots x 1 x 4 heads', 16, 1, 4, 72, [65]),
    # Some splits have no key.
    _small(
      'lengths about a tile', 1, 2, 1, 72, [0, 1, 63, 64, 65, 72], splits=2
    ),
    _small('a full context of many tiles', 1, 1, 2, 456, [456]),
    # Three heads of 20 slots, padded to 24, are two tiles.
    _small('20 slots x 1 x 3 heads', 20, 1, 3, 8, [7]),
    _small('causal, window 70', 7, 1, 1, 200, [197], **causal),
    _small('window 3 from the root', 7, 1, 1, 200, [197], **from_root),
    _small('window 1', 7, 1, 1, 200, [197], window=1),
    _small(
      'very low scores, a scale below zero',
      2, 1, 2, 256, [250], edit=_lower_scores, scale=-1.0,
    ),
  ]  # fmt: skip


def _case(
  name: str, heads: int, group: int, length: int, window: int | None = None
) -> Case:
  slots, seen = 16, min(length, window or length)
  rows, outputs = seen + slots, slots * heads * group
  kernel, reference = (
    functools.partial(_attend, window, name)
    for name in ('mosaic_gpu', 'reference')
  )
  return Case(
    op='draft_attention',
    name=name,
    make_inputs=functools.partial(_inputs, slots, heads, group, length),
    kernel=kernel,
    reference=reference,
    check=functools.partial(check_attention, reference),
    bytes=2.0 * _DIM * (2 * heads * rows + 2 * outputs),
    flops=4.0 * _DIM * outputs * rows,
  )


def _small(
  name: str,
  slots: int,
  heads: int,
  group: int,
  capacity: int,
  lengths: Sequence[int],
  *,
  splits: int = 1,
  edit: Callable[..., tuple[Any, ...]] | None = None,
  **static: Any,
) -> Case:
  def make_inputs(key):
    inputs = small_inputs(slots, heads, group, capacity, lengths, key)
    return edit(*inputs) if edit else inputs

  static = SMALL_STATIC | static
  kernel = functools.partial(attend_small, splits=splits, **static)
  reference = functools.partial(
    api.draft_attention, layer=LAYER, implementation='reference', **static
  )
  return Case(
    op='draft_attention',
    name=name,
    make_inputs=make_inputs,
    kernel=kernel,
    reference=reference,
    check=functools.partial(check_attention, reference),
    interpreted=functools.partial(kernel, interpret=INTERPRET),
  )


@functools.partial(
  jax.jit, static_argnames=(*SMALL_STATIC, 'splits', 'interpret')
)
def attend_small(
  *inputs: jax.Array, splits: int = 1, interpret: Any = None, **static: Any
) -> jax.Array:
  """The kernel on `small_inputs`, with a given number of splits."""
  return mosaic_gpu.draft_attention(
    *inputs,
    layer=LAYER,
    splits=splits,
    interpret=interpret,
    **(SMALL_STATIC | static),
  )


def _attend(window: int | None, implementation: str, *arrays):
  return api.draft_attention(
    *arrays,
    layer=LAYER,
    scale=_DIM**-0.5,
    causal=window is not None,
    window=window,
    implementation=implementation,
  )


def _inputs(
  slots: int, heads: int, group: int, length: int, key: jax.Array
) -> tuple[Any, ...]:
  """Random values of unit variance; NaN in rows that must not matter."""
  keys, width = jax.random.split(key, 3), 2 * heads * _DIM
  draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  query = draw(keys[0], (1, slots, heads, group, _DIM))
  context = jnp.full((_LAYERS, 1, _CAPACITY, width), jnp.nan, jnp.bfloat16)
  context = context.at[LAYER, 0, :length].set(draw(keys[1], (length, width)))
  rows = draw(keys[2], (1, slots, width))
  return query, context, rows, jnp.array([length], jnp.int32)


def small_inputs(
  slots: int,
  heads: int,
  group: int,
  capacity: int,
  lengths: Sequence[int],
  key: jax.Array,
) -> tuple[jax.Array, ...]:
  """Inputs with NaN in all rows that must not be read."""
  shape = (_LAYERS, capacity, heads, group, _DIM)
  *values, committed = make_arrays(slots, lengths, shape, random_generator(key))
  arrays = (jnp.asarray(a, jnp.bfloat16) for a in values)
  return *arrays, jnp.asarray(committed)


def make_arrays(
  slots: int,
  lengths: Sequence[int],
  shape: tuple[int, ...],
  rng: np.random.Generator,
) -> tuple[np.ndarray, ...]:
  """Float64 inputs; other layers and rows from the lengths on are NaN.

  Args:
    slots: W.
    lengths: of the B sequences.
    shape: L, S, K, G and d.
    rng: draws the values.
  """
  layers, size, heads, group, dim = shape
  batch, width = len(lengths), 2 * heads * dim
  query = rng.normal(size=(batch, slots, heads, group, dim))
  context = np.full((layers, batch, size, width), np.nan)
  for b, length in enumerate(lengths):
    context[LAYER, b, :length] = rng.normal(size=(length, width))
  rows = rng.normal(size=(batch, slots, width))
  return query, context, rows, np.asarray(lengths, np.int32)


def _lower_scores(query, context, rows, lengths):
  """An edit: scores are about -1e4, and maxima rise from tile to tile."""
  ramp = jnp.asarray(np.linspace(-200, -100, 250), jnp.bfloat16)
  query = query.at[..., -1].set(-64.0)
  context = context.at[LAYER, 0, :250, _DIM - 1].set(ramp)
  rows = rows.at[..., _DIM - 1].set(-99)
  return query, context, rows, lengths
