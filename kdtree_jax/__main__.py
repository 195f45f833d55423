"""`python -m kdtree_jax`, and the command `kdtree_jax`: run.py."""

import runpy

from kdtree_jax.repository import repository_path


def main() -> None:
  """Runs run.py with this process's arguments."""
  runpy.run_path(str(repository_path('run.py')), run_name='__main__')


if __name__ == '__main__':
  main()
