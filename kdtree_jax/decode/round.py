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
from kdtree_jax.decode.budget import (
  ROOT_ONLY,
  Choice,
  after_ar_step,
  after_round,
  ar_choice,
  choose,
  learnt,
  observed_overlap,
)
from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.sampling import greedy_tokens, sampled_tokens
from kdtree_jax.decode.state import DecodeState, RoundStats
from kdtree_jax.model import ForwardOutput, Routing, commit
from kdtree_jax.tree import (
  Acceptance,
  DraftTree,
  accept,
  keep_top1_chain,
  prefix,
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
  num_nodes: Int32[Array, ' B'],
  out: ForwardOutput,
  acceptance: Acceptance,
  choice: Choice | None = None,
) -> DecodeState:
  """Writes a round's results: caches, tokens, lengths and statistics.

  Args:
    engine: what to run.
    params: parameters of target and drafter.
    state: the sequences before the round.
    num_nodes: nodes verified, the root included.
    out: what the verify returned.
    acceptance: the walk to commit; its path indexes the rows of `out`.
    choice: the choice by cost, where there was one.
  """
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
    stats=_record(state, num_nodes, acceptance, active, choice),
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
  num_nodes: Int32[Array, ' B'],
  acceptance: Acceptance,
  active: Bool[Array, ' B'],
  choice: Choice | None,
) -> RoundStats:
  """The statistics with those of this round."""
  stats, at = state.stats, state.stats.rounds

  def put(column, values):
    values = jnp.where(active, values, 0)[:, None]
    return lax.dynamic_update_slice_in_dim(column, values, at, axis=1)

  if choice is not None:
    stats = stats.replace(
      predicted_tokens=put(stats.predicted_tokens, choice.predicted),
      ms=put(stats.ms, choice.ms),
      ar_ms=put(stats.ar_ms, choice.ar_ms),
    )
  return stats.replace(
    acceptance_length=put(
      stats.acceptance_length, acceptance.acceptance_length
    ),
    num_nodes=put(stats.num_nodes, num_nodes),
    rounds=at + 1,
  )


class RoundTrace(flax.struct.PyTreeNode):
  """Intermediate results of one round; XLA removes what is not used.

  Attributes:
    tree: the draft tree, as far as it was verified.
    drafted: the drafter's logits; None without a draft, or where a driver drops
      them.
    verified: the target's output; None where a driver drops it, or where it
      depends on a choice by cost.
    acceptance: the walk along the target's own tokens.
    committed: the walk that was committed: `acceptance`, or the one along a
      given text.
  """

  tree: DraftTree
  drafted: Float[Array, 'B D V'] | None
  verified: Verified | None
  acceptance: Acceptance
  committed: Acceptance


class Walk(flax.struct.PyTreeNode):
  """A verify and the walks along it, in sizes that suit every width.

  Attributes:
    target_tokens: the target's token after every node; -1 after others.
    acceptance: the walk along the target's own tokens.
    committed: the walk that is committed.
    rows: cache rows of the committed path.
    features: the target's features along it.
    overlap: the exponent of active experts that the verified rows show.
  """

  target_tokens: Int32[Array, 'B largest']
  acceptance: Acceptance
  committed: Acceptance
  rows: Float[Array, 'L B W C']
  features: Float[Array, 'B W F']
  overlap: Float32[Array, '']


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
  if engine.chooses and engine.drafts:
    return _chosen_round(engine, params, state, logits, tree, text)
  verified, acceptance, committed = _verified_walk(
    engine, params, state, tree, text
  )
  choice, budget = None, state.budget
  if budget is not None:
    choice = ar_choice(params['costs'], budget, state.length, state.done)
    taken = jnp.where(state.done, 0, committed.acceptance_length)
    budget = after_ar_step(budget, choice, taken)
  with jax.named_scope('commit'):
    state = commit_path(
      engine,
      params,
      state,
      tree.num_nodes,
      verified.out,
      committed,
      choice,
    )
  trace = RoundTrace(tree, logits, verified, acceptance, committed)
  return state.replace(budget=budget), trace


def _verified_walk(
  engine: Engine,
  params: Params,
  state: DecodeState,
  tree: DraftTree,
  text: Int32[Array, 'B T'] | None,
) -> tuple[Verified, Acceptance, Acceptance]:
  """A verify, the walk along the target's tokens and the one to commit."""
  with jax.named_scope('verify'):
    verified = verify(engine, params, state, tree)
  with jax.named_scope('accept'):
    acceptance = accept_path(engine, state, tree, verified.tokens)
    if text is None:
      return verified, acceptance, acceptance
    wanted = _following(text, state, tree)
    return verified, acceptance, accept_path(engine, state, tree, wanted)


