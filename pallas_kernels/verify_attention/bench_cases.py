"""Shapes of verify attention for `python -m pallas_kernels.bench`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bits
from pallas_kernels.bench_case import BenchCase, check_attention
from pallas_kernels.verify_attention import api

_VALUE_DIM, _ROPE_DIM = 512, 64
_WIDTH = _VALUE_DIM + _ROPE_DIM
_LAYER = 1
_SCALE = 192**-0.5  # DeepSeek-V3's: of the head's 128 + 64 columns
_TAIL = 64  # rows of the cache behind the prefix; they hold NaN


def cases() -> list[BenchCase]:
  """The shapes of the project's targets, and the chain of a prefill chunk."""
  return [
    _case('64 heads x 64 nodes, cache 32768', 64, 64, 32768),
    _case('64 heads x 16 nodes, cache 32768', 64, 16, 32768),
    _case('16 heads x 17 nodes, cache 4096', 16, 17, 4096),
    _case('64 heads x 1 node, cache 32768', 64, 1, 32768),
    _case('16 heads x 257 nodes, cache 4096', 16, 257, 4096),
    _case('16 heads x 1025 nodes, cache 1000', 16, 1025, 1000),
    _case('16 heads x chain of 512, cache 4096', 16, 512, 4096, chain=True),
  ]


def _case(
  name: str, heads: int, nodes: int, length: int, chain: bool = False
) -> BenchCase:
  # A chain's nodes see each other; a tree's few ancestors do not count.
  pairs = nodes * length + (nodes * (nodes + 1) // 2 if chain else nodes)
  rows = length + nodes + nodes * heads
  kernel, reference = (
    functools.partial(_attend, name) for name in ('mosaic_gpu', 'reference')
  )
  return BenchCase(
    op='verify_attention',
    name=name,
    make_inputs=functools.partial(_inputs, heads, nodes, length, chain),
    kernel=kernel,
    reference=reference,
    check=functools.partial(check_attention, kernel, reference),
    bytes=2.0 * (rows * _WIDTH + nodes * heads * _VALUE_DIM),
    flops=2.0 * heads * pairs * (_WIDTH + _VALUE_DIM),
  )


def _attend(implementation: str, query, cache, rows, lengths, *ancestors):
  return api.verify_attention(
    query,
    cache,
    rows,
    lengths,
    layer=_LAYER,
    value_dim=_VALUE_DIM,
    scale=_SCALE,
    ancestors=ancestors[0] if ancestors else None,
    implementation=implementation,
  )


def _inputs(
  heads: int, nodes: int, length: int, chain: bool, key: jax.Array
) -> tuple[Any, ...]:
  """Random values of unit variance; NaN in what must not be read."""
  keys = jax.random.split(key, 4)
  draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  query = draw(keys[0], (1, nodes, heads, _WIDTH))
  prefix = draw(keys[1], (length, _WIDTH))
  rows = draw(keys[2], (1, nodes, _WIDTH))
  cache = jnp.full((2, 1, length + -length % 8 + _TAIL, _WIDTH), jnp.nan)
  cache = cache.astype(jnp.bfloat16).at[_LAYER, 0, :length].set(prefix)
  inputs = (query, cache, rows, jnp.array([length], jnp.int32))
  if chain:
    return inputs
  # Every node hangs on one of the eight before it.
  back = jax.random.randint(keys[3], (1, nodes), 1, 9, jnp.int32)
  parents = np.arange(nodes, dtype=np.int32)[None] - back
  parents = jnp.where(np.arange(nodes) == 0, -1, jnp.maximum(parents, 0))
  return *inputs, _bits.ancestors_from_parents(parents, nodes)
