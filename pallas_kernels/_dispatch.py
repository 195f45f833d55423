"""Choice of an implementation by name, the same for every op."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


def select(
  op: str,
  implementations: Mapping[str, Callable[..., Any]],
  implementation: str | None,
) -> Callable[..., Any]:
  """Returns the implementation of `op` that a caller asked for.

  Args:
    op: name of the op, for the message.
    implementations: the available ones by name, the best one first.
    implementation: a name, or None for the best one.

  Raises:
    ValueError: a named implementation does not exist or cannot run here. It
      never falls back, so that what is measured is what was asked for.
  """
  if implementation is None:
    return next(iter(implementations.values()))
  if implementation not in implementations:
    choices = ", ".join(repr(name) for name in implementations)
    raise ValueError(
      f"implementation: {op} has no {implementation!r} here; "
      f"choices: {choices} or None for the best one"
    )
  return implementations[implementation]


def hopper_gpu() -> bool:
  """Whether the default backend is a Hopper GPU (compute capability 9.x).

  Kernels for Mosaic use Hopper's instructions; on older and newer GPUs, and on
  the CPU, `implementation=None` takes the reference.
  """
  if jax.default_backend() != "gpu":
    return False
  capability = getattr(jax.devices()[0], "compute_capability", "")
  return str(capability).split(".")[0] == "9"
