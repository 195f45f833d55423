"""`--mode=inspect`: what is in a bundle or a checkpoint."""

from kdtree_jax.io.describe import describe
from kdtree_jax.modes.run_config import RunConfig, required

FLAGS = ('target',)


def run(config: RunConfig) -> int:
  """Prints the description of `--target`."""
  print(describe(required(config.target, 'target', 'inspect')))
  return 0
