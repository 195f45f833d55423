"""Inputs of the tree build, for the tests and the bench.

The bench times 15 depths of a vocabulary of 163840.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case, check_equal, random_generator
from pallas_kernels.tree_build import api

DEPTH = 15
VOCAB = 163840
BUDGETS = (16, 64, 256, 1024)
STYLES = ('normal', 'grid', 'equal', 'one_hot', 'holes', 'peaked')


def _inputs(dtype, key):
  """Random logits with a clear best token a depth, as a drafter gives them."""
  noise = jax.random.normal(key, (1, DEPTH, VOCAB), jnp.float32) * 2.5
  boost = jnp.linspace(9.0, 4.0, DEPTH)[None, :, None]
  favoured = jnp.arange(VOCAB) % 20011 == 17
  logits = noise + jnp.where(favoured, boost, 0.0)
  return logits.astype(dtype), jnp.zeros((1,), jnp.int32)


def cases() -> list[Case]:
  """All cases of the op."""
  timed = [
    _case(
      f'{DEPTH}x{VOCAB} {np.dtype(dtype).name} budget {budget}',
      functools.partial(_inputs, dtype),
      budget,
      bytes=float(DEPTH * VOCAB * np.dtype(dtype).itemsize),
    )
    for dtype in (jnp.float32, jnp.bfloat16)
    for budget in BUDGETS
  ]
  return timed + small_cases()


def small_cases() -> list[Case]:
  """Trees that are cut short, and logits with ties and holes.

  The interpreter takes too long for a whole build: it runs the kernels on their
  own inputs, see the tests.
  """
  shapes = (
    ((1, 3, 1), 2),  # V = 1: a chain cut short
    ((1, 3, 1), 9),  # V = 1: budget beyond all prefixes
    ((2, 2, 3), 20),  # 12 prefixes
    ((2, 1, 6), 4),  # a star
    ((3, 0, 4), 3),  # no depth at all
  )
  return [
    _case(
      f'{style} {"x".join(map(str, shape))}, budget {budget}',
      functools.partial(_small_inputs, style, shape),
      budget,
    )
    for shape, budget in shapes
    for style in ('normal', 'equal', 'holes')
  ]


def _case(name, make_inputs, budget, **sizes):
  build = functools.partial(api.tree_build, budget=budget)
  reference = functools.partial(build, implementation='reference')
  # Without any depth there is no kernel to run.
  kernel = None if 'x0x' in name else 'mosaic_gpu'
  return Case(
    op='tree_build',
    name=name,
    make_inputs=make_inputs,
    kernel=functools.partial(build, implementation=kernel),
    reference=reference,
    check=functools.partial(check_equal, reference),
    **sizes,
  )


def _small_inputs(style, shape, key):
  logits = make_logits(style, shape, random_generator(key))
  roots = np.arange(11, 11 + shape[0], dtype=np.int32)
  return jnp.asarray(logits), jnp.asarray(roots)


def make_logits(
  style: str, shape: tuple[int, int, int], rng: np.random.Generator
) -> np.ndarray:
  """Random float32 logits of one of the `STYLES`."""
  logits = rng.normal(size=shape).astype(np.float32)
  if style == 'grid':  # many exact ties, -0 next to 0 among them
    logits = np.round(logits) * 0.5 * rng.choice([-1, 1], shape)
  elif style == 'equal':
    logits = np.full(shape, 1.25)
  elif style == 'one_hot':  # log q of the best token rounds to 0
    logits = np.where(np.arange(shape[2]) == 1, 1e4, logits)
  elif style == 'holes':
    kind = rng.integers(0, 4, shape)
    logits = np.where(kind == 0, -np.inf, np.where(kind == 1, np.nan, logits))
  elif style == 'peaked':
    logits *= 30
  return logits.astype(np.float32)
