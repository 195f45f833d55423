"""The kernel that groups rows by expert: interpreted, against XLA's ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import grouping, routing

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
H, WIDTH = 128, 48


def make_inputs(ids, seed=0):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(len(ids), H)), jnp.bfloat16)
  weights = jnp.asarray(rng.uniform(0.5, 1.5, ids.shape), jnp.float32)
  return x, jnp.asarray(ids, jnp.int32), weights


@functools.partial(jax.jit, static_argnums=(3, 4))
def interpreted(x, ids, weights, experts, blocks):
  return grouping.group(x, ids, weights, experts, WIDTH, blocks, INTERPRET)


def seen(tables, rows, places):
  """What anybody looks at: used entries, and what belongs to a token."""
  table, number, weights = map(np.asarray, tables)
  table = table[: number[0]]
  starts, counts = table[:, 3] * routing.ALIGN, table[:, 4]
  used = [np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
  used = np.concatenate([np.zeros(0, int), *used])
  rows = np.asarray(rows.astype(jnp.float32))
  return table, number, weights[used], rows[used], places


def check(ids, experts, blocks):
  inputs = make_inputs(ids)
  mine = seen(*interpreted(*inputs, experts, blocks))
  theirs = seen(*routing.group(*inputs, experts, WIDTH))
  jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.parametrize(
  ('tokens', 'choices', 'experts', 'blocks'),
  [(17, 6, 64, 5), (31, 1, 5, 4), (65, 8, 384, 9), (33, 3, 130, 33)],
)
def test_is_what_xla_makes(tokens, choices, experts, blocks):
  """Ids at random: repeats, experts without rows, ids of no expert."""
  rng = np.random.default_rng(tokens)
  check(rng.integers(-2, experts + 3, (tokens, choices)), experts, blocks)