def _chosen_round(
  engine: Engine,
  params: Params,
  state: DecodeState,
  logits: Float[Array, 'B D V'] | None,
  tree: DraftTree,
  text: Int32[Array, 'B T'] | None,
) -> tuple[DecodeState, RoundTrace]:
  """The rest of a round that verifies as many nodes as are worth their time.

  One of several programs runs, each for trees up to a width. They return the
  rows of the accepted path and only read the cache: XLA would copy a cache that
  a branch writes.
  """
  costs, budget = params['costs'], state.budget
  assert budget is not None
  widths = engine.decode.widths
  with jax.named_scope('choose'):
    choice = choose(
      costs,
      budget,
      widths,
      tree,
      state.length,
      state.max_length,
      state.done,
    )

  def walk(width):
    return lambda: _walk(
      engine, params, state, prefix(tree, choice.nodes, width), text
    )

  found = lax.switch(
    choice.program - ROOT_ONLY, [walk(width) for width in (0, *widths)]
  )
  with jax.named_scope('learn'):
    taken = jnp.where(state.done, 0, found.committed.acceptance_length)
    budget = after_round(
      costs, budget, choice, taken, found.overlap, state.done
    )
    budget = learnt(
      budget,
      tree,
      choice,
      found.target_tokens,
      found.acceptance,
      state.done,
    )
  verified_tree = prefix(tree, choice.nodes, widths[-1])
  path = found.committed.path
  gathered = jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
  # Nothing after the verify reads it.
  hidden = jnp.zeros((*path.shape, engine.config.hidden_size), found.rows.dtype)
  with jax.named_scope('commit'):
    state = commit_path(
      engine,
      params,
      state,
      verified_tree.num_nodes,
      ForwardOutput(hidden, found.features, found.rows, ()),
      found.committed.replace(path=jnp.broadcast_to(gathered, path.shape)),
      choice,
    )
  trace = RoundTrace(
    verified_tree, logits, None, found.acceptance, found.committed
  )
  return state.replace(budget=budget), trace


def _walk(
  engine: Engine,
  params: Params,
  state: DecodeState,
  tree: DraftTree,
  text: Int32[Array, 'B T'] | None,
) -> Walk:
  """What one of the programs of a round returns."""
  verified, acceptance, committed = _verified_walk(
    engine, params, state, tree, text
  )
  path, out = committed.path, verified.out
  slots = 1 + engine.decode.tree_budget
  unknown = slots - tree.tokens.shape[1]
  return Walk(
    target_tokens=jnp.pad(
      verified.tokens, ((0, 0), (0, unknown)), constant_values=-1
    ),
    acceptance=acceptance,
    committed=committed,
    rows=jnp.take_along_axis(out.rows, path[None, :, :, None], axis=2),
    features=jnp.take_along_axis(out.features, path[:, :, None], axis=1),
    overlap=_overlap(engine, state, tree, out.routing),
  )


def _overlap(
  engine: Engine,
  state: DecodeState,
  tree: DraftTree,
  routing: tuple[Routing, ...],
) -> Float32[Array, '']:
  """The exponent of active experts that a verify shows, if it shows any."""
  assert state.budget is not None
  live = tree.valid & ~state.done[:, None]
  rows = live.sum(dtype=jnp.int32)
  if not routing:
    return state.budget.overlap
  experts = engine.config.n_routed_experts
  ids = jnp.stack([layer.ids for layer in routing])
  ids = jnp.where(live[None, :, :, None], ids, -1).reshape(len(routing), -1)
  active = (
    ids[:, :, None] == jnp.arange(experts, dtype=jnp.int32)[None, None, :]
  ).any(axis=1)
  shown = observed_overlap(
    active.sum(dtype=jnp.float32) / len(routing),
    rows,
    experts,
    engine.config.num_experts_per_tok,
  )
  return jnp.where(rows >= 2, shown, state.budget.overlap)


def _following(
  text: Int32[Array, 'B T'], state: DecodeState, tree: DraftTree
) -> Int32[Array, 'B N']:
  """The text's token after every node, -1 after the text's end."""
  after = state.length[:, None] + tree.depths + 1
  last = text.shape[1] - 1
  wanted = jnp.take_along_axis(text, jnp.minimum(after, last), axis=1)
  return jnp.where(after <= last, wanted, -1)
