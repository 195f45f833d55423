"""Drafters: DFlash, and stubs that isolate the engine from a drafter.

Importing the package registers them; `registry.names('drafter')` lists them.
"""

from kdtree_jax.drafters import (
  adversarial,
  dflash,
  hit_rate,
  oracle,
  random,
  repeat,
  silent,
)
from kdtree_jax.drafters.base import Drafter, TargetHead

__all__ = (
  'Drafter',
  'TargetHead',
  'adversarial',
  'dflash',
  'hit_rate',
  'oracle',
  'random',
  'repeat',
  'silent',
)
