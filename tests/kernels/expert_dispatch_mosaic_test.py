"""The kernel that groups rows by expert: interpreted, against XLA's ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.expert_mlp import dispatch, mosaic_dispatch, tiles

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
H, WIDTH = 128, 48


def tile_config(blocks):
  """The interpreter wants a core for every warpgroup that waits for others."""
  return tiles.TileConfig(False, WIDTH, 1, blocks, groups=2)


def make_inputs(ids, seed=0):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(len(ids), H)), jnp.bfloat16)
  weights = jnp.asarray(rng.uniform(0.5, 1.5, ids.shape), jnp.float32)
  return x, jnp.asarray(ids, jnp.int32), weights


@functools.partial(jax.jit, static_argnums=(3, 4))
def interpreted(x, ids, weights, experts, blocks):
  return mosaic_dispatch.dispatch(
    x, ids, weights, experts, tile_config(blocks), INTERPRET
  )


def seen(tables, rows, indices):
  """What anybody looks at: used entries, and what belongs to a token."""
  table, number, weights = map(np.asarray, tables)
  indices = jax.tree.map(np.asarray, indices)
  table = table[: number[0]]
  starts, counts = table[:, 3] * dispatch.ALIGN, table[:, 4]
  used = [np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
  used = np.concatenate([np.zeros(0, int), *used])
  rows = np.asarray(rows.astype(jnp.float32))
  indices = [
    [int(row[t]) for row, counts in indices if counts[t]]
    for t in range(len(indices[0][0]))
  ]
  return table, number, weights[used], rows[used], indices


def check(ids, experts, blocks):
  inputs = make_inputs(ids)
  mine = seen(*interpreted(*inputs, experts, blocks))
  theirs = seen(*dispatch.dispatch(*inputs, experts, WIDTH))
  jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.parametrize(
  ('tokens', 'choices', 'experts', 'blocks'),
  [
    (31, 1, 5, 4),
    (33, 3, 64, 5),
    pytest.param(17, 8, 384, 3, marks=pytest.mark.slow),
    pytest.param(130, 1, 130, 2, marks=pytest.mark.slow),
  ],
)
def test_is_what_xla_makes(tokens, choices, experts, blocks):
  """Ids at random: repeats, experts without rows, ids of no expert."""
  rng = np.random.default_rng(tokens)
  check(rng.integers(-2, experts + 3, (tokens, choices)), experts, blocks)


@pytest.mark.parametrize('ids', [(1, 1), (0, 2), (-1, 3), (2, 0)])
def test_all_rows_on_the_same_experts(ids):
  """Of three: one, two, none, two the other way round."""
  check(np.tile(ids, (17, 1)), 3, 2)


def test_repeats_add_up_in_the_same_order():
  rng = np.random.default_rng(0)
  check(rng.integers(0, 2, (17, 5)), 2, 2)


@pytest.mark.slow
def test_twice_the_same_bits():
  rng = np.random.default_rng(0)
  inputs = make_inputs(rng.integers(0, 64, (20, 4)))
  once, again = (seen(*interpreted(*inputs, 64, 2)) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, once, again)


@pytest.mark.parametrize('tokens', [17, 1056])
@pytest.mark.parametrize('model', [(6, 64, 2048), (8, 384, 7168)])
def test_lowers_at_real_shapes(tokens, model):
  choices, experts, hidden = model
  device = AbstractDevice('NVIDIA H200', 132, 'gpu')
  mesh = AbstractMesh((), (), abstract_device=device)
  struct = jax.ShapeDtypeStruct
  with jax.sharding.use_abstract_mesh(mesh):
    config = tiles.tile_config(tokens, choices, experts)
    assert not mosaic_dispatch.why_not(tokens, hidden, experts, config)
    jax.jit(mosaic_dispatch.dispatch, static_argnums=(3, 4)).trace(
      struct((tokens, hidden), jnp.bfloat16),
      struct((tokens, choices), jnp.int32),
      struct((tokens, choices), jnp.float32),
      experts,
      config,
    ).lower(lowering_platforms=('cuda',))


@pytest.mark.parametrize(
  'size', [(1057, 2048, 64), (1056, 16448, 64), (1056, 16384, 64)]
)
def test_leaves_what_is_too_large_to_xla(size):
  """Too many tokens; too long a row; rows that shared memory cannot hold."""
  assert mosaic_dispatch.why_not(*size, tiles.TileConfig(False, 64, 1, 132))
