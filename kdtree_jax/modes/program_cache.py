"""Where JAX keeps what it compiled."""

import os
import pathlib

import jax


def keep_compiled_programs() -> None:
  """Turns JAX's cache on disk on, unless its own settings name a folder.

  Where no folder can be made, nothing is kept.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  caches = os.environ.get('XDG_CACHE_HOME')
  try:
    folder = pathlib.Path(caches or pathlib.Path.home() / '.cache')
    folder = folder / 'kdtree_jax'
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):  # Read-only, or a user without a home.
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # The default of a second forgets most of what a small model compiles.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)
