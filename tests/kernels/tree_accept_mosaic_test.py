"""The Mosaic acceptance walk: interpreted, and lowered for a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.tree_accept import api, cases, mosaic_gpu
from tests.kernels import tree_accept_test as walk_test
from tests.kernels import witness


@pytest.mark.parametrize(
  'case', cases.small_cases(), ids=lambda case: case.name
)
def test_case(case):
  """The reference is a walk in Python, and the interpreter the reference."""
  inputs = case.make_inputs(jax.random.key(0))
  walk_test.check(
    [np.asarray(a) for a in inputs], case.reference.keywords['max_depth']
  )
  witness.check_equal(case)


@pytest.mark.parametrize('n', cases.NODES)
def test_lowers_for_hopper(n):
  device = AbstractDevice('NVIDIA H200', 132, 'gpu')
  row = jax.ShapeDtypeStruct((2, n), jnp.int32)
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=device)
  ):
    jax.jit(functools.partial(mosaic_gpu.tree_accept, max_depth=15)).trace(
      row, row, jax.ShapeDtypeStruct((2,), jnp.int32), row
    ).lower(lowering_platforms=('cuda',))


def test_named_kernel_that_cannot_run_raises():
  trees = cases.small_cases()[0].make_inputs(jax.random.key(0))
  with pytest.raises(ValueError, match='tree_accept has no mosaic_gpu'):
    api.tree_accept(*trees, max_depth=2, implementation='mosaic_gpu')
