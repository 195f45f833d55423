"""One input of one op, for the tests and the bench alike.

`pallas_kernels/<op>/cases.py` lists them. Three witnesses run over the small
ones: the tests compare the reference with NumPy, and the kernel in the
interpreter with both; the bench compares the kernel on a GPU with the
reference, and times the large ones.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class Case:
  """One op on one named input.

  `kernel`, `interpreted` and `reference` are called alike, with what
  `make_inputs` returned, and must be jittable: a pytree of arrays in, a pytree
  of arrays out. The bench calls them many times in one loop on the device; an
  optimization barrier ties each call's inputs to the output before, so that no
  call can be hoisted or dropped and nothing is copied for it.

  Attributes:
    op: name of the op, that of its directory.
    name: name of the input, unique within the op.
    make_inputs: from a PRNG key to the positional inputs, device arrays.
    kernel: what is checked and measured on a GPU.
    reference: the same in plain XLA.
    check: `check(kernel, inputs)` compares a kernel with the reference (on the
      device the bench runs on) and returns a dict for the log; `"ok"` (bool) is
      required, `"error"` (float) is printed.
    bytes: the fewest bytes the op must move through device memory, every input
      read once and every output written once; 0 if it is not timed.
    flops: the fewest floating-point operations, likewise.
    in_place: the output is the first input, updated: in the loop it takes its
      place.
    interpreted: the kernel in the interpreter; None where that would take too
      long, or where XLA is the kernel.
  """

  op: str
  name: str
  make_inputs: Callable[[jax.Array], tuple[Any, ...]]
  kernel: Callable[..., Any]
  reference: Callable[..., Any]
  check: Callable[[Callable[..., Any], tuple[Any, ...]], dict[str, Any]]
  bytes: float = 0.0
  flops: float = 0.0
  in_place: bool = False
  interpreted: Callable[..., Any] | None = None

  @property
  def timed(self) -> bool:
    """Whether the bench times the case, besides checking it."""
    return self.bytes > 0


def random_generator(key: jax.Array) -> np.random.Generator:
  """NumPy's generator, seeded by a PRNG key."""
  return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def check_equal(
  reference: Callable[..., Any],
  kernel: Callable[..., Any],
  inputs: tuple[Any, ...],
) -> dict[str, Any]:
  """The `check` of an op whose results are the reference's, bit by bit.

  Args:
    reference: the op by the reference.
    kernel: the op by the kernel, which is run twice.
    inputs: positional inputs of both.
  """
  kernel = jax.jit(kernel)
  got, again = kernel(*inputs), kernel(*inputs)
  want = jax.jit(reference)(*inputs)
  differing = sum(
    int(np.sum(np.asarray(x) != np.asarray(y)))
    for ours in (got, again)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True)
  )
  return {'ok': differing == 0, 'error': float(differing)}


def accuracy(
  result: jax.Array,
  plain: jax.Array,
  truth: jax.Array,
  repeats: bool,
  independent: bool,
) -> dict[str, Any]:
  """The log of a `check` of an op in bfloat16.

  Args:
    result: the kernel's result.
    plain: the reference's result on the same inputs.
    truth: the result in float32 throughout, which stands in for float64: its
      own error is a thousandth of bfloat16's.
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
  plain: Callable[..., jax.Array],
  kernel: Callable[..., jax.Array],
  inputs: tuple[Any, ...],
) -> dict[str, Any]:
  """Accuracy, that a row does not depend on others, and that it repeats.

  Args:
    plain: the op by the reference.
    kernel: the op by the kernel.
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
  """Norm of the difference by the norm of `truth`; that itself if it is 0."""
  difference = jnp.linalg.norm(value.astype(jnp.float32) - truth)
  norm = jnp.linalg.norm(truth)
  return float(difference / jnp.where(norm == 0, 1.0, norm))
