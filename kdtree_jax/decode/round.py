"""Prefill and one decoding round, as pure functions of params and state.

A round is draft, build the tree, verify, accept, commit. Autoregressive
decoding is a round whose tree is the root alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kdtree_jax import registry
from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.sampling import choose_tokens
from kdtree_jax.decode.state import DecodeState, RoundStats
from kdtree_jax.model import ForwardOutput, commit
from kdtree_jax.tree import Acceptance, DraftTree, accept, root_only


class RoundTrace(NamedTuple):
  """What one round saw; dead code where a driver does not ask for it."""

  tree: DraftTree
  acceptance: Acceptance


def draft(engine: Engine, params: Params, state: DecodeState) -> jax.Array:
  """The drafter's logits `[B, D, V]` for the positions after the root."""
  return engine.drafter.draft(
    params['drafter'],
    state.drafter_state,
    state.tokens,
    state.length,
    engine.head(params),
  )


def build_tree(
  engine: Engine, state: DecodeState, logits: jax.Array | None
) -> DraftTree:
  """The draft tree over the root; the root alone without `logits`."""
  root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]
  if logits is None:
    return root_only(root)
  decode = engine.decode
  policy = registry.get('tree_policy', decode.tree_policy)
  return policy(logits, root, decode.tree_budget, decode.implementation)


def verify(
  engine: Engine, params: Params, state: DecodeState, tree: DraftTree
) -> tuple[jax.Array, ForwardOutput]:
  """One target forward over root and nodes: its tokens `[B, N]`, its rows.

  Finished rows and padding go to no expert.
  """
  out = engine.apply(
    params,
    tree.tokens,
    state.length[:, None] + tree.depths,
    state.cache,
    tree.valid & ~state.done[:, None],
    tree.ancestors,
  )
  return choose_tokens(engine.apply(params, out.hidden, method='logits')), out


def accept_path(
  engine: Engine, state: DecodeState, tree: DraftTree, target_tokens: jax.Array
) -> Acceptance:
  """The accepted path of every row."""
  depth = min(engine.decode.draft_depth, engine.decode.tree_budget)
  return accept(
    tree,
    target_tokens,
    state.stop_ids,
    max_depth=depth,
    implementation=engine.decode.implementation,
  )


def commit_path(
  engine: Engine,
  params: Params,
  state: DecodeState,
  tree: DraftTree,
  out: ForwardOutput,
  acceptance: Acceptance,
) -> DecodeState:
  """The one place that writes: caches, tokens, lengths, statistics."""
  length, active = state.length, ~state.done
  new_length = length + jnp.where(active, acceptance.acceptance_length, 0)
  # Past the limit the walk was right, but nobody asked for more: the cut
  # leaves the first uncommitted token as the root of a continuation.
  cut = new_length >= state.limit
  stopped = active & acceptance.stopped & (new_length <= state.limit)
  new_length = jnp.where(active, jnp.minimum(new_length, state.limit), length)
  drafter_state = state.drafter_state
  if engine.drafter is not None:
    features = jnp.take_along_axis(
      out.features, acceptance.path[:, :, None], axis=1
    )
    drafter_state = engine.drafter.commit(
      params['drafter'], drafter_state, features, length
    )
  return state.replace(
    tokens=_write_tokens(state, acceptance),
    done=state.done | cut | stopped,
    stopped=state.stopped | stopped,
    cache=commit(
      state.cache,
      out.rows,
      acceptance.path,
      new_length,
      engine.decode.implementation,
    ),
    drafter_state=drafter_state,
    stats=_record(state, tree, acceptance, active),
  )


def _write_tokens(state: DecodeState, acceptance: Acceptance) -> jax.Array:
  """Puts the accepted tokens and the next root behind the old root."""
  slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
  offset = slots - state.length[:, None] - 1
  count = jnp.where(state.done, 0, acceptance.acceptance_length)[:, None]
  last = acceptance.tokens.shape[1] - 1
  new = jnp.take_along_axis(
    acceptance.tokens, jnp.clip(offset, 0, last), axis=1
  )
  return jnp.where((offset >= 0) & (offset < count), new, state.tokens)


