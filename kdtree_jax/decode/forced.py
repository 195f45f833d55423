"""Decoding that follows a given text: how a drafter does on real text.

A round drafts, verifies and walks as ever, but what it commits is the text.
So every draft and every choice of the target is made behind real text, never
behind what the model said before, and loops of a model flatter nobody.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kdtree_jax.decode import round as stages
from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.generate import with_prefill
from kdtree_jax.decode.round import RoundTrace
from kdtree_jax.decode.state import DecodeState, all_done


class ForcedTrace(NamedTuple):
  """What one round saw.

  Attributes:
    by_text: the tree, and the walk along the text, which was committed.
    by_target: the same tree, and the walk that decoding would have committed
      there, along the target's own tokens.
  """

  by_text: RoundTrace
  by_target: RoundTrace


def forced_round(
  engine: Engine, params: Params, state: DecodeState, text: jax.Array
) -> tuple[DecodeState, ForcedTrace]:
  """One round that commits tokens of the text.

  Args:
    engine: with a drafter.
    params: of target and drafter.
    state: whose root is a token of the text.
    text: `[B, T]` int32, -1 where it is over.
  """
  logits = stages.draft(engine, params, state)
  tree = stages.build_tree(engine, state, logits)
  verified = stages.verify(engine, params, state, tree)
  after = state.length[:, None] + tree.depths + 1
  last = text.shape[1] - 1
  wanted = jnp.take_along_axis(text, jnp.minimum(after, last), axis=1)
  wanted = jnp.where(after <= last, wanted, -1)
  along = stages.accept_path(engine, state, tree, wanted)
  own = stages.accept_path(engine, state, tree, verified.tokens)
  state = stages.commit_path(engine, params, state, tree, verified.out, along)
  return state, ForcedTrace(RoundTrace(tree, along), RoundTrace(tree, own))


def forced(
  engine: Engine, params: Params, state: DecodeState, text: jax.Array
) -> Iterator[tuple[DecodeState, ForcedTrace | None]]:
  """Yields the state after prefill, without a trace, and after every round.

  A state is consumed by the step after it.
  """
  fill, step, _ = with_prefill((forced_round, engine, text), params, state)
  state = fill(params, state)
  # The first root is a token of the text, not the target's choice.
  slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
  at_root = slots == state.prompt_length[:, None]
  state = state.replace(tokens=jnp.where(at_root, text, state.tokens))
  yield state, None
  while not all_done(state):
    state, trace = step(params, state, text)
    yield state, trace
