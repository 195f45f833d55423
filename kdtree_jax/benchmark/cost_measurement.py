"""Tables of costs: measured with a request's own program, or from bytes."""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.benchmark import traffic
from kdtree_jax.costs import (
  CostPoint,
  CostTable,
  cached_path,
  cost_key,
  difference,
  read_costs,
  shipped_costs,
  write_costs,
)
from kdtree_jax.decode import DecodeState, Engine
from kdtree_jax.decode.budget import StepCosts, active_experts, init_budget
from kdtree_jax.decode.compilation import compile_all
from kdtree_jax.decode.drivers import decode_calls
from kdtree_jax.decode.engine import Params
from kdtree_jax.decode.state import empty_stats
from kdtree_jax.errors import UserError
from kdtree_jax.keys import Purpose, key_for

BYTES = 'bytes'
# The scale of times from bytes; a choice depends on their ratios alone.
BYTES_PER_SECOND = 4e12
NODES = (0, 1, 2, 4, 8, 16, 24, 32, 64)
RUNS = 3
# Rounds of the longer of two runs, whose times are subtracted.
ROUNDS = 21
# AR steps of a run that does not draft.
_ASLEEP = 1 << 30

# Tables of this process, where there is no folder to keep them in.
_measured: dict[str, CostTable] = {}


def resolve_costs(
  given: str | None, engine: Engine, params: Params, state: DecodeState
) -> StepCosts:
  """The costs for a request, measured now if need be.

  Args:
    given: the option `costs`; see `GenerateOptions`.
    engine: the request's.
    params: parameters of target and drafter.
    state: the request's, of which shapes and dtypes are used.

  Raises:
    UserError: the table is of another model, device or JAX, or none at all.
  """
  batch, dtype = len(state.done), state.cache.latent.dtype
  key = cost_key(engine, dtype, _stored(params))
  shipped = shipped_costs()
  if given == BYTES:
    table = bytes_table(engine, params, state)
  elif given in shipped:
    table = read_costs(shipped[given])
    of_another = difference(table.key, key) is not None
    table = dataclasses.replace(table, name=given, fixed=of_another)
  elif given is not None:
    table = read_costs(given)
    if other := difference(table.key, key):
      raise UserError(
        f'costs={given} was measured for {other}; measure this machine and '
        'model, or leave the option out'
      )
  else:
    table = _kept(key, batch) or _measure_and_keep(key, engine, params, state)
  return table.step_costs(engine, batch)


def _stored(params: Params) -> str:
  """The kinds of the target's weights."""
  return ' '.join(
    sorted({leaf.dtype.name for leaf in jax.tree.leaves(params['target'])})
  )


def _kept(key: dict[str, Any], batch: int) -> CostTable | None:
  """The table that was measured before, if it can be read."""
  path = cached_path(key, batch)
  if path is None:
    return _measured.get(json.dumps([key, batch]))
  try:
    table = read_costs(path)
  except UserError:
    return None
  return None if difference(table.key, key) else table


def _measure_and_keep(
  key: dict[str, Any], engine: Engine, params: Params, state: DecodeState
) -> CostTable:
  batch = len(state.done)
  print(
    f'measuring what steps of this model cost here (batch {batch}), once; '
    'costs=... names a table',
    file=sys.stderr,
  )
  points = measure_points(engine, params, state)
  table = CostTable('the measured table of costs', key, tuple(points))
  if (path := cached_path(key, batch)) is None:
    _measured[json.dumps([key, batch])] = table
  else:
    try:
      write_costs(table, path)
    except OSError:  # A folder that cannot be written keeps nothing.
      _measured[json.dumps([key, batch])] = table
  return table


