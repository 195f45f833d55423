"""A sweep over budgets and contexts, as records."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from kdtree_jax.benchmark import compile_time, measure, traffic
from kdtree_jax.benchmark.subject import Subject
from kdtree_jax.decode import Engine
from kdtree_jax.decode.drivers import decode_loop
from kdtree_jax.decode.round import prefill
from pallas_kernels.bench import Ceilings


@dataclasses.dataclass(frozen=True)
class Step:
  """One row: a context and a budget, or None for AR."""

  context: int
  tree_budget: int | None

  def is_of(self, record: dict[str, Any]) -> bool:
    """Whether a record holds this row."""
    return (
      record['kind'] == 'step'
      and record['context'] == self.context
      and (record['method'] == 'ar') == (self.tree_budget is None)
      and record['tree_budget'] == (self.tree_budget or 0)
    )


class Sweep:
  """Compiles what the missing rows need, then measures them."""

  def __init__(
    self,
    subject: Subject,
    ceilings: Ceilings,
    progress: Callable[[str], None],
  ):
    self.subject = subject
    self.ceilings = ceilings
    self.progress = progress
    gpu = jax.default_backend() == 'gpu'
    self.bench = measure.Workbench(
      subject,
      measure.Effort() if gpu else measure.QUICK,
      ceilings.loop_seconds,
    )
    self.weights = traffic.weight_bytes(
      subject.target.config, subject.target.params, subject.drafter.params
    )

  def run(self, steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """Records of compilation, every step, prefill and memory."""
    engine_of = {
      budget: self.subject.engine(budget)
      for budget in dict.fromkeys(step.tree_budget for step in steps)
    }
    budgets = [budget for budget in engine_of if budget is not None]
    largest = self.subject.engine(max(budgets, default=0))
    # The first round of the sweep that has a tree is compiled alone.
    first = min((b for b in budgets if b), default=None)
    alone = engine_of.get(first, largest)
    self.progress('compiling one program alone')
    seconds = compile_time.compile_seconds(
      alone, self.subject.params(alone), self.bench.state(alone, 1, 1)
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
      self.bench, list(engine_of.values()), largest, self.progress
    )
    for engine, reason in failed.items():
      yield {
        'kind': 'failure',
        'tree_budget': engine.decode.tree_budget,
        'reason': reason,
      }
    steps = [s for s in steps if engine_of[s.tree_budget] not in failed]
    yield from self._steps(steps, engine_of, largest)
    yield self._memory([e for e in engine_of.values() if e not in failed])

  def _steps(
    self,
    steps: Sequence[Step],
    engine_of: dict[int | None, Engine],
    largest: Engine,
  ) -> Iterator[dict[str, Any]]:
    routed, trees = {}, {}
    for step in steps:
      engine, context = engine_of[step.tree_budget], step.context
      if context not in routed:
        routed[context] = self.bench.routed(largest, context)
        yield self._prefill(largest, context)
      timing = self.bench.rounds(engine, context)
      stages = {}
      if engine.drafter is not None:
        draft, drafted = self.bench.draft_seconds(engine, context)
        if engine not in trees:
          trees[engine] = self.bench.tree_seconds(engine, drafted)
        stages = {'draft': draft} | trees[engine]
      rows = 1 + engine.decode.tree_budget
      touched, mean = measure.experts_touched(routed[context], rows)
      measured = timing.as_dict() | {
        'tokens_per_round': timing.tokens,
        'stages_us': {name: s * 1e6 for name, s in stages.items()},
        'unique_experts': mean,
        'unique_experts_by_layer': touched,
        'temporary_bytes': measure.temporary_bytes(
          self.bench, decode_loop, engine
        ),
      }
      yield self._record(step, engine, measured)

  def _record(
    self, step: Step, engine: Engine, measured: dict[str, Any]
  ) -> dict[str, Any]:
    """A row with what follows from its measured half."""
    drafts = engine.drafter is not None
    config, context = self.subject.target.config, step.context
    target_cache, drafter_cache = self.bench.cache_bytes(context)
    moved = traffic.step_bytes(
      self.weights,
      measured['unique_experts_by_layer'],
      target_cache=target_cache,
      drafter_cache=drafter_cache,
      drafts=drafts,
      own_head='lm_head' in self.subject.drafter.params,
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
      others = sum(measured['stages_us'].values())
      computed['verify_us'] = measured['ms'] * 1e3 - others
      small = others - measured['stages_us']['draft']
      computed['tree_accept_commit_fraction'] = small / measured['ms'] / 1e3
    return {
      'kind': 'step',
      'method': 'ddtree' if drafts else 'ar',
      'context': context,
      'tree_budget': step.tree_budget or 0,
      'block_size': self.subject.drafter.block_size if drafts else 1,
      'capacity': self.subject.capacity,
      'measured': measured,
      'computed': computed,
    }

  def _prefill(self, engine: Engine, context: int) -> dict[str, Any]:
    timing, count = self.bench.prefill(engine, context)
    return {
      'kind': 'prefill',
      'context': context,
      'tokens': count,
      'prefill_chunk': self.subject.prefill_chunk,
      'measured': timing.as_dict()
      | {
        'temporary_bytes': measure.temporary_bytes(
          self.bench, prefill, engine.for_prefill()
        )
      },
    }

  def _memory(self, engines) -> dict[str, Any]:
    temporaries = [
      measure.temporary_bytes(self.bench, decode_loop, e) for e in engines
    ]
    return {
      'kind': 'memory',
      'measured': {
        'weight_bytes': self.subject.nbytes,
        'state_bytes': self.bench.state_bytes,
        'peak_beyond_bytes': measure.peak_beyond(self.bench),
        'temporary_bytes': max((b or 0 for b in temporaries), default=0),
      },
    }
