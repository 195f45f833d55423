"""Sets of small integers as packed bits, 32 to a word.

Of a tree, row i is the set of node i's ancestors and itself: bit `j % 32` of
word `j // 32` is set iff node j is one of them. Rows of padding nodes are zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WORD_BITS = 32


def num_words(num_nodes: int) -> int:
  """Number of uint32 words that hold one bit for each of `num_nodes`."""
  return -(-num_nodes // WORD_BITS)


def ancestors_from_parents(parents: jax.Array, num_steps: int) -> jax.Array:
  """Packs every node's set of ancestors, itself included.

  Follows the parent pointers `num_steps` times for all nodes at once, so that
  even a cycle of corrupted pointers ends.

  Args:
    parents: `[B, N]` int32, the index of each node's parent. Node 0 is the
      root; another node without a parent in `0..N-1` is padding.
    num_steps: static bound on the depth of a node.

  Returns:
    `[B, N, ceil(N / 32)]` uint32 bits; zero rows for padding.
  """
  n = parents.shape[1]
  words = np.arange(num_words(n), dtype=np.int32)[None, None, :]

  def bit_of(node: jax.Array) -> jax.Array:
    """One-hot bits `[B, N, W]` of `node` `[B, N]`; negative gives zeros."""
    bit = jnp.uint32(1) << (node & (WORD_BITS - 1)).astype(jnp.uint32)
    # An arithmetic shift keeps a negative node negative: it fits no word.
    word = node >> 5
    return jnp.where(word[:, :, None] == words, bit[:, :, None], jnp.uint32(0))

  def step(_, carry):
    bits, node = carry
    bits = bits | bit_of(node)
    above = jnp.take_along_axis(up, jnp.maximum(node, 0), axis=1)
    return bits, jnp.where(node >= 0, above, -1)

  in_range = (parents >= 0) & (parents < n)
  index = np.arange(n, dtype=np.int32)[None, :]
  up = jnp.where(in_range & (index > 0), parents, -1)
  own = jnp.where((up >= 0) | (index == 0), index, -1)
  bits, _ = lax.fori_loop(0, num_steps, step, (bit_of(own), up))
  return bits


def unpack_bits(bits: jax.Array, num_nodes: int) -> jax.Array:
  """Unpacks `[..., ceil(N / 32)]` uint32 bits to a `[..., N]` bool mask."""
  node = np.arange(num_nodes)
  words = bits[..., node // WORD_BITS]
  shift = jnp.asarray(node % WORD_BITS, jnp.uint32)
  shift = jnp.broadcast_to(shift, words.shape)
  return ((words >> shift) & jnp.uint32(1)).astype(bool)


def count_bits(x: jax.Array) -> jax.Array:
  """Bits set in int32 values; Mosaic has no population count."""
  x -= _shift_right(x, 1) & 0x55555555
  x = (x & 0x33333333) + (_shift_right(x, 2) & 0x33333333)
  x = (x + _shift_right(x, 4)) & 0x0F0F0F0F
  return _shift_right(x * 0x01010101, 24)


def low_bits(count: jax.Array) -> jax.Array:
  """An int32 with the lowest `count` (0..32) bits set."""
  half = count >> 1  # In two shifts, as one by 32 is undefined.
  return ~lax.shift_left(
    lax.shift_left(jnp.full_like(count, -1), half), count - half
  )


def _shift_right(x: jax.Array, bits: int) -> jax.Array:
  return lax.shift_right_logical(x, jnp.int32(bits))