def measure_points(
  engine: Engine,
  params: Params,
  state: DecodeState,
  contexts: Sequence[int] = (),
  nodes: Sequence[int] = NODES,
  progress: Callable[[CostPoint], None] | None = None,
) -> list[CostPoint]:
  """Times of an engine's program at every number of nodes.

  The program is the one that `generate` runs, with costs that make it choose a
  given number of nodes.

  Args:
    engine: one that chooses.
    params: parameters of target and drafter.
    state: a state of the batch, whose shapes are used; it is not consumed.
    contexts: lengths to measure at; default: a quarter of the capacity.
    nodes: numbers of nodes; those of all widths are added.
    progress: called with each point.
  """
  widths = engine.decode.widths
  rounds = _Rounds(engine, params, state)
  contexts = contexts or (max(1, engine.decode.capacity // 4),)
  wanted = sorted({n for n in (*nodes, *widths) if n <= widths[-1]})
  points = []
  for context in contexts:
    for n in (None, *wanted):
      point = rounds.point(context, n)
      points.append(point)
      if progress is not None:
        progress(point)
  return points


class _Rounds:
  """Timed rounds of one program, on random rows in its caches."""

  def __init__(self, engine: Engine, params: Params, state: DecodeState):
    self.engine = engine
    self.batch = len(state.done)
    budget = init_budget(self._costs(0))
    calls = decode_calls(
      engine, params | {'costs': self._costs(0)}, state.replace(budget=budget)
    )
    (_, self.program), _ = compile_all(calls)
    self.params = params
    filled = jax.tree.map(
      random_rows, (state.cache.latent, state.drafter_state)
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, engine.config.vocab_size, state.tokens.shape)
    self.tokens = tokens.astype(np.int32)
    self.state = jax.tree.map(
      jnp.copy,
      state.replace(
        cache=state.cache.replace(latent=filled[0]), drafter_state=filled[1]
      ),
    )

  def _costs(self, nodes: int) -> StepCosts:
    """Costs by which more nodes are always better, up to `nodes`."""
    config, widths = self.engine.config, self.engine.decode.widths
    rows = self.batch * (1 + widths[-1]) + 1
    falling = jnp.arange(rows, 0, -1, dtype=jnp.float32)
    return StepCosts(
      contexts=jnp.zeros((1,), jnp.float32),
      ms=jnp.tile(falling, (1, 2 + len(widths), 1)),
      ms_per_expert=jnp.float32(0),
      num_experts=jnp.float32(config.n_routed_experts),
      experts_per_token=jnp.float32(config.num_experts_per_tok),
      overlap=jnp.float32(1),
      adapt=jnp.float32(1),
      max_nodes=jnp.int32(nodes),
    )

  def point(self, context: int, nodes: int | None) -> CostPoint:
    """The median time of a step of this many nodes; None for AR's."""
    costs = self._costs(nodes or 0)
    # No row outgrows its cache, even if all drafts are accepted.
    room = self.engine.decode.capacity - context
    most = max(2, min(ROUNDS, room // (1 + self.engine.decode.draft_depth)))
    self._run(costs, context, nodes, 1)
    times = []
    for _ in range(RUNS):
      short, long = (self._run(costs, context, nodes, n) for n in (1, most))
      times.append((long - short) / (most - 1))
    ms = max(statistics.median(times) * 1e3, 1e-4)
    rows = self.batch * (1 + (nodes or 0))
    shown = active_experts(costs, jnp.float32(rows), self.state.budget.overlap)
    widths = (0, *self.engine.decode.widths)
    return CostPoint(
      batch=self.batch,
      context=context,
      width=None if nodes is None else min(w for w in widths if w >= nodes),
      nodes=nodes or 0,
      ms=ms,
      experts=float(shown) if self.engine.config.n_routed_experts else None,
    )

  def _run(
    self, costs: StepCosts, context: int, nodes: int | None, count: int
  ) -> float:
    """Seconds of one call."""
    full = np.full((self.batch,), context, np.int32)
    budget = init_budget(costs)
    if nodes is None:
      budget = budget.replace(asleep=jnp.int32(_ASLEEP))
    old = self.state
    state = old.replace(
      tokens=jnp.asarray(self.tokens),
      prompt_length=jnp.asarray(full),
      # No limit: the rounds are counted.
      max_length=jnp.full((self.batch,), 1 << 30, jnp.int32),
      done=jnp.zeros((self.batch,), jnp.bool_),
      stopped=jnp.zeros((self.batch,), jnp.bool_),
      cache=old.cache.replace(length=jnp.asarray(full)),
      stop_ids=jnp.full_like(old.stop_ids, -1),
      stats=empty_stats(self.batch, old.stats.num_nodes.shape[1]),
      budget=budget,
    )
    params = self.params | {'costs': costs}
    jax.block_until_ready(state)
    begin = time.perf_counter()
    self.state = self.program(params, state, np.int32(count))
    jax.block_until_ready(self.state)
    return time.perf_counter() - begin


def random_rows(x: jax.Array) -> jax.Array:
  """Normal values in the shape of a cache, made layer by layer."""
  if x.ndim < 3:
    return x

  def layer(key):
    return jax.random.normal(key, x.shape[1:], x.dtype)

  return jax.jit(lambda keys: jax.lax.map(layer, keys))(
    jax.random.split(key_for(Purpose.BENCHMARK), x.shape[0])
  )


def bytes_table(
  engine: Engine, params: Params, state: DecodeState
) -> CostTable:
  """Costs in proportion to the bytes that steps move; see `traffic`.

  Experts of neighbouring rows count as independent.
  """
  weights = traffic.weight_bytes(
    engine.config, params['target'], params['drafter']
  )
  batch, widths = len(state.done), engine.decode.widths
  latent = state.cache.latent
  drafter_bytes = sum(x.nbytes for x in jax.tree.leaves(state.drafter_state))
  points = []
  for context in (0, engine.decode.capacity):
    rows = context / latent.shape[2]
    for n in (None, *sorted({n for n in (*NODES, *widths) if n <= widths[-1]})):
      count = batch * (1 + (n or 0))
      active = _independent(engine, count)
      moved = traffic.step_bytes(
        weights,
        [active] * len(weights.expert),
        target_cache=round(latent.nbytes * rows),
        drafter_cache=round(drafter_bytes * rows),
        drafts=n is not None,
        own_head='lm_head' in params['drafter'],
      )
      ms = sum(moved.values()) / BYTES_PER_SECOND * 1e3
      width = None if n is None else min(w for w in (0, *widths) if w >= n)
      experts = active if weights.expert else None
      points.append(
        CostPoint(
          batch=batch,
          context=context,
          width=width,
          nodes=n or 0,
          ms=ms,
          experts=experts,
        )
      )
  key = {'target': engine.config.to_dict()}
  return CostTable('costs=bytes', key, tuple(points))


def _independent(engine: Engine, rows: int) -> float:
  """Mean active experts of rows that are routed independently."""
  experts = engine.config.n_routed_experts
  if not experts:
    return 0.0
  missed = 1 - engine.config.num_experts_per_tok / experts
  return experts * (1 - missed**rows)
