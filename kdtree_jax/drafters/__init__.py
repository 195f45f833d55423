"""Drafters: DFlash, and stubs that isolate the engine from a drafter.

Importing the package registers them; `registry.names('drafter')` lists them.
"""

from kdtree_jax.drafters import (
  acceptance_rate,
  adversarial,
  dflash,
  null,
  oracle,
  random,
  repeat,
)
from kdtree_jax.drafters.base import Drafter, TargetHead

__all__ = (
  'Drafter',
  'TargetHead',
  'adversarial',
  'dflash',
  'acceptance_rate',
  'oracle',
  'random',
  'repeat',
  'null',
)
