"""Shapes of the acceptance walk: one tree, walked to its deepest leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_case import BenchCase
from pallas_kernels.tree_accept import api

MAX_DEPTH = 15
NODES = (17, 65, 257, 1025)


def _inputs(n, key):
  """A random tree around a spine that the target's tokens follow."""
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
  parents = np.array(
    [-1] + [rng.integers(max(0, i - 40), i) for i in range(1, n)]
  )
  spine = np.unique(np.linspace(0, n - 1, MAX_DEPTH + 1).astype(int))
  parents[spine[1:]] = spine[:-1]
  tokens, target = rng.integers(0, 163840, (2, n))
  target[spine[:-1]] = tokens[spine[1:]]
  row = functools.partial(jnp.asarray, dtype=jnp.int32)
  return row(tokens[None]), row(parents[None]), row([n]), row(target[None])


def _check(kernel, reference, inputs):
  got, want = jax.jit(kernel)(*inputs), jax.jit(reference)(*inputs)
  differing = sum(
    int(np.sum(np.asarray(x) != np.asarray(y)))
    for x, y in zip(got, want, strict=True)
  )
  return {'ok': differing == 0, 'error': float(differing)}


def cases() -> list[BenchCase]:
  """All cases of the op."""
  found = []
  for n in NODES:
    kernel, reference = (
      functools.partial(
        api.tree_accept, max_depth=MAX_DEPTH, implementation=name
      )
      for name in ('mosaic_gpu', 'reference')
    )
    found.append(
      BenchCase(
        op='tree_accept',
        name=f'{n} nodes',
        make_inputs=functools.partial(_inputs, n),
        kernel=kernel,
        reference=reference,
        check=functools.partial(_check, kernel, reference),
        bytes=float(4 * (3 * n + 1 + MAX_DEPTH + 3)),
        flops=0.0,
      )
    )
  return found
