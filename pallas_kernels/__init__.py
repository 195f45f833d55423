"""The device ops of tree decoding, each behind `<op>/api.py`.

Every op has a plain `jnp` reference that defines what is correct; hand-written
kernels stand beside it and are chosen by `implementation=`. This package
imports jax, numpy and itself only.
"""

from pallas_kernels._dispatch import hopper_gpu

IMPLEMENTATIONS = ('reference', 'mosaic_gpu')

__all__ = ('IMPLEMENTATIONS', 'hopper_gpu')
