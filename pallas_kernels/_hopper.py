"""Sizes of a Hopper GPU, and parameters that its kernels share."""

import math
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

MULTIPROCESSORS = 132
LANES = 128  # threads of a warpgroup, and the narrowest vector
WARPS = 4  # warps of a warpgroup
SHARED_BYTES = 232448  # shared memory that a block can have
BARRIER_BYTES = 2048  # enough of it for any kernel's barriers

# Kernels are written for warpgroups of 128 threads; the barriers that Mosaic
# puts around accesses to shared memory are right, but not free.
WARPGROUP = plgpu.CompilerParams(
  lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)
# In kernels under these, each of the four warps can load scalars of its own.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def strided(size: int) -> Any:
  """The layout that Mosaic gives a vector of `size` 32-bit values.

  Mosaic finds it by trial, each of which looks at the whole kernel: with the
  layouts of loads and iotas written out, a kernel is lowered in less time.
  """
  vec_size = math.gcd(size // LANES, 2)
  return plgpu.Layout.WG_STRIDED((size,), vec_size=vec_size)
