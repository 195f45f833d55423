"""Loops on the device over single stages of a round, to time them.

The operands of every iteration are made to depend on its number: otherwise XLA
would hoist the work out of the loop. The host takes no part in between.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kdtree_jax.decode import DecodeState, Engine
from kdtree_jax.decode import round as stages
from kdtree_jax.decode.engine import Params
from kdtree_jax.model import ForwardOutput
from kdtree_jax.tree import Acceptance, DraftTree


def _loop[T, R](
  count: Int32[Array, ''], call: Callable[[T], R], operands: T
) -> R:
  """The result of `call(operands)` after `count` calls."""
  shapes = jax.eval_shape(call, operands)
  empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def body(i, _):
    tied, _ = lax.optimization_barrier((operands, i))
    return call(tied)

  return lax.fori_loop(0, count, body, empty)


def draft_loop(
  engine: Engine, params: Params, state: DecodeState, count: Int32[Array, '']
) -> Float[Array, 'B D V']:
  """`count` drafts after the same root."""

  def call(tokens):
    return stages.draft(engine, params, state.replace(tokens=tokens))

  return _loop(count, call, state.tokens)


def build_loop(
  engine: Engine,
  params: Params,
  state: DecodeState,
  count: Int32[Array, ''],
  drafted: Float[Array, 'B D V'],
) -> DraftTree:
  """`count` trees of the same draft."""
  del params
  return _loop(count, lambda x: stages.build_tree(engine, state, x), drafted)


def accept_loop(
  engine: Engine,
  params: Params,
  state: DecodeState,
  count: Int32[Array, ''],
  tree: DraftTree,
  tokens: Int32[Array, 'B N'],
) -> Acceptance:
  """`count` walks through the same tree along the same target tokens."""
  del params

  def call(operands):
    return stages.accept_path(engine, state, *operands)

  return _loop(count, call, (tree, tokens))


def commit_loop(
  engine: Engine,
  params: Params,
  state: DecodeState,
  count: Int32[Array, ''],
  tree: DraftTree,
  out: ForwardOutput,
  acceptance: Acceptance,
) -> DecodeState:
  """`count` commits after the same length. Consumes `state`."""

  def body(i, state):
    tied, _ = lax.optimization_barrier(((out, acceptance), i))
    new = stages.commit_path(engine, params, state, tree.num_nodes, *tied)
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
  """Ones in place of a verify's result, for `commit_loop`."""
  assert engine.drafter is not None
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
) -> tuple[DecodeState, Int32[Array, 'moe_layers N K']]:
  """One round, and the experts of its rows, -1 for padding.

  A tree of a smaller budget is a prefix of this one, and a node's routing
  depends on its ancestors alone: so the largest budget gives the experts of all
  budgets. Consumes `state`.
  """
  state, trace = stages.decode_round(engine, params, state)
  assert trace.verified is not None
  tree, routing = trace.tree, trace.verified.out.routing
  if not routing:
    shape = (0, tree.tokens.shape[1], engine.config.num_experts_per_tok)
    return state, jnp.zeros(shape, jnp.int32)
  ids = jnp.stack([layer.ids[0] for layer in routing])
  return state, jnp.where(tree.valid[0][None, :, None], ids, -1)
