"""A sweep over tree budgets and contexts, as records of a results file."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from kdtree_jax.benchmark import Record, compile_time, measure, traffic
from kdtree_jax.benchmark.model_pair import ModelPair
from kdtree_jax.decode import Engine
from kdtree_jax.decode.drivers import ALL, decode_rounds
from kdtree_jax.decode.prefill import prefill
from pallas_kernels.bench import Ceilings


@dataclasses.dataclass(frozen=True)
class SweepPoint:
  """A context and a tree budget, or None for AR."""

  context: int
  tree_budget: int | None

  def is_of(self, record: Record) -> bool:
    """Whether a record is of this point."""
    return (
      record['kind'] == 'step'
      and record['context'] == self.context
      and (record['method'] == 'ar') == (self.tree_budget is None)
      and record['tree_budget'] == (self.tree_budget or 0)
    )


class Sweep:
  """Compiles the programs of all missing points, then measures those."""

  def __init__(
    self,
    pair: ModelPair,
    ceilings: Ceilings,
    progress: Callable[[str], None],
  ):
    self.pair = pair
    self.ceilings = ceilings
    self.progress = progress
    gpu = jax.default_backend() == 'gpu'
    self.timer = measure.StepTimer(
      pair,
      measure.Repetitions() if gpu else measure.QUICK,
      ceilings.loop_seconds,
    )
    self.weights = traffic.weight_bytes(
      pair.target.config, pair.target.params, pair.drafter.params
    )

  def run(self, points: Sequence[SweepPoint]) -> Iterator[Record]:
    """Records of compilation, every point, prefill and memory."""
    engine_of = {
      budget: self.pair.engine(budget)
      for budget in dict.fromkeys(point.tree_budget for point in points)
    }
    budgets = [budget for budget in engine_of if budget is not None]
    largest = self.pair.engine(max(budgets, default=0))
    # The first round with a tree is compiled alone, to time it.
    first = min((b for b in budgets if b), default=None)
    alone = engine_of.get(first, largest)
    self.progress('compiling one program alone')
    seconds = compile_time.compile_seconds(
      alone, self.pair.params(alone), self.timer.state(alone, 1, 1)
    )
    yield {
      'kind': 'compile',
      'tree_budget': alone.decode.tree_budget,
      'measured': {
        'cold_seconds': seconds['cold'],
        'warm_seconds': seconds['warm'],
      },
    }
    self.progress('compiling the others')
    failed = measure.compile_sweep(
      self.timer, list(engine_of.values()), largest, self.progress
    )
    for engine, reason in failed.items():
      yield {
        'kind': 'failure',
        'tree_budget': engine.decode.tree_budget,
        'reason': reason,
      }
    points = [p for p in points if engine_of[p.tree_budget] not in failed]
    yield from self._points(points, engine_of, largest)
    yield self._memory([e for e in engine_of.values() if e not in failed])

  def _points(
    self,
    points: Sequence[SweepPoint],
    engine_of: dict[int | None, Engine],
    largest: Engine,
  ) -> Iterator[Record]:
    """Records of the points, and of prefill at each new context."""
    routed, trees = {}, {}
    for point in points:
      engine, context = engine_of[point.tree_budget], point.context
      if context not in routed:
        routed[context] = self.timer.routed(largest, context)
        yield self._prefill(largest, context)
      timing = self.timer.rounds(engine, context)
      stages = {}
      if engine.drafter is not None:
        draft, drafted = self.timer.draft_seconds(engine, context)
        if engine not in trees:
          trees[engine] = self.timer.tree_seconds(engine, drafted)
        stages = {'draft': draft} | trees[engine]
      rows = 1 + engine.decode.tree_budget
      active, mean = measure.mean_active_experts(routed[context], rows)
      measured = timing.as_dict() | {
        'tokens_per_round': timing.tokens,
        'stages_us': {name: s * 1e6 for name, s in stages.items()},
        'unique_experts': mean,
        'unique_experts_by_layer': active,
        'temporary_bytes': measure.temporary_bytes(
          self.timer, decode_rounds, engine, ALL
        ),
      }
      yield self._record(point, engine, measured)

  def _record(
    self, point: SweepPoint, engine: Engine, measured: Record
  ) -> Record:
    """The record of a point, with figures computed from the measured ones."""
    drafts = engine.drafter is not None
    config, context = self.pair.target.config, point.context
    target_cache, drafter_cache = self.timer.cache_bytes(context)
    moved = traffic.step_bytes(
      self.weights,
      measured['unique_experts_by_layer'],
      target_cache=target_cache,
      drafter_cache=drafter_cache,
      drafts=drafts,
      own_head='lm_head' in self.pair.drafter.params,
    )
    limit = sum(moved.values()) / self.ceilings.copy_bytes_per_second
    flops = traffic.attention_flops(
      config, 1 + engine.decode.tree_budget, context
    )
    product = self.ceilings.product_flops_per_second
    computed = {
      'bytes': moved,
      'limit_ms': limit * 1e3,
      'fraction_of_limit': limit * 1e3 / measured['ms'],
      'attention_arithmetic_ms': flops / product * 1e3,
    }
    if drafts:
      stages = sum(measured['stages_us'].values())
      computed['verify_us'] = measured['ms'] * 1e3 - stages
      small = stages - measured['stages_us']['draft']
      computed['tree_accept_commit_fraction'] = small / measured['ms'] / 1e3
    return {
      'kind': 'step',
      'method': 'ddtree' if drafts else 'ar',
      'context': context,
      'tree_budget': point.tree_budget or 0,
      'block_size': self.pair.block_size if drafts else 1,
      'capacity': self.pair.capacity,
      'measured': measured,
      'computed': computed,
    }

  def _prefill(self, engine: Engine, context: int) -> Record:
    timing, count = self.timer.prefill(engine, context)
    return {
      'kind': 'prefill',
      'context': context,
      'tokens': count,
      'prefill_chunk': self.pair.prefill_chunk,
      'measured': timing.as_dict()
      | {
        'temporary_bytes': measure.temporary_bytes(
          self.timer, prefill, engine.for_prefill()
        )
      },
    }

  def _memory(self, engines: Sequence[Engine]) -> Record:
    temporaries = [
      measure.temporary_bytes(self.timer, decode_rounds, e, ALL)
      for e in engines
    ]
    return {
      'kind': 'memory',
      'measured': {
        'weight_bytes': self.pair.nbytes,
        'state_bytes': self.timer.state_bytes,
        'peak_beyond_bytes': measure.peak_beyond(self.timer),
        'temporary_bytes': max((b or 0 for b in temporaries), default=0),
      },
    }
