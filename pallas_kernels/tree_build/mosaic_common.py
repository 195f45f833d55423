"""What the kernels of the tree build share: the order of paths, and copies."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

# A path as a binary number whose order is the lexicographic order of ranks:
# rank r becomes k ones, a zero and the k low bits of r + 1, k = floor(log2(r +
# 1)), left-aligned, so that longer paths only append. The ranks of a path in
# the frontier have a product of (r + 1) of at most 2 * budget, since no path
# with more predecessors than that is reached, so a path of 31 ranks takes
# at most 2 * 11 + 31 = 53 bits. (Bands collect up to 2 * (1 + budget) nodes
# with all their predecessors: the same bound.) A path and its extensions by
# rank 0 share one number; the depth, in the last bits, puts the shorter one
# first.
HI_BITS = 31
LO_BITS = 26
DEPTH_BITS = 5


def append_rank(hi, lo, used, rank, k):
  """Appends a rank to a path's number of `used` bits; see `HI_BITS`.

  `lo` holds code bits only, k = floor(log2(rank + 1)); returns (hi, lo).
  """
  code = (((1 << k) - 1) << (k + 1)) | (rank + 1 - (1 << k))
  shift = HI_BITS + LO_BITS - used - (2 * k + 1)
  in_hi = code << jnp.maximum(shift - LO_BITS, 0)
  carry = code >> jnp.minimum(jnp.maximum(LO_BITS - shift, 0), 31)
  low = (code << jnp.minimum(shift, 31)) & ((1 << LO_BITS) - 1)
  fits = shift >= LO_BITS
  return hi | jnp.where(fits, in_hi, carry), lo | jnp.where(fits, 0, low)


def copy_row(source, row, target, start=0, size=None):
  """Copies a multiple of 128 int32 of a row, several loads in flight."""
  size = target.shape[0] if size is None else size
  block = max(b for b in (1024, 512, 256, 128) if size % b == 0)
  for first in range(0, size, 4 * block):
    last = min(first + 4 * block, size)
    at = [pl.ds(start + i, block) for i in range(first, last, block)]
    loaded = [source[row, s] for s in at]
    for s, x in zip(at, loaded, strict=True):
      target[s] = x
