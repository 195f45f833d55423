"""Strict JAX for every test: no silent promotion of dtypes or ranks."""

import jax

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
