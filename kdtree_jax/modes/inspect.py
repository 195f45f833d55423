"""`--mode=inspect`: what is in a bundle or a checkpoint."""

from kdtree_jax.io.describe import describe
from kdtree_jax.modes.options import InspectFlags


def run(flags: InspectFlags) -> int:
  """Prints the description of `--target`."""
  print(describe(flags.target))
  return 0
