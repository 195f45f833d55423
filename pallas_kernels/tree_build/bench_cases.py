"""Shapes of the tree build: 15 depths of a vocabulary of 163840."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_case import BenchCase
from pallas_kernels.tree_build import api

DEPTH = 15
VOCAB = 163840
BUDGETS = (16, 64, 256, 1024)


def _inputs(dtype, key):
  """Random logits with a clear best token a depth, as a drafter gives them."""
  noise = jax.random.normal(key, (1, DEPTH, VOCAB), jnp.float32) * 2.5
  boost = jnp.linspace(9.0, 4.0, DEPTH)[None, :, None]
  favoured = jnp.arange(VOCAB) % 20011 == 17
  logits = noise + jnp.where(favoured, boost, 0.0)
  return logits.astype(dtype), jnp.zeros((1,), jnp.int32)


def _check(kernel, reference, inputs):
  """Every array of the tree must be the same to the last bit."""
  kernel = jax.jit(kernel)
  got, again, want = (
    kernel(*inputs),
    kernel(*inputs),
    jax.jit(reference)(*inputs),
  )
  differing = sum(
    int(np.sum(np.asarray(x) != np.asarray(y)))
    for ours in (got, again)
    for x, y in zip(ours, want, strict=True)
  )
  return {'ok': differing == 0, 'error': float(differing)}


def cases() -> list[BenchCase]:
  """All cases of the op."""
  found = []
  for dtype in (jnp.float32, jnp.bfloat16):
    for budget in BUDGETS:
      kernel, reference = (
        functools.partial(api.tree_build, budget=budget, implementation=name)
        for name in ('mosaic_gpu', 'reference')
      )
      found.append(
        BenchCase(
          op='tree_build',
          name=f'{DEPTH}x{VOCAB} {np.dtype(dtype).name} budget {budget}',
          make_inputs=functools.partial(_inputs, dtype),
          kernel=kernel,
          reference=reference,
          check=functools.partial(_check, kernel, reference),
          bytes=float(DEPTH * VOCAB * np.dtype(dtype).itemsize),
          flops=0.0,
        )
      )
  return found
