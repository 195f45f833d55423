"""Inputs of verify attention, for the tests and the bench."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bits
from pallas_kernels.case import (
  INTERPRET,
  Case,
  check_attention,
  random_generator,
)
from pallas_kernels.verify_attention import api, mosaic_gpu

_VALUE_DIM, _ROPE_DIM = 512, 64
_WIDTH = _VALUE_DIM + _ROPE_DIM
LAYER = 1
_SCALE = 192**-0.5  # DeepSeek-V3's, whose heads have 128 + 64 columns
_TAIL = 64  # rows of the cache after the prefix; they hold NaN
SMALL_VALUE_DIM = 128
_SMALL_WIDTH = SMALL_VALUE_DIM + _ROPE_DIM
_SMALL_SCALE = _SMALL_WIDTH**-0.5


def cases() -> list[Case]:
  """The shapes of the project's targets, a prefill's chain, and small ones."""
  return [
    _case('64 heads x 64 nodes, cache 32768', 64, 64, 32768),
    _case('64 heads x 16 nodes, cache 32768', 64, 16, 32768),
    _case('16 heads x 17 nodes, cache 4096', 16, 17, 4096),
    _case('64 heads x 1 node, cache 32768', 64, 1, 32768),
    _case('16 heads x 257 nodes, cache 4096', 16, 257, 4096),
    _case('16 heads x 1025 nodes, cache 1000', 16, 1025, 1000),
    _case('16 heads x chain of 512, cache 4096', 16, 512, 4096, chain=True),
    *small_cases(),
  ]


def small_cases() -> list[Case]:
  """Edges of every size; all run in the interpreter."""
  hide = [
    _small(f'one hidden {value}', 5, 2, 64, [33], edit=_hide(value))
    for value in (jnp.inf, -jnp.inf, jnp.nan)
  ]
  return [
    # No row, an odd number of rows and a full cache in one batch.
    _small('edges of a cache of 8', 9, 5, 8, [0, 7, 8]),
    _small('edges of a cache of 200', 9, 5, 200, [0, 199, 200]),
    _small('more nodes than a tile', 67, 1, 136, [129]),
    # Three tiles of queries: one needs one tile of nodes, one has two heads.
    _small(
      'a chain of more than a tile', 75, 2, 136, [63], chain=True, splits=2
    ),
    _small('odd heads, no cache', 30, 3, 64, [0], chain=True),
    _small('splits of one tile and of none', 3, 2, 128, [0, 100], splits=4),
    _small('a decode step', 1, 3, 512, [500], chain=True, splits=2),
    # Two tiles of nodes and three of the prefix, on each of two splits.
    _small('new tiles in splits', 67, 2, 136, [129], splits=2),
    *hide,
    _small('very low scores', 4, 2, 256, [250], scale=1.0, edit=_lower_scores),
    _small('a scale below zero', 4, 2, 64, [33], scale=-0.1),
  ]


def _case(
  name: str, heads: int, nodes: int, length: int, chain: bool = False
) -> Case:
  # A chain's nodes see each other; a tree's few ancestors do not count.
  pairs = nodes * length + (nodes * (nodes + 1) // 2 if chain else nodes)
  rows = length + nodes + nodes * heads
  kernel, reference = (
    functools.partial(_attend, name) for name in ('mosaic_gpu', 'reference')
  )
  return Case(
    op='verify_attention',
    name=name,
    make_inputs=functools.partial(_inputs, heads, nodes, length, chain),
    kernel=kernel,
    reference=reference,
    check=functools.partial(check_attention, reference),
    bytes=2.0 * (rows * _WIDTH + nodes * heads * _VALUE_DIM),
    flops=2.0 * heads * pairs * (_WIDTH + _VALUE_DIM),
  )


def _small(
  name: str,
  nodes: int,
  heads: int,
  capacity: int,
  lengths: Sequence[int],
  *,
  chain: bool = False,
  scale: float = _SMALL_SCALE,
  splits: int = 1,
  edit: Callable[..., tuple[Any, ...]] | None = None,
) -> Case:
  def make_inputs(key):
    inputs = small_inputs(nodes, heads, capacity, lengths, chain, key)
    return edit(*inputs) if edit else inputs

  kernel = functools.partial(attend_small, splits=splits, scale=scale)
  reference = functools.partial(
    _attend, 'reference', value_dim=SMALL_VALUE_DIM, scale=scale
  )
  return Case(
    op='verify_attention',
    name=name,
    make_inputs=make_inputs,
    kernel=kernel,
    reference=reference,
    check=functools.partial(check_attention, reference),
    interpreted=functools.partial(kernel, interpret=INTERPRET),
  )


def _attend(
  implementation: str,
  query,
  cache,
  rows,
  lengths,
  *ancestors,
  value_dim: int = _VALUE_DIM,
  scale: float = _SCALE,
):
  return api.verify_attention(
    query,
    cache,
    rows,
    lengths,
    layer=LAYER,
    value_dim=value_dim,
    scale=scale,
    ancestors=ancestors[0] if ancestors else None,
    implementation=implementation,
  )


@functools.partial(jax.jit, static_argnames=('splits', 'scale', 'interpret'))
def attend_small(
  *inputs, splits: int = 1, scale: float = _SMALL_SCALE, interpret: Any = None
) -> jax.Array:
  """The kernel on `small_inputs`, with a given number of splits."""
  ancestors = inputs[4] if len(inputs) > 4 else None
  return mosaic_gpu.verify_attention(
    *inputs[:4],
    layer=LAYER,
    value_dim=SMALL_VALUE_DIM,
    scale=scale,
    ancestors=ancestors,
    splits=splits,
    interpret=interpret,
  )


def _inputs(
  heads: int, nodes: int, length: int, chain: bool, key: jax.Array
) -> tuple[Any, ...]:
  """Random values of unit variance; NaN in rows that must not be read."""
  keys = jax.random.split(key, 4)
  draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  query = draw(keys[0], (1, nodes, heads, _WIDTH))
  prefix = draw(keys[1], (length, _WIDTH))
  rows = draw(keys[2], (1, nodes, _WIDTH))
  cache = jnp.full((2, 1, length + -length % 8 + _TAIL, _WIDTH), jnp.nan)
  cache = cache.astype(jnp.bfloat16).at[LAYER, 0, :length].set(prefix)
  inputs = (query, cache, rows, jnp.array([length], jnp.int32))
  if chain:
    return inputs
  # Every node is a child of one of the eight before it.
  back = jax.random.randint(keys[3], (1, nodes), 1, 9, jnp.int32)
  parents = np.arange(nodes, dtype=np.int32)[None] - back
  parents = jnp.where(np.arange(nodes) == 0, -1, jnp.maximum(parents, 0))
  return *inputs, _bits.ancestors_from_parents(parents, nodes)


def small_inputs(
  n: int,
  heads: int,
  capacity: int,
  lengths: Sequence[int],
  chain: bool,
  key: jax.Array,
) -> tuple[Any, ...]:
  """Inputs with NaN in all rows that must not be read."""
  rng = random_generator(key)
  batch = len(lengths)
  query = rng.normal(size=(batch, n, heads, _SMALL_WIDTH))
  cache = rng.normal(size=(2, batch, capacity, _SMALL_WIDTH))
  rows = rng.normal(size=(batch, n, _SMALL_WIDTH))
  mask = np.tril(np.ones((batch, n, n), bool))
  if not chain:
    mask &= rng.random((batch, n, n)) < 0.4
    mask[:, np.arange(n), np.arange(n)] = True
  if not chain and n > 2:
    # The last node of the first sequence is padding; the second one sees
    # nothing but is seen.
    mask[0, -1] = mask[0, :, -1] = mask[0, 1] = False
    mask[0, 0, 1] = True
  for b, length in enumerate(lengths):
    cache[:, b, length:] = np.nan
    rows[b, ~mask[b].any(axis=0)] = np.nan
  cache[1 - LAYER] = np.nan
  arrays = [jnp.asarray(a, jnp.bfloat16) for a in (query, cache, rows)]
  arrays.append(jnp.asarray(lengths, jnp.int32))
  return tuple(arrays) if chain else (*arrays, _pack(mask))


def _pack(mask: np.ndarray) -> jax.Array:
  """Packs `[B, N, N]` bool to words of ancestor bits."""
  batch, n, _ = mask.shape
  padded = np.zeros((batch, n, _bits.num_words(n) * 32), np.uint8)
  padded[..., :n] = mask
  words = np.packbits(padded, axis=-1, bitorder='little')
  return jnp.asarray(np.ascontiguousarray(words).view(np.uint32))


def _hide(value: float) -> Callable[..., tuple[Any, ...]]:
  """An edit that puts one value after the prefix and in a row not seen.

  The queries have a 0 in its column.
  """

  def edit(query, cache, rows, *others):
    query = query.at[..., 7].set(0).at[0, 0].set(0)
    cache = cache.at[LAYER, 0, 33:].set(0).at[LAYER, 0, 40, 7].set(value)
    rows = rows.at[0, -1].set(0).at[0, -1, 7].set(value)
    return query, cache, rows, *others

  return edit


def _lower_scores(query, cache, rows, *others):
  """An edit: scores are about -1e4, and maxima rise from tile to tile."""
  ramp = jnp.asarray(np.linspace(-200, -100, 256), jnp.bfloat16)
  query = query.at[..., -1].set(64.0)
  cache = cache.at[LAYER, 0, :250, -1].set(ramp[:250])
  rows = rows.at[..., -1].set(jnp.where(jnp.isnan(rows[..., -1]), jnp.nan, -99))
  return query, cache, rows, *others
