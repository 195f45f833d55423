"""Sizes rounded up, and arrays padded to them."""

import jax
import jax.numpy as jnp

COPY_ROWS = 8  # rows of a tile of the GPU's copy engine


def round_up(x: int, multiple: int) -> int:
  """The least multiple of `multiple` that is not below `x`."""
  return -(-x // multiple) * multiple


def pad_rows(x: jax.Array) -> jax.Array:
  """`x [B, N, C]` with N padded as the copy engine's tiles demand.

  More rows than one tile must be whole tiles; fewer may be any number.
  """
  extra = -x.shape[1] % COPY_ROWS if x.shape[1] > COPY_ROWS else 0
  return jnp.pad(x, ((0, 0), (0, extra), (0, 0))) if extra else x


def pad_to(x: jax.Array, *sizes: int) -> jax.Array:
  """`x` whose last dimensions have at least these sizes."""
  have = x.shape[-len(sizes) :]
  missing = [max(0, size - h) for size, h in zip(sizes, have, strict=True)]
  if not any(missing):
    return x
  before = [(0, 0)] * (x.ndim - len(sizes))
  return jnp.pad(x, before + [(0, number) for number in missing])
