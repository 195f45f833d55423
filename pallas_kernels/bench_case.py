"""What one measurement of the bench consists of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class BenchCase:
  """One op at one named shape; `pallas_kernels/<op>/bench_cases.py` lists them.

  `kernel` and `reference` are called alike, with what `make_inputs` returned,
  and must be jittable: a pytree of arrays in, a pytree of arrays out. The bench
  calls them many times in one loop on the device; an optimization barrier ties
  each call's inputs to the output before, so that no call can be hoisted or
  dropped and nothing is copied for it.

  Attributes:
    op: name of the op, that of its directory.
    name: name of the shape, unique within the op.
    make_inputs: from a PRNG key to the positional inputs, device arrays.
    kernel: what is measured, `kernel(*inputs)`.
    reference: the same by plain XLA, `reference(*inputs)`.
    check: `check(inputs)` compares the two (on the device the bench runs on)
      and returns a dict for the log; `"ok"` (bool) is required, `"error"`
      (float) is printed.
    bytes: the fewest bytes the op must move through device memory, every input
      read once and every output written once; 0 if they are not its bound.
    flops: the fewest floating-point operations, likewise.
    in_place: the output is the first input, updated: in the loop it takes its
      place.
  """

  op: str
  name: str
  make_inputs: Callable[[jax.Array], tuple[Any, ...]]
  kernel: Callable[..., Any]
  reference: Callable[..., Any]
  check: Callable[[tuple[Any, ...]], dict[str, Any]]
  bytes: float
  flops: float
  in_place: bool = False
