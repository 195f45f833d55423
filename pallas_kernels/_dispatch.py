"""Choice of an implementation by name, the same for every op.

Every implementation is a pair of functions that take the same arguments: `run`
is the op, and `why_not` tells whether it can run them: None if it can, else the
reason as a user reads it.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


def _always(*args: Any, **kwargs: Any) -> None:
  """`why_not` of an implementation that runs everywhere and takes all."""
  del args, kwargs


class Implementation(NamedTuple):
  """One way to compute an op.

  Attributes:
    run: the op.
    why_not: called as `run` is; the reason why `run` cannot take these
      arguments here, or None if it can. It looks at shapes, dtypes, static
      arguments and the machine, never at values.
  """

  run: Callable[..., Any]
  why_not: Callable[..., str | None] = _always


def for_hopper(
  run: Callable[..., Any], why_not: Callable[..., str | None]
) -> Implementation:
  """An implementation that needs a Hopper GPU, whatever its arguments are."""

  def reason(*args: Any, **kwargs: Any) -> str | None:
    return why_not(*args, **kwargs) or why_not_hopper()

  return Implementation(run, reason)


def why_not_hopper() -> str | None:
  """Why Mosaic kernels cannot run on this machine; None if they can.

  They use instructions of Hopper (compute capability 9.x). On older and newer
  GPUs, and on the CPU, `implementation=None` takes the reference.
  """
  if jax.default_backend() == 'gpu':
    capability = getattr(jax.devices()[0], 'compute_capability', '')
    if str(capability).split('.')[0] == '9':
      return None
  return 'the default backend is not a Hopper GPU'


def call(
  op: str,
  implementations: Mapping[str, Implementation],
  implementation: str | None,
  *args: Any,
  **kwargs: Any,
) -> Any:
  """The op on these arguments, by the implementation that was asked for.

  Args:
    op: name of the op, for messages.
    implementations: all of the op by name, the best one first. One of them can
      run anywhere.
    implementation: a name, or None for the first one that can run.
    *args: what the implementation takes.
    **kwargs: likewise.

  Raises:
    ValueError: a named implementation does not exist or cannot run here. It
      never falls back, so that what is measured is what was asked for.
  """
  reasons = {
    name: found.why_not(*args, **kwargs)
    for name, found in implementations.items()
  }
  able = [name for name, reason in reasons.items() if reason is None]
  if implementation is None:
    implementation = able[0]
    best, reason = next(iter(reasons.items()))
    if reason is not None and jax.default_backend() == 'gpu':
      _warn_once(op, best, implementation, reason)
  if implementation not in implementations:
    choices = ', '.join(map(repr, able))
    raise ValueError(
      f'implementation: {op} has no {implementation!r} here; '
      f'choices: {choices} or None for the best one'
    )
  if reason := reasons[implementation]:
    raise ValueError(
      f'implementation: {op} has no {implementation} here: {reason}'
    )
  return implementations[implementation].run(*args, **kwargs)


@functools.cache
def _warn_once(op: str, best: str, taken: str, reason: str) -> None:
  """Logs why a GPU, where the kernel is expected, does not run it."""
  logging.getLogger('pallas_kernels').warning(
    '%s takes the %s, not %s: %s', op, taken, best, reason
  )
