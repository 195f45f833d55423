"""The device ops of tree decoding, one folder each, entered by `<op>/api.py`.

Every op has a plain `jnp` reference that defines what is correct. Hand-written
kernels stand beside it and are chosen by `implementation=`. This package
imports jax, numpy and itself only.
"""

from pallas_kernels._dispatch import why_not_hopper

IMPLEMENTATIONS = ('reference', 'mosaic_gpu')

__all__ = ('IMPLEMENTATIONS', 'why_not_hopper')
