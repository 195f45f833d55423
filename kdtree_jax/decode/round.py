"""Prefill and one decoding round, as pure functions of params and state.

A round is draft, build the tree, verify, accept, commit. Autoregressive
decoding is a round whose tree is the root alone.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kdtree_jax import registry
from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.sampling import greedy_tokens, sampled_tokens
from kdtree_jax.decode.state import DecodeState, RoundStats
from kdtree_jax.model import ForwardOutput, commit
from kdtree_jax.tree import (
  Acceptance,
  DraftTree,
  accept,
  keep_top1_chain,
  root_only,
)


def draft(
  engine: Engine, params: Params, state: DecodeState
) -> Float[Array, 'B D V']:
  """The drafter's logits for the positions after the root."""
  assert engine.drafter is not None
  return engine.drafter.draft(
    params['drafter'],
    state.drafter_state,
    state.tokens,
    state.length,
    engine.head(params),
  )


def build_tree(
  engine: Engine, state: DecodeState, logits: Float[Array, 'B D V'] | None
) -> DraftTree:
  """The draft tree under the root; the root alone without `logits`."""
  root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]
  if engine.drafter is None or logits is None:
    return root_only(root)
  decode = engine.decode
  if engine.drafter.max_positions is not None:
    # No draft for rows beyond them; the batch's other rows still have one.
    beyond = beyond_drafter(engine, state)
    logits = jnp.where(beyond[:, None, None], -jnp.inf, logits)
  policy = registry.get('tree_policy', decode.tree_policy)
  tree = policy(logits, root, decode.tree_budget, decode.implementation)
  return keep_top1_chain(tree, logits) if decode.keep_top1_chain else tree


def beyond_drafter(engine: Engine, state: DecodeState) -> Bool[Array, ' B']:
  """Whether a row's next block reaches beyond the drafter's last position."""
  drafter = engine.drafter
  assert drafter is not None and drafter.max_positions is not None
  return state.length + drafter.block_size > drafter.max_positions


class Verified(flax.struct.PyTreeNode):
  """The target's output for a tree.

  Attributes:
    tokens: the target's own choice after every node.
    logits: its logits after every node.
    out: cache rows and features of the nodes.
  """

  tokens: Int32[Array, 'B N']
  logits: Float32[Array, 'B N V']
  out: ForwardOutput


def verify(
  engine: Engine, params: Params, state: DecodeState, tree: DraftTree
) -> Verified:
  """One target forward over the root and its nodes.

  Finished rows and padding are routed to no expert.
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
  # cache. If the path is known beforehand, as for a root alone, XLA could
  # commit them first, and would copy the cache. The tokens do depend on that
  # attention, so the barrier makes the commit wait for it.
  tokens, rows = lax.optimization_barrier((tokens, out.rows))
  return Verified(tokens, logits, out.replace(rows=rows))


def choose_tokens(
  engine: Engine,
  state: DecodeState,
  logits: Float32[Array, 'B N V'],
  depths: Int32[Array, 'B N'],
  first_position: Int32[Array, ' B'],
) -> Int32[Array, 'B N']:
  """The target's tokens, greedy or sampled; see `sampling.sampled_tokens`."""
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
  engine: Engine,
  state: DecodeState,
  tree: DraftTree,
  target_tokens: Int32[Array, 'B N'],
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
  """Writes a round's results: caches, tokens, lengths and statistics."""
  length, active = state.length, ~state.done
  new_length = length + jnp.where(active, acceptance.acceptance_length, 0)
  # Tokens of the walk beyond the maximum are right, but not asked for. The
  # first of them is the root from which a continuation would go on.
  is_full = new_length >= state.max_length
  stopped = active & acceptance.stopped & (new_length <= state.max_length)
  new_length = jnp.minimum(new_length, state.max_length)
  new_length = jnp.where(active, new_length, length)
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
    done=state.done | is_full | stopped,
    stopped=state.stopped | stopped,
    cache=commit(state.cache, out.rows, acceptance.path, new_length),
    drafter_state=drafter_state,
    stats=_record(state, tree, acceptance, active),
  )


def _write_tokens(
  state: DecodeState, acceptance: Acceptance
) -> Int32[Array, 'B T']:
  """The tokens with the accepted ones and the next root after the old root."""
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
  active: Bool[Array, ' B'],
) -> RoundStats:
  """The statistics with those of this round."""
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


class RoundTrace(flax.struct.PyTreeNode):
  """Intermediate results of one round; XLA removes what is not used.

  Attributes:
    tree: the draft tree.
    verified: the target's output; None where a driver drops it.
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
  text: Int32[Array, 'B T'] | None = None,
) -> tuple[DecodeState, RoundTrace]:
  """One round: draft, build, verify, accept, commit.

  Args:
    engine: what to run.
    params: parameters of target and drafter.
    state: the sequences.
    text: for teacher forcing: the round commits tokens of this text in place of
      the target's own; -1 after its end.
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
  text: Int32[Array, 'B T'], state: DecodeState, tree: DraftTree
) -> Int32[Array, 'B N']:
  """The text's token after every node, -1 after the text's end."""
  after = state.length[:, None] + tree.depths + 1
  last = text.shape[1] - 1
  wanted = jnp.take_along_axis(text, jnp.minimum(after, last), axis=1)
  return jnp.where(after <= last, wanted, -1)


def prefill(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
  """Commits the prompts chunk by chunk and chooses the first roots.

  Prefill begins after the tokens that are committed already, so it also serves
  the further turns of a conversation. A chunk is a chain tree over the
  committed rows, so it uses the same attention as a verify. The number of
  chunks is a run-time value: one program serves all prompt lengths up to its
  capacity.
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

  dtype = params['target']['embed_tokens']['weight'].dtype
  hidden = jnp.zeros((batch, engine.config.hidden_size), dtype)
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

  A row whose prompt is finished is padding: what is written for it lies after
  its length, where nothing is read.
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
  # As in `verify`: the last layer's attention reads the cache before the commit
  # writes it.
  out = lax.optimization_barrier(out.replace(routing=()))
  new_length = jnp.minimum(state.length + chunk, state.prompt_length)
  drafter_state = state.drafter_state
  if engine.drafter is not None:
    drafter_state = engine.drafter.commit(
      params['drafter'], drafter_state, out.features, state.length
    )
  cache = commit(state.cache, out.rows, path, new_length)
  return out, state.replace(cache=cache, drafter_state=drafter_state)