def _record(
  state: DecodeState,
  tree: DraftTree,
  acceptance: Acceptance,
  active: jax.Array,
) -> RoundStats:
  stats, at = state.stats, state.stats.rounds

  def put(column, values):
    values = jnp.where(active, values, 0)[:, None]
    return lax.dynamic_update_slice_in_dim(column, values, at, axis=1)

  return RoundStats(
    acceptance_length=put(
      stats.acceptance_length, acceptance.acceptance_length
    ),
    num_nodes=put(stats.num_nodes, tree.num_nodes),
    rounds=at + 1,
  )


def decode_round(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[DecodeState, RoundTrace]:
  """One round: draft, build, verify, accept, commit."""
  with jax.named_scope('draft'):
    logits = draft(engine, params, state) if engine.drafter else None
  with jax.named_scope('tree_build'):
    tree = build_tree(engine, state, logits)
  with jax.named_scope('verify'):
    target_tokens, out = verify(engine, params, state, tree)
  with jax.named_scope('accept'):
    acceptance = accept_path(engine, state, tree, target_tokens)
  with jax.named_scope('commit'):
    state = commit_path(engine, params, state, tree, out, acceptance)
  return state, RoundTrace(tree, acceptance)


def prefill(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
  """Commits the prompts chunk by chunk and chooses the first roots.

  A chunk is a chain tree over the committed rows, so it goes through the same
  attention as a verify. The number of chunks is a run-time value: a program
  serves every prompt length that its capacity admits.
  """
  chunk = engine.decode.prefill_chunk
  batch = state.tokens.shape[0]
  prompt_length = state.prompt_length

  def body(i, carry):
    state, last_hidden = carry
    out, state = prefill_chunk(engine, params, state, i * chunk)
    last = prompt_length - 1 - i * chunk
    hidden = jnp.take_along_axis(
      out.hidden, jnp.clip(last, 0, chunk - 1)[:, None, None], axis=1
    )[:, 0]
    here = (last >= 0) & (last < chunk)
    return state, jnp.where(here[:, None], hidden, last_hidden)

  hidden = jnp.zeros((batch, engine.config.hidden_size), _dtype(params))
  chunks = (prompt_length.max() + chunk - 1) // chunk
  state, hidden = lax.fori_loop(0, chunks, body, (state, hidden))
  root = choose_tokens(engine.apply(params, hidden, method='logits'))
  slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
  at_root = slots == prompt_length[:, None]
  return state.replace(tokens=jnp.where(at_root, root[:, None], state.tokens))


def prefill_chunk(
  engine: Engine, params: Params, state: DecodeState, start: jax.Array
) -> tuple[ForwardOutput, DecodeState]:
  """Commits the prompt tokens `start .. start + prefill_chunk - 1`.

  Rows whose prompt is over are padding throughout; what is written for them
  lies behind their length.
  """
  chunk = engine.decode.prefill_chunk
  tokens = lax.dynamic_slice_in_dim(state.tokens, start, chunk, axis=1)
  positions = start + jnp.arange(chunk, dtype=jnp.int32)[None, :]
  valid = positions < state.prompt_length[:, None]
  out = engine.apply(
    params,
    tokens,
    jnp.broadcast_to(positions, tokens.shape),
    state.cache,
    valid,
  )
  # The rows do not depend on the last layer's attention, which still reads
  # the cache: without the barrier the write may come first, on a copy.
  out = lax.optimization_barrier(out)
  path = jnp.broadcast_to(
    jnp.arange(chunk, dtype=jnp.int32)[None, :], tokens.shape
  )
  new_length = jnp.minimum(start + chunk, state.prompt_length)
  drafter_state = state.drafter_state
  if engine.drafter is not None:
    drafter_state = engine.drafter.commit(
      params['drafter'], drafter_state, out.features, state.length
    )
  cache = commit(
    state.cache, out.rows, path, new_length, engine.decode.implementation
  )
  return out, state.replace(cache=cache, drafter_state=drafter_state)


def _dtype(params: Params):
  return params['target']['embed_tokens']['weight'].dtype
