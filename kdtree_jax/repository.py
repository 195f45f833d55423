"""The place of the repository's top-level files, installed or not."""

import pathlib

_PACKAGE = pathlib.Path(__file__).parent


def repository_path(
  name: str, package: pathlib.Path = _PACKAGE
) -> pathlib.Path:
  """The path of `configs` or `run.py`: in a wheel inside the package.

  Args:
    name: a file or folder at the top of the repository that `force-include` in
      pyproject.toml puts into the wheel.
    package: the folder of `kdtree_jax`.
  """
  inside = package / name
  return inside if inside.exists() else package.parent / name
