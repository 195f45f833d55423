"""Checks shapes and dtypes in annotations while the suite runs.

jaxtyping's import hook hands every function of the packages below to `check`.
A call costs its check when it is traced, and nothing in a compiled program.
"""

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import beartype
import flax.struct
import jax
import numpy as np
from jaxtyping import install_import_hook, jaxtyped

_TRAINING = 'drafter drafting loop packing rollouts target validation'.split()
_OPS = (
  'cache_compact draft_attention expert_mlp tree_accept tree_build '
  'verify_attention'
).split()
PACKAGES = (
  *(f'kdtree_jax.{name}' for name in ('decode', 'drafters', 'model', 'tree')),
  *(f'kdtree_jax.training.{module}' for module in _TRAINING),
  # Their entries, `api`, refuse wrong shapes themselves, with ValueError.
  *(f'pallas_kernels.{op}.reference' for op in _OPS),
)


def install() -> None:
  """Checks what is imported from now on."""
  install_import_hook(PACKAGES, 'tests.shapes.check')


def check(function: Callable[..., Any]) -> Callable[..., Any]:
  """beartype, which looks into pytrees too.

  An argument's axes are those of the other arguments: `tree.tokens` and an
  array beside it that are `[B, N]` both have one B and one N. A result, for
  which jaxtyping adds an argument, need only agree with itself: a tree may
  come back with more nodes. Constructors are left alone, because JAX calls
  them with placeholders.
  """
  if function.__name__ == '__init__':
    return function
  checked = beartype.beartype(function)
  signature = inspect.signature(function)

  @functools.wraps(function)
  def wrapper(*args, **kwargs):
    for name, value in signature.bind(*args, **kwargs).arguments.items():
      is_result = signature.parameters[name].annotation is Any
      with jaxtyped('context') if is_result else contextlib.nullcontext():
        _check_fields(name, value)
    return checked(*args, **kwargs)

  return wrapper


def _check_fields(name: str, value: Any) -> None:
  """Raises for the first field of a pytree that is not as annotated."""
  if not isinstance(value, flax.struct.PyTreeNode):
    return
  kinds = _annotations(type(value))
  for field in dataclasses.fields(value):
    part, kind = getattr(value, field.name), kinds[field.name]
    _check_fields(f'{name}.{field.name}', part)
    # A pytree that was copied to the host, or one of shapes alone.
    if isinstance(part, (np.ndarray, jax.ShapeDtypeStruct)):
      kind = kind.dtype[type(part), kind.dim_str]
    if kind is Any or not isinstance(kind, type):
      continue
    if not isinstance(part, kind):
      what = f'{part.dtype}{part.shape}' if hasattr(part, 'shape') else part
      raise TypeError(f'{name}.{field.name} is {what}, not {kind.__name__}')


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
  return typing.get_type_hints(cls)
