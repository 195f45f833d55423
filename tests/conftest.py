"""Strict JAX for every test: no silent promotion of dtypes or ranks."""

import os

# Most of the suite's time is LLVM's. Without its optimisations the programs
# are the same, XLA's passes and IEEE arithmetic included; what run.py does
# is tested as users run it, see tests/modes.
os.environ['XLA_FLAGS'] = ' '.join(
  [os.environ.get('XLA_FLAGS', ''), '--xla_backend_optimization_level=0']
).strip()

import jax  # noqa: E402

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
