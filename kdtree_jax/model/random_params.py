"""Random parameters of any model, made on the device tensor by tensor."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from kdtree_jax.keys import Purpose, key_for

# The initializer_range of the whole model family; activations stay finite.
STD = 0.02


def random_params(shapes: PyTree, seed: int = 0) -> PyTree:
  """Random parameters for a tree of shapes.

  Matrices and stacks are normal with standard deviation `STD`, norms are one,
  biases (`e_score_correction_bias` and tables of ids among them) are zero. So
  a router prefers no expert: a row's content alone decides.

  What a layer adds to the residual stream is small, as in GPT-2 (Radford et
  al., 2019, sec. 2.3): its last matrices are divided by sqrt(2 L), those of
  routed experts by 2 L, and an embedding that is not tied to the head is
  standard normal. Without that, one expert that changes by rounding would
  change the input of all later routers so much that they choose other experts
  too, and the outputs of two exact engines would differ within a few tokens.

  Nothing passes through the host, and each program makes one tensor: 16 billion
  values take seconds, and no memory but their own.

  Args:
    shapes: nested dicts of `jax.ShapeDtypeStruct`, as `abstract_params` gives.
    seed: seeds all tensors; tensor i is sampled with the key
      `fold_in(key_for(Purpose.WEIGHTS, seed), i)`.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
  layers = sum(name.startswith('layers_') for name in shapes)
  tied = 'lm_head' not in shapes
  made: list[jax.Array] = []
  for index, (path, leaf) in enumerate(leaves):
    names = [key.key for key in path]
    shape, dtype = tuple(leaf.shape), jnp.dtype(leaf.dtype)
    if len(shape) > 1:
      std = jnp.float32(_std(names, layers, tied))
      made.append(_normal(jnp.int32(seed), jnp.int32(index), std, shape, dtype))
    else:  # A norm's weight, or a bias.
      made.append(jnp.full(shape, 1 if names[-1] == 'weight' else 0, dtype))
  return jax.tree.unflatten(structure, made)


def _std(names: list[str], layers: int, tied: bool) -> float:
  """Standard deviation of the tensor at a path, in a model of `layers`."""
  if 'embed_tokens' in names and not tied:
    return 1.0
  if 'o_proj' in names or 'down_proj' in names:
    branches = 2 * max(layers, 1)
    return STD / (branches if 'experts' in names else math.sqrt(branches))
  return STD


@functools.partial(jax.jit, static_argnums=(3, 4))
def _normal(seed, index, std, shape, dtype):
  """Normal values, one program a shape; a stack is made matrix by matrix."""
  key = jax.random.fold_in(key_for(Purpose.WEIGHTS, seed), index)

  def matrix(key, shape):
    # Values sampled in bfloat16 would be coarse, and their mean not 0.
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

  if len(shape) == 2:
    return matrix(key, shape)
  keys = jax.random.split(key, shape[0])
  return jax.lax.map(lambda k: matrix(k, shape[1:]), keys)
