"""Comparison of a case's reference and interpreted kernel with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# The relative error of a reference in bfloat16, whose weights and result are
# each rounded to 8 bits.
BFLOAT16_ERROR = 0.01


def run(call, *inputs):
  """`call(*inputs)` in the interpreter, which must find no race."""
  out = jax.block_until_ready(call(*inputs))
  assert not gpu_callbacks.get_races().races_found
  return out


def error(value, truth):
  """Norm of the difference by the norm of `truth`; it must be 0 where that is.

  Args:
    value: array of any dtype.
    truth: float64, of the same shape.
  """
  value = np.asarray(value).astype(np.float64)
  assert not value[~truth.any(axis=-1)].any()
  norm = np.linalg.norm(truth)
  return np.linalg.norm(value - truth) / norm if norm else 0.0


def check_close(case, truth):
  """Reference against float64, and interpreter against reference.

  The interpreted kernel may be twice as far from the truth as the reference,
  for every sequence if the result `[B, N, ...]` has them.

  Args:
    case: with inputs in bfloat16 and one result.
    truth: the op in float64, called as the reference is.
  """
  inputs = case.make_inputs(jax.random.key(0))
  wanted = truth(*inputs)
  # Nothing else may run beside the interpreter, which wants a thread for every
  # warpgroup that waits for another. As one program: of its single operations
  # each would be one, for every shape.
  plain = jax.block_until_ready(jax.jit(case.reference)(*inputs))
  out = run(case.interpreted, *inputs)
  assert out.dtype == plain.dtype == jnp.bfloat16
  if wanted.ndim == 2:
    out, plain, wanted = out[None], plain[None], wanted[None]
  for mine, theirs, exact in zip(out, plain, wanted, strict=True):
    plain_error = error(theirs, exact)
    assert plain_error < BFLOAT16_ERROR
    assert error(mine, exact) <= 2 * plain_error


def check_equal(case):
  """Interpreter against reference, to the last bit, and a second time."""
  inputs = case.make_inputs(jax.random.key(0))
  assert case.check(jax.jit(case.interpreted), inputs)['ok']
  assert not gpu_callbacks.get_races().races_found
