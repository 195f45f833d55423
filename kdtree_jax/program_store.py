"""Compiled programs on disk, so that a second process does not compile.

JAX's persistent cache knows a program by its lowered text, and tracing a real
model and lowering its kernels takes ten seconds. Here a program is known by
what it is made from: the sources of both packages, versions, the device, and
the engine with the shapes that it is for. What somebody else's code has a part
in (a drafter or a policy of a fork's own package) is not stored, for nobody
would notice when that changes.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import pickle
import platform
from collections.abc import Callable, Iterator
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

import kdtree_jax
import pallas_kernels
from kdtree_jax import _imported, registry
from kdtree_jax.decode.engine import Engine
from kdtree_jax.decode.programs import Ingredients
from kdtree_jax.io.files import write_atomically

_PACKAGES = (kdtree_jax, pallas_kernels)
_OURS = tuple(package.__name__ for package in _PACKAGES)
# Settings that say where something is kept, or what is logged.
_NO_MATTER = ('compilation_cache', 'persistent_cache', 'logging', 'traceback')
# Each holds some megabytes.
MAX_FILES = 64
_SUFFIX = '.program'
_DIGEST = 32  # Bytes at the end of a file.


class _NotOursError(Exception):
  """A part of a program that no key could name."""


class ProgramStore:
  """A folder of compiled programs.

  Files are written whole or not at all; what cannot be read, or no longer
  loads, counts as absent. Whoever can write to the folder can run code here.
  For a GPU only, unless told otherwise: XLA's programs for a CPU need the very
  CPU that they were compiled on, and folders are shared between machines. And
  not where JAX's own cache is on: a program that comes from there runs, but is
  stored incompletely.

  Attributes:
    folder: made when a first program is stored.
  """

  def __init__(
    self, folder: os.PathLike | str, backends: tuple[str, ...] = ('gpu',)
  ):
    self.folder = pathlib.Path(folder)
    self._backends = backends
    # Now, for weights may load for minutes, and somebody may edit a file
    # meanwhile.
    self._sources = _sources()

  def path(self, made_of: Ingredients) -> pathlib.Path | None:
    """See `kdtree_jax.decode.programs.Store`, like all here."""
    if self._sources is None or not _is_ours(made_of.function):
      return None
    if jax.default_backend() not in self._backends:
      return None
    settings = jax.config
    if settings.jax_compilation_cache_dir and (
      settings.jax_enable_compilation_cache
    ):
      return None
    try:
      parts = (
        _origin(made_of.function),
        *_spell(made_of.engine),
        *_spell_policy(made_of.engine),
        str(made_of.structure),
        str([(shape, str(dtype)) for shape, dtype in made_of.shapes]),
        str(sorted((made_of.options or {}).items())),
        str(made_of.donate),
        self._sources,
        *_surroundings(),
      )
    except _NotOursError:
      return None
    text = '\n'.join(parts).encode()
    return self.folder / (hashlib.sha256(text).hexdigest()[:40] + _SUFFIX)

  def load(self, path: pathlib.Path) -> Callable[..., Any] | None:
    """The program of a file; None if there is none that loads."""
    try:
      stored = path.read_bytes()
    except OSError:
      return None
    with contextlib.suppress(OSError):
      os.utime(path)  # The last used are kept.
    try:
      content, digest = stored[:-_DIGEST], stored[-_DIGEST:]
      if hashlib.sha256(content).digest() != digest:
        raise ValueError('it is not what was written')
      return serialize_executable.deserialize_and_load(
        *pickle.loads(content), execution_devices=jax.devices()[:1]
      )
    except Exception as error:  # Whatever is wrong with a file.
      logging.getLogger(__name__).warning(
        '%s does not load and is compiled anew: %s', path.name, error
      )
      return None

  def save(self, path: pathlib.Path, program: Callable[..., Any]) -> None:
    """Stores a program if it can be stored; a full disk is no failure."""
    try:
      content = pickle.dumps(serialize_executable.serialize(program))
      self.folder.mkdir(parents=True, exist_ok=True)
      write_atomically(path, [content, hashlib.sha256(content).digest()])
      self._prune()
    except Exception as error:  # The program itself is fine.
      logging.getLogger(__name__).warning(
        'a compiled program is not stored: %s', error
      )

  def _prune(self) -> None:
    """Removes what was not used for longest."""

    def used(path):
      with contextlib.suppress(OSError):  # Somebody else removed it.
        return path.stat().st_mtime
      return 0.0

    files = sorted(self.folder.glob(f'*{_SUFFIX}'), key=used, reverse=True)
    for path in files[MAX_FILES:]:
      with contextlib.suppress(OSError):
        path.unlink()


def _is_ours(thing: Any) -> bool:
  """Whether a class, or a function that is its code alone, is of a package."""
  if isinstance(thing, type):
    return thing.__module__.partition('.')[0] in _OURS
  code = getattr(thing, '__code__', None)
  if code is None or thing.__closure__:
    return False
  # Decorators pass a function's module on, but not its file.
  path = pathlib.Path(code.co_filename)
  return any(path.is_relative_to(folder) for folder in _folders())


def _folders() -> list[pathlib.Path]:
  return [pathlib.Path(package.__file__).parent for package in _PACKAGES]


def _origin(thing: Any) -> str:
  return f'{thing.__module__}.{thing.__qualname__}'


def _spell_policy(engine: Engine) -> Iterator[str]:
  """The function that the engine names."""
  policy = registry.get('tree_policy', engine.decode.tree_policy)
  if not _is_ours(policy):
    raise _NotOursError
  yield _origin(policy)


def _spell(value: Any) -> Iterator[str]:
  """All that a value consists of.

  Raises:
    _NotOursError: something of it is of a class that this does not know.
  """
  if value is None or isinstance(value, (bool, int, float, str)):
    yield repr(value)
  elif isinstance(value, (tuple, list)):
    yield f'{len(value)} items'
    for item in value:
      yield from _spell(item)
  elif isinstance(value, dict):
    yield from _spell(sorted(value.items()))
  elif isinstance(value, np.dtype) or (
    isinstance(value, type) and issubclass(value, np.generic)
  ):
    yield str(np.dtype(value))
  elif dataclasses.is_dataclass(value) and _is_ours(type(value)):
    yield _origin(type(value))
    for field in dataclasses.fields(value):
      yield field.name
      yield from _spell(getattr(value, field.name))
  else:
    raise _NotOursError


def _surroundings() -> Iterator[str]:
  """Versions, settings and the device."""
  for module in (jax, jaxlib, flax, np):
    yield f'{module.__name__} {module.__version__}'
  device = jax.devices()[0]
  yield f'python {platform.python_version()} {platform.machine()}'
  yield f'{device.client.platform_version} {device.device_kind}'
  yield f'{jax.device_count()} {getattr(device, "core_count", None)}'
  yield os.environ.get('XLA_FLAGS', '')
  for name, value in sorted(dict(jax.config.values).items()):
    if not any(word in name for word in _NO_MATTER):
      yield f'{name}={value}'


def _sources() -> str | None:
  """The contents of both packages; None if they may not be what was imported.

  A file that was written since the import is not; nor is there any to read
  where packages are imported from an archive.
  """
  digest, count = hashlib.sha256(), 0
  try:
    for folder in _folders():
      for path in sorted(folder.rglob('*.py')):
        if not path.is_file():  # A lock of an editor is a dangling link.
          continue
        if path.stat().st_mtime >= _imported.AT:
          return None
        digest.update(f'{path.relative_to(folder.parent)}\n'.encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
        count += 1
  except OSError:
    return None
  return digest.hexdigest() if count else None
