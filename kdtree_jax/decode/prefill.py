"""Prefill: prompts are committed, and the first roots chosen."""

import jax.numpy as jnp
from jax import lax

from kdtree_jax.decode.engine import Engine, Params
from kdtree_jax.decode.round import choose_tokens
from kdtree_jax.decode.state import DecodeState
from kdtree_jax.model import ForwardOutput, commit


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
