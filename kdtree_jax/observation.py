"""Decoding round by round, with the target's logits and routing at each token.

An audit compares such observations of different engines.
"""

import concurrent.futures
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from kdtree_jax import generation
from kdtree_jax.decode import DecodeState, Engine, drivers
from kdtree_jax.decode import round as stages
from kdtree_jax.decode.compilation import Call
from kdtree_jax.decode.engine import Params
from kdtree_jax.decode.state import HostState, all_done

# Router scores and experts of each MoE layer, of the rows along a path.
_Routing = list[tuple[Float32[Array, 'W E'], Int32[Array, 'W K']]]


class Observation(NamedTuple):
  """One decoded row; index i is that of the i-th committed new token.

  Attributes:
    output_ids: the tokens.
    logits: the logits after each token.
    choice: the router scores of each token.
    experts: the experts of each token.
    accepted: the acceptance length of every round.
    state: the last state.
  """

  output_ids: list[int]
  logits: Float[np.ndarray, 'tokens V']
  choice: Float[np.ndarray, 'tokens moe_layers E']
  experts: Int[np.ndarray, 'tokens moe_layers K']
  accepted: list[int]
  state: DecodeState

  def first(self, count: int) -> 'Observation':
    """The first `count` tokens of an observation of AR."""
    cut = {name: getattr(self, name)[:count] for name in self._fields[:-1]}
    return self._replace(**cut)


def observed_calls(request: generation.Request) -> list[Call]:
  """Prefill and observed rounds of a request, to be compiled for `observe`."""
  return drivers.round_calls(
    _observed_round, request.engine, request.params, request.state, donate=False
  )


def _observed_round(
  engine: Engine, params: Params, state: DecodeState
) -> tuple[DecodeState, Float32[Array, 'W V'], _Routing]:
  """One round, with the target's logits and routing along the path."""
  state, trace = stages.decode_round(engine, params, state)
  assert trace.verified is not None

  def along_path(x):
    path = trace.committed.path
    return jnp.take_along_axis(x, path[:, :, None], axis=1)[0]

  routing = [
    (along_path(layer.choice), along_path(layer.ids))
    for layer in trace.verified.out.routing
  ]
  return state, along_path(trace.verified.logits), routing


def observe(
  request: generation.Request,
  programs: Sequence[concurrent.futures.Future[jax.stages.Compiled]],
  output_ids: list[int] | None = None,
) -> Observation:
  """Decodes round by round and keeps the rows of committed tokens.

  Args:
    request: what to decode.
    programs: the programs of `observed_calls`, which threads may still compile.
    output_ids: the output, whatever the target chooses; None for the target's.
  """
  fill, *steps = (program.result() for program in programs)
  step = drivers.round_step(request.engine, steps)
  state, rounds = fill(request.params, request.state), []
  start = int(HostState.of(state).prompt_length[0])
  while not all_done(state):
    if output_ids is not None:
      given = jnp.asarray(output_ids, jnp.int32)[None]
      tokens = lax.dynamic_update_slice(state.tokens, given, (0, start))
      state = state.replace(tokens=tokens)
    state, logits, routing = step(request.params, state)
    accepted = np.asarray(state.stats.acceptance_length)
    count = int(accepted[0, int(state.stats.rounds) - 1])
    rounds.append(_rows(logits, routing, count))
  host = HostState.of(state)
  length, accepted = int(host.length[0]), host.stats.acceptance_length[0]
  logits, choice, experts = (
    np.concatenate(parts)[: length - start]
    for parts in zip(*rounds, strict=True)
  )
  return Observation(
    output_ids=host.tokens[0, start:length].tolist(),
    logits=logits,
    choice=choice,
    experts=experts,
    accepted=accepted[accepted > 0].tolist(),
    state=state,
  )


def _rows(
  logits: Float32[Array, 'W V'], routing: _Routing, count: int
) -> tuple[
  Float[np.ndarray, 'tokens V'],
  Float[np.ndarray, 'tokens moe_layers E'],
  Int[np.ndarray, 'tokens moe_layers K'],
]:
  """Logits, router scores and experts of a round's `count` committed rows."""
  # Sliced on the host: on the device every count would compile a program.
  logits, routing = jax.device_get((logits, routing))
  if not routing:
    return logits[:count], np.zeros((count, 0, 1)), np.zeros((count, 0, 1), int)
  choice, experts = (
    np.stack(layers, axis=1)[:count] for layers in zip(*routing, strict=True)
  )
  return logits[:count], choice, experts
