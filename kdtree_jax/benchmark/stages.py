"""Loops on the device over single stages of a round, and what they yield.

The operands of every iteration are tied to its number, or the compiler would
take the work out of the loop; nothing waits for the host in between.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kdtree_jax.decode import DecodeState, Engine
from kdtree_jax.decode import round as stages
from kdtree_jax.decode.engine import Params
from kdtree_jax.model import ForwardOutput
from kdtree_jax.tree import Acceptance, DraftTree


def _loop(count: jax.Array, call: Any, operands: Any) -> Any:
  """`call(operands)`, `count` times; the last result."""
  shapes = jax.eval_shape(call, operands)
  empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def body(i, _):
    tied, _ = lax.optimization_barrier((operands, i))
    return call(tied)

  return lax.fori_loop(0, count, body, empty)


def draft_loop(
  engine: Engine, params: Params, state: DecodeState, count: jax.Array
) -> Any:
  """`count` drafts after the same root."""

  def call(tokens):
    return stages.draft(engine, params, state.replace(tokens=tokens))

  return _loop(count, call, state.tokens)


def build_loop(
  engine: Engine,
  params: Params,
  state: DecodeState,
  count: jax.Array,
  drafted: Any,
) -> DraftTree:
  """`count` trees of the same draft."""
  del params
  return _loop(count, lambda x: stages.build_tree(engine, state, x), drafted)


def accept_loop(
  engine: Engine,
  params: Params,
  state: DecodeState,
  count: jax.Array,
  tree: DraftTree,
  tokens: jax.Array,
) -> Acceptance:
  """`count` walks through the same tree, for target tokens `[B, N]`."""
  del params

  def call(operands):
    return stages.accept_path(engine, state, *operands)

  return _loop(count, call, (tree, tokens))


def commit_loop(
  engine: Engine,
  params: Params,
  state: DecodeState,
  count: jax.Array,
  tree: DraftTree,
  out: ForwardOutput,
  acceptance: Acceptance,
) -> DecodeState:
  """`count` commits behind the same length. Consumes `state`."""

  def body(i, state):
    tied, _ = lax.optimization_barrier(((out, acceptance), i))
    new = stages.commit_path(engine, params, state, tree, *tied)
    return new.replace(
      done=state.done,
      stopped=state.stopped,
      cache=new.cache.replace(length=state.length),
      stats=new.stats.replace(rounds=state.stats.rounds),
    )

  return lax.fori_loop(0, count, body, state)


def forward_output(
  engine: Engine, state: DecodeState, tree: DraftTree
) -> ForwardOutput:
  """Ones in the place of what a verify leaves for `commit_loop`."""
  layers, _, _, width = state.cache.latent.shape
  dtype, (batch, rows) = state.cache.latent.dtype, tree.tokens.shape
  taps = len(engine.drafter.tap_layers) * engine.config.hidden_size
  return ForwardOutput(
    hidden=jnp.ones((batch, rows, 0), dtype),
    features=jnp.ones((batch, rows, taps), dtype),
    rows=jnp.ones((layers, batch, rows, width), dtype),
    routing=(),
  )


def routed_round(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[DecodeState, jax.Array]:
  """One round, and where its rows went: `[layers, N, K]`, -1 for nowhere.

  A tree of a smaller budget is its first nodes, and a node's routing depends
  on its ancestors alone: the largest budget answers for all. Consumes `state`.
  """
  state, trace = stages.decode_round(engine, params, state)
  tree, routing = trace.tree, trace.verified.out.routing
  chosen = engine.config.num_experts_per_tok
  if not routing:
    return state, jnp.zeros((0, tree.tokens.shape[1], chosen), jnp.int32)
  ids = jnp.stack([layer.ids[0] for layer in routing])
  return state, jnp.where(tree.valid[0][None, :, None], ids, -1)
