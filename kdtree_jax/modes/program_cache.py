"""The folder in which JAX keeps compiled programs."""

import os
import pathlib

import jax


def keep_compiled_programs() -> None:
  """Enables JAX's cache on disk, unless JAX's settings name a folder.

  Does nothing if the folder cannot be made.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  caches = os.environ.get('XDG_CACHE_HOME')
  try:
    folder = pathlib.Path(caches or pathlib.Path.home() / '.cache')
    folder = folder / 'kdtree_jax'
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):  # Read-only, or no home folder.
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # The default of a second leaves out most programs of a small model.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)
