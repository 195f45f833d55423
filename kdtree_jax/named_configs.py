"""The files of `configs/`, found by file name and loaded on demand.

`configs/` is a folder of the repository, to which forks add files. It is not a
package: a wheel holds it inside `kdtree_jax`, so that it takes no top-level
name, and files are loaded by path from the folder that exists.
"""

import functools
import importlib.util
import pathlib
import types
from importlib.machinery import SourceFileLoader
from typing import Any

from kdtree_jax.config import ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.files import one_line
from kdtree_jax.repository import repository_path
from kdtree_jax.training.recipe import DrafterRecipe, TrainRecipe


def config_names() -> tuple[str, ...]:
  """Names of the files in `configs/`, without `.py`."""
  files = repository_path('configs').glob('[!_]*.py')
  return tuple(sorted(path.stem for path in files))


def load_config(name: str) -> ModelConfig:
  """The `CONFIG` of `configs/<name>.py`.

  Raises:
    UserError: there is no such file; the message lists those that exist.
  """
  known = config_names()
  if name not in known:
    raise UserError(f'unknown config {name!r}; known: {", ".join(known)}')
  return _load(repository_path('configs') / f'{name}.py').CONFIG


def recipe_names(attribute: str = 'RECIPE') -> tuple[str, ...]:
  """The files in `configs/` that hold a recipe under this name."""
  folder = repository_path('configs')
  return tuple(
    name
    for name in config_names()
    if hasattr(_load(folder / f'{name}.py'), attribute)
  )


def load_recipe(
  name: str, attribute: str = 'RECIPE'
) -> tuple[ModelConfig, Any]:
  """`CONFIG` and a recipe of `configs/<name>.py`.

  Args:
    name: the file's name.
    attribute: `RECIPE` for the target's, another name for a drafter's.

  Raises:
    UserError: there is no such file, it cannot be run, or it has no such
      recipe.
  """
  config = load_config(name)
  if name not in (known := recipe_names(attribute)):
    raise UserError(
      f'configs/{name}.py has no {attribute}; files that have one: '
      f'{", ".join(known)}'
    )
  module = _load(repository_path('configs') / f'{name}.py')
  recipe = getattr(module, attribute)
  kind = TrainRecipe if attribute == 'RECIPE' else DrafterRecipe
  if type(recipe) is not kind:
    raise UserError(
      f'configs/{name}.py: {attribute} is a {type(recipe).__name__}, not a '
      f'{kind.__name__}'
    )
  return config, recipe


@functools.cache
def _load(path: pathlib.Path) -> types.ModuleType:
  """The module in a file, which is executed once.

  Raises:
    UserError: the file, which a user may have written, raised an exception.
  """
  try:
    return _execute(path)
  except Exception as e:
    what = '' if isinstance(e, UserError) else f'{type(e).__name__}: '
    raise UserError(f'configs/{path.name}: {what}{one_line(e)}') from e


def _execute(path: pathlib.Path) -> types.ModuleType:
  loader = SourceFileLoader(f'configs.{path.stem}', str(path))
  spec = importlib.util.spec_from_loader(loader.name, loader)
  assert spec is not None  # None is for names without a loader.
  module = importlib.util.module_from_spec(spec)
  loader.exec_module(module)
  return module
