"""Choice of an implementation by name, the same for every op."""

import functools
import logging
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
    choices = ', '.join(repr(name) for name in implementations)
    raise ValueError(
      f'implementation: {op} has no {implementation!r} here; '
      f'choices: {choices} or None for the best one'
    )
  return implementations[implementation]


def hopper_gpu() -> bool:
  """Whether the default backend is a Hopper GPU (compute capability 9.x).

  Kernels for Mosaic use Hopper's instructions; on older and newer GPUs, and on
  the CPU, `implementation=None` takes the reference.
  """
  if jax.default_backend() != 'gpu':
    return False
  capability = getattr(jax.devices()[0], 'compute_capability', '')
  return str(capability).split('.')[0] == '9'


def with_mosaic(
  op: str,
  mosaic: Callable[..., Any],
  reference: Callable[..., Any],
  implementation: str | None,
  reason: str | None,
) -> Callable[..., Any]:
  """`select` between an op's Mosaic kernel and its reference.

  Args:
    op: name of the op, for the message.
    mosaic: its kernel for Hopper GPUs.
    reference: its reference, which runs everywhere.
    implementation: what the caller asked for.
    reason: why the kernel does not take this shape; None if it does.

  Raises:
    ValueError: as `select`; "mosaic_gpu" that cannot run says why.
  """
  if reason is None and not hopper_gpu():
    reason = 'the default backend is not a Hopper GPU'
  if reason is None:
    found = {'mosaic_gpu': mosaic, 'reference': reference}
    return select(op, found, implementation)
  if implementation == 'mosaic_gpu':
    raise ValueError(f'implementation: {op} has no mosaic_gpu here: {reason}')
  if implementation is None and jax.default_backend() == 'gpu':
    _say_once(op, reason)
  return select(op, {'reference': reference}, implementation)


@functools.cache
def _say_once(op: str, reason: str) -> None:
  """On a GPU people expect the kernel: say why they get the reference."""
  logging.getLogger('pallas_kernels').warning(
    '%s takes the reference: %s', op, reason
  )
