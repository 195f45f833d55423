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
from kdtree_jax.decode.sampling import greedy_tokens, sampled_tokens
from kdtree_jax.decode.state import DecodeState, RoundStats
from kdtree_jax.model import ForwardOutput, commit
from kdtree_jax.tree import (
  Acceptance,
  DraftTree,
  accept,
  root_only,
  seed_chain,
)


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
  if engine.drafter.max_positions is not None:
    # A row beyond them has no draft, while others in the batch still have.
    beyond = beyond_drafter(engine, state)
    logits = jnp.where(beyond[:, None, None], -jnp.inf, logits)
  policy = registry.get('tree_policy', decode.tree_policy)
  tree = policy(logits, root, decode.tree_budget, decode.implementation)
  return seed_chain(tree, logits) if decode.keep_top1_chain else tree


def beyond_drafter(engine: Engine, state: DecodeState) -> jax.Array:
  """`[B]` bool: the next block reaches beyond the drafter's positions."""
  block = engine.drafter.block_size
  return state.length + block > engine.drafter.max_positions


class Verified(NamedTuple):
  """The target's answer to a tree.

  Attributes:
    tokens: `[B, N]` int32, its own choice after every node.
    logits: `[B, N, V]` float32.
    out: rows and features of the nodes.
  """

  tokens: jax.Array
  logits: jax.Array
  out: ForwardOutput


def verify(
  engine: Engine, params: Params, state: DecodeState, tree: DraftTree
) -> Verified:
  """One target forward over root and nodes.

  Finished rows and padding go to no expert.
  """
  out = engine.apply(
    params,
    tree.tokens,
    state.length[:, None] + tree.depths,
    state.cache,
    tree.valid & ~state.done[:, None],
    # A root alone is a chain, whose mask is cheaper.
    tree.ancestors if tree.tokens.shape[1] > 1 else None,
  )
  logits = engine.apply(params, out.hidden, method='logits')
  tokens = choose_tokens(engine, state, logits, tree.depths, state.length + 1)
  # The rows do not depend on the last layer's attention, which still reads the
  # cache, but the tokens do. Where the path is known beforehand, as that of a
  # root alone, the commit would otherwise come first, on a copy.
  tokens, rows = lax.optimization_barrier((tokens, out.rows))
  return Verified(tokens, logits, out.replace(rows=rows))


def choose_tokens(
  engine: Engine,
  state: DecodeState,
  logits: jax.Array,
  depths: jax.Array,
  first_position: jax.Array,
) -> jax.Array:
  """`[B, N]` int32: greedy or drawn; see `sampling.sampled_tokens`."""
  if not engine.decode.sample:
    return greedy_tokens(logits)
  return sampled_tokens(
    logits,
    depths,
    first_position,
    state.sampling,
    max_depth=max_depth(engine),
  )


def max_depth(engine: Engine) -> int:
  """The deepest node that a tree can have."""
  return min(engine.decode.draft_depth, engine.decode.tree_budget)


