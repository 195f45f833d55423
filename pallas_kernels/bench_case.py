"""What one measurement of the bench consists of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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


def accuracy(
  result: jax.Array,
  plain: jax.Array,
  truth: jax.Array,
  repeats: bool,
  independent: bool,
) -> dict[str, Any]:
  """What the `check` of an op in bfloat16 returns.

  Args:
    result: of the kernel.
    plain: of the reference, on the same inputs.
    truth: in float32 throughout, which stands in for float64: its own error is
      a thousandth of bfloat16's.
    repeats: whether the kernel gave the same bits twice.
    independent: whether a row's bits were the same beside other rows.
  """
  error, plain_error = (_relative_error(x, truth) for x in (result, plain))
  return {
    'ok': error <= 2 * plain_error and repeats and independent,
    'error': error,
    'reference_error': plain_error,
    'repeats': repeats,
    'rows_independent': independent,
  }


def check_attention(
  kernel: Callable[..., jax.Array],
  plain: Callable[..., jax.Array],
  inputs: tuple[Any, ...],
) -> dict[str, Any]:
  """Accuracy, that a row does not depend on others, and that it repeats.

  Args:
    kernel: the op by the kernel.
    plain: by the reference.
    inputs: query `[B, N, ...]`, keys and new rows, all bfloat16, and the rest.
  """
  kernel, plain = jax.jit(kernel), jax.jit(plain)
  result = kernel(*inputs)
  query, *rest = inputs
  changed = kernel(query.at[:, -1].multiply(jnp.bfloat16(2)), *rest)
  return accuracy(
    result,
    plain(*inputs),
    plain(*(a.astype(jnp.float32) for a in inputs[:3]), *inputs[3:]),
    bool(jnp.array_equal(result, kernel(*inputs))),
    bool(jnp.array_equal(result[:, :-1], changed[:, :-1])),
  )


def _relative_error(value: jax.Array, truth: jax.Array) -> float:
  difference = value.astype(jnp.float32) - truth
  return float(jnp.linalg.norm(difference) / jnp.linalg.norm(truth))
