"""Shapes of draft attention for `python -m pallas_kernels.bench`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench_case import BenchCase, check_attention
from pallas_kernels.draft_attention import api

_DIM = 128
_LAYERS, _LAYER = 2, 1
_CAPACITY = 32832


def cases() -> list[BenchCase]:
  """Those of published drafters: blocks of 16, 32 query heads of 128."""
  return [
    _case('16 slots x 8 x 4 heads, context 2048 of 32832', 8, 4, 2048),
    _case('16 slots x 8 x 4 heads, context 32768 of 32832', 8, 4, 32768),
    _case('16 slots x 4 x 8 heads, context 2048 of 32832', 4, 8, 2048),
    _case(
      '16 slots x 8 x 4 heads, window 2048, context 32768', 8, 4, 32768, 2048
    ),
  ]


def _case(
  name: str, heads: int, group: int, length: int, window: int | None = None
) -> BenchCase:
  slots, seen = 16, min(length, window or length)
  rows, outputs = seen + slots, slots * heads * group
  kernel, reference = (
    functools.partial(_attend, window, name)
    for name in ('mosaic_gpu', 'reference')
  )
  return BenchCase(
    op='draft_attention',
    name=name,
    make_inputs=functools.partial(_inputs, slots, heads, group, length),
    kernel=kernel,
    reference=reference,
    check=functools.partial(check_attention, kernel, reference),
    bytes=2.0 * _DIM * (2 * heads * rows + 2 * outputs),
    flops=4.0 * _DIM * outputs * rows,
  )


def _attend(window: int | None, implementation: str, *arrays):
  return api.draft_attention(
    *arrays,
    layer=_LAYER,
    scale=_DIM**-0.5,
    causal=window is not None,
    window=window,
    implementation=implementation,
  )


def _inputs(
  slots: int, heads: int, group: int, length: int, key: jax.Array
) -> tuple[Any, ...]:
  """Random values of unit variance; NaN in what must not matter."""
  keys, width = jax.random.split(key, 3), 2 * heads * _DIM
  draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  query = draw(keys[0], (1, slots, heads, group, _DIM))
  context = jnp.full((_LAYERS, 1, _CAPACITY, width), jnp.nan, jnp.bfloat16)
  context = context.at[_LAYER, 0, :length].set(draw(keys[1], (length, width)))
  rows = draw(keys[2], (1, slots, width))
  return query, context, rows, jnp.array([length], jnp.int32)
