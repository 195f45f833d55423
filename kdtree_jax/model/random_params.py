"""Random parameters of any model, made on the device a tensor at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

# The initializer_range of the whole model family; activations stay finite.
STD = 0.02


def random_params(shapes: Any, seed: int = 0) -> Any:
  """Random parameters for a tree of shapes.

  Matrices and stacks are normal with standard deviation `STD`, norms are one,
  biases (`e_score_correction_bias` and tables of ids among them) are zero. So
  a router sends every row where its own content points, without preference.
  Nothing passes through the host, and no program makes more than one tensor:
  16 billion values take seconds and no memory beside themselves.

  Args:
    shapes: nested dicts of `jax.ShapeDtypeStruct`, as `abstract_params` gives.
    seed: of all of them; tensor i draws with `fold_in(key(seed), i)`.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
  made = [
    _tensor(index, seed, path[-1].key, tuple(leaf.shape), leaf.dtype)
    for index, (path, leaf) in enumerate(leaves)
  ]
  return jax.tree.unflatten(structure, made)


def _tensor(
  index: int, seed: int, name: str, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
  if len(shape) > 1:
    return _normal(jnp.int32(seed), jnp.int32(index), shape, jnp.dtype(dtype))
  # One-dimensional: a norm's weight, or a bias.
  return jnp.full(shape, 1 if name == 'weight' else 0, dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _normal(seed, index, shape, dtype):
  """A program for each shape; a stack is filled matrix by matrix."""
  key = jax.random.fold_in(jax.random.key(seed), index)

  def matrix(key, shape):
    # In bfloat16 the draws themselves would be coarse, and their mean not 0.
    return (STD * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

  if len(shape) == 2:
    return matrix(key, shape)
  keys = jax.random.split(key, shape[0])
  return jax.lax.map(lambda k: matrix(k, shape[1:]), keys)