def accept_path(
  engine: Engine, state: DecodeState, tree: DraftTree, target_tokens: jax.Array
) -> Acceptance:
  """The accepted path of every row."""
  return accept(
    tree,
    target_tokens,
    state.stop_ids,
    max_depth=max_depth(engine),
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
    cache=commit(state.cache, out.rows, acceptance.path, new_length),
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


class RoundTrace(NamedTuple):
  """What one round computed; dead code where a driver does not ask for it.

  Attributes:
    tree: the draft tree.
    verified: the target's answer; None where a driver leaves it out.
    acceptance: the walk along the target's own tokens.
    committed: the walk that was committed: `acceptance`, or the one along a
      given text.
  """

  tree: DraftTree
  verified: Verified | None
  acceptance: Acceptance
  committed: Acceptance


def decode_round(
  engine: Engine,
  params: Params,
  state: DecodeState,
  text: jax.Array | None = None,
) -> tuple[DecodeState, RoundTrace]:
  """One round: draft, build, verify, accept, commit.

  Args:
    engine: the static half.
    params: parameters of target and drafter.
    state: the sequences.
    text: `[B, T]` int32, -1 after its end: commit tokens of this text where
      the tree holds them, in place of the target's own (teacher forcing).
  """
  with jax.named_scope('draft'):
    logits = draft(engine, params, state) if engine.drafts else None
  with jax.named_scope('tree_build'):
    tree = build_tree(engine, state, logits)
  with jax.named_scope('verify'):
    verified = verify(engine, params, state, tree)
  with jax.named_scope('accept'):
    acceptance = accept_path(engine, state, tree, verified.tokens)
    committed = acceptance
    if text is not None:
      wanted = _following(text, state, tree)
      committed = accept_path(engine, state, tree, wanted)
  with jax.named_scope('commit'):
    state = commit_path(engine, params, state, tree, verified.out, committed)
  return state, RoundTrace(tree, verified, acceptance, committed)


def _following(
  text: jax.Array, state: DecodeState, tree: DraftTree
) -> jax.Array:
  """`[B, N]` int32: the text's token after every node, -1 after its end."""
  after = state.length[:, None] + tree.depths + 1
  last = text.shape[1] - 1
  wanted = jnp.take_along_axis(text, jnp.minimum(after, last), axis=1)
  return jnp.where(after <= last, wanted, -1)


def prefill(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
  """Commits the prompts chunk by chunk and chooses the first roots.

  Begins behind what is committed already, so it also takes a further turn. A
  chunk is a chain tree over the committed rows, so it goes through the same
  attention as a verify. The number of chunks is a run-time value: a program
  serves every prompt length that its capacity admits.
  """
  chunk = engine.decode.prefill_chunk
  batch = state.tokens.shape[0]
  prompt_length = state.prompt_length

  def body(_, carry):
    state, last_hidden = carry
    last = prompt_length - 1 - state.length
    out, state = prefill_chunk(engine, params, state)
    hidden = jnp.take_along_axis(
      out.hidden, jnp.clip(last, 0, chunk - 1)[:, None, None], axis=1
    )[:, 0]
    here = (last >= 0) & (last < chunk)
    return state, jnp.where(here[:, None], hidden, last_hidden)

  hidden = jnp.zeros((batch, engine.config.hidden_size), _dtype(params))
  chunks = ((prompt_length - state.length).max() + chunk - 1) // chunk
  state, hidden = lax.fori_loop(0, chunks, body, (state, hidden))
  logits = engine.apply(params, hidden[:, None], method='logits')
  depths = jnp.zeros((batch, 1), jnp.int32)
  root = choose_tokens(engine, state, logits, depths, prompt_length)
  slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
  at_root = slots == prompt_length[:, None]
  return state.replace(tokens=jnp.where(at_root, root, state.tokens))


def prefill_chunk(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[ForwardOutput, DecodeState]:
  """Commits the next `prefill_chunk` prompt tokens of every row.

  Rows whose prompt is over are padding throughout; what is written for them
  lies behind their length.
  """
  chunk = engine.decode.prefill_chunk
  path = jnp.broadcast_to(
    jnp.arange(chunk, dtype=jnp.int32)[None, :],
    (state.tokens.shape[0], chunk),
  )
  positions = state.length[:, None] + path
  out = engine.apply(
    params,
    jnp.take_along_axis(state.tokens, positions, axis=1),
    positions,
    state.cache,
    positions < state.prompt_length[:, None],
  )
  # The rows do not depend on the last layer's attention, which still reads
  # the cache: without the barrier the write may come first, on a copy.
  out = lax.optimization_barrier(out.replace(routing=()))
  new_length = jnp.minimum(state.length + chunk, state.prompt_length)
  drafter_state = state.drafter_state
  if engine.drafter is not None:
    drafter_state = engine.drafter.commit(
      params['drafter'], drafter_state, out.features, state.length
    )
  cache = commit(state.cache, out.rows, path, new_length)
  return out, state.replace(cache=cache, drafter_state=drafter_state)


def _dtype(params: Params):
  return params['target']['embed_tokens']['weight'].dtype
