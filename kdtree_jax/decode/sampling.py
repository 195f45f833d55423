"""The target's own token at every node: the one place where it is chosen."""

import jax
import jax.numpy as jnp


def choose_tokens(logits: jax.Array) -> jax.Array:
  """Greedy: `[..., V]` -> `[...]` int32, ties to the lowest id."""
  return jnp.argmax(logits, axis=-1).astype(jnp.int32)
