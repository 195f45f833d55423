"""An independent reference in plain NumPy, without JAX or kernels.

It imports the standard library, NumPy and ml_dtypes, and nothing of the engine,
so that the two share no error.
"""

from kdtree_jax.reference.cache import ListCache, Rows
from kdtree_jax.reference.ddtree import (
  ReferenceTree,
  build_tree,
  chain_tree,
  make_tree,
  walk,
)
from kdtree_jax.reference.decode import (
  Generation,
  Round,
  chain_generate,
  ddtree_generate,
  greedy,
)
from kdtree_jax.reference.dflash import ReferenceDrafter
from kdtree_jax.reference.model import ForwardOutput, ReferenceModel
from kdtree_jax.reference.weights import (
  make_golden,
  random_tensors,
  tensor_shapes,
)

__all__ = (
  'ForwardOutput',
  'Generation',
  'ListCache',
  'ReferenceDrafter',
  'ReferenceModel',
  'ReferenceTree',
  'Round',
  'Rows',
  'build_tree',
  'chain_generate',
  'chain_tree',
  'ddtree_generate',
  'greedy',
  'make_golden',
  'make_tree',
  'random_tensors',
  'tensor_shapes',
  'walk',
)
