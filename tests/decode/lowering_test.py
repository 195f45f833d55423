"""The whole loop with its kernels, lowered for a Hopper GPU on any machine."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decode import Engine, init_state
from kdtree_jax.decode.drivers import ALL, decode_rounds
from kdtree_jax.decode.prefill import prefill
from kdtree_jax.decode.round import decode_round, draft
from kdtree_jax.drafters.dflash import DFlashDrafter
from kdtree_jax.model import abstract_params
from kdtree_jax.named_configs import load_config
from pallas_kernels import _dispatch

HOPPER = AbstractMesh(
  (), (), abstract_device=AbstractDevice('NVIDIA H200', 132, 'gpu')
)


@pytest.fixture
def hopper(monkeypatch):
  """Dispatch as on the GPU; what was traced for the CPU is forgotten."""
  monkeypatch.setattr(_dispatch, 'why_not_hopper', lambda: None)
  monkeypatch.setattr(pallas_kernels, 'why_not_hopper', lambda: None)
  jax.clear_caches()
  with jax.sharding.use_abstract_mesh(HOPPER):
    yield
  jax.clear_caches()


def make_engine(budget, kernels):
  """Two layers, one dense and one sparse, of Moonlight's real sizes.

  The drafter's heads are of the size of those that are published.
  """
  config = dataclasses.replace(load_config('moonlight'), num_hidden_layers=2)
  drafter = DFlashDrafter.create(config, 16)
  drafter = dataclasses.replace(
    drafter, config=dataclasses.replace(drafter.config, head_dim=128)
  )
  decode = DecodeConfig(
    tree_budget=budget,
    draft_depth=15,
    capacity=2048,
    prefill_chunk=256,
    kernels=kernels,
  )
  return Engine(config, drafter, decode)


def lowered(function, engine, batch, *operands):
  """The text of a function of engine, params, state and operands."""
  params = {'target': abstract_params(engine.config, jnp.bfloat16)}
  params['drafter'] = {}
  if engine.drafter:
    params['drafter'] = jax.eval_shape(
      functools.partial(engine.drafter.init_params, dtype=jnp.bfloat16),
      jax.random.key(0),
    )
  state = jax.eval_shape(
    lambda: init_state(engine, [[1]] * batch, [4] * batch, (), jnp.bfloat16)
  )
  traced = jax.jit(function, static_argnums=0).trace(
    engine, params, state, *operands
  )
  return traced.lower(lowering_platforms=('cuda',)).as_text()


def lowered_kernels(function, engine, batch, *operands):
  """How many kernels a function of engine, params and state calls."""
  text = lowered(function, engine, batch, *operands)
  return text.count('custom_call @mosaic_gpu')


@pytest.mark.parametrize(
  ('budget', 'batch'), (pytest.param(16, 1, marks=pytest.mark.slow), (64, 2))
)
def test_loop_and_prefill_use_the_kernels(hopper, budget, batch):
  engine = make_engine(budget, 'mosaic_gpu')
  # Attention and two products of the experts; the loop also drafts, with two
  # kernels, builds and walks trees. The same kernel in two layers may be
  # lowered once.
  for function, least, *operands in ((prefill, 3), (decode_rounds, 7, ALL)):
    count = lowered_kernels(function, engine, batch, *operands)
    assert count >= least, f'{function.__name__}: {count} kernels'


@pytest.mark.parametrize(('kernels', 'used'), (('auto', 1), ('reference', 0)))
def test_the_drafter_uses_the_kernels_that_are_asked_for(hopper, kernels, used):
  count = lowered_kernels(draft, make_engine(16, kernels), 1)
  assert bool(count) == used


@pytest.mark.parametrize('budget', (None, 0))
def test_a_known_path_is_committed_after_the_last_read(hopper, budget):
  """Rows wait for the tokens; `loop_test` looks for copies in compiled text."""
  engine = make_engine(budget or 0, 'auto')
  if budget is None:
    decode = dataclasses.replace(engine.decode, draft_depth=0)
    engine = Engine(engine.config, None, decode)
  text = lowered(decode_round, engine, 2)
  rows = 'tensor<2x2x1x576xbf16>'
  assert re.search(
    rf'optimization_barrier %\S+, %\S+ : tensor<2x1xi32>, {rows}', text
  )
