"""The number of draft nodes that a round verifies, chosen by what they cost.

A round of n nodes is expected to commit `1 + sum of p` tokens over the first n
nodes and takes T(n) milliseconds. The choice maximises `sum of p - rate * T(n)`
over all n, 0 included, where `rate` is the tokens per millisecond that the
request has had so far: the price of time. There is no early stop, because on a
mixture of experts T is concave: `sum of p - rate * T(n)` may fall and rise
again. The nodes of all rows of a batch compete in one order, since the rows
share experts and time.

Everything here is a function of committed text and of a table of costs, never
of a clock, so that a run repeats.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from kdtree_jax.decode.calibration import (
  Calibration,
  learn,
  neutral,
  path_probabilities,
)
from kdtree_jax.tree import Acceptance, DraftTree

# Successive rounds that lose against AR before drafting pauses, and the AR
# steps of the first and of the longest pause.
PATIENCE = 8
FIRST_PAUSE = 16
LONGEST_PAUSE = 256
# The programs of a table of costs before the widths: an AR step without a
# draft, and a round that drafts and then verifies the root alone.
AR, ROOT_ONLY = 0, 1


class StepCosts(flax.struct.PyTreeNode):
  """What a step of a batch costs, as operands of a program.

  Attributes:
    contexts: lengths at which the costs hold, ascending.
    ms: milliseconds of a step at a context, of a program (`AR`, `ROOT_ONLY`,
      then each width), by the number of live rows.
    ms_per_expert: milliseconds for each active expert a layer more.
    num_experts: E of the model that was measured; 0 for a dense one.
    experts_per_token: K of that model.
    overlap: the exponent g of its active experts, `E (1 - (1 - K/E)^(n^g))` for
      n rows: 1 if the experts of neighbours are independent.
    adapt: weight of a round's own exponent in the running one; 0 keeps
      `overlap`.
    max_nodes: most nodes of a row.
  """

  contexts: Float32[Array, ' contexts']
  ms: Float32[Array, 'contexts programs rows']
  ms_per_expert: Float32[Array, '']
  num_experts: Float32[Array, '']
  experts_per_token: Float32[Array, '']
  overlap: Float32[Array, '']
  adapt: Float32[Array, '']
  max_nodes: Int32[Array, '']


class BudgetState(flax.struct.PyTreeNode):
  """What the choice remembers of a batch's rounds.

  Attributes:
    tokens: tokens committed so far.
    ms: their price.
    overlap: the running exponent g of active experts.
    losing: successive rounds that were expected to lose against AR.
    asleep: AR steps until the next draft.
    next_pause: AR steps of the next pause.
    calibration: the correction of the drafter's probabilities.
  """

  tokens: Float32[Array, '']
  ms: Float32[Array, '']
  overlap: Float32[Array, '']
  losing: Int32[Array, '']
  asleep: Int32[Array, '']
  next_pause: Int32[Array, '']
  calibration: Calibration


class Choice(flax.struct.PyTreeNode):
  """What one round verifies.

  Attributes:
    nodes: draft nodes of each row, the root not counted.
    program: index of the round's program in `StepCosts.ms`.
    predicted: tokens that each row is expected to commit, the root included.
    ms: the round's price.
    ar_ms: the price of an AR step in its place.
  """

  nodes: Int32[Array, ' B']
  program: Int32[Array, '']
  predicted: Float32[Array, ' B']
  ms: Float32[Array, '']
  ar_ms: Float32[Array, '']


def init_budget(
  costs: StepCosts, calibration: Calibration | None = None
) -> BudgetState:
  """The state before the first round."""
  budget = BudgetState(
    tokens=jnp.float32(0),
    ms=jnp.float32(0),
    overlap=costs.overlap,
    losing=jnp.int32(0),
    asleep=jnp.int32(0),
    next_pause=jnp.int32(FIRST_PAUSE),
    calibration=neutral() if calibration is None else calibration,
  )
  # Programs consume their state, so each field has an array of its own.
  return jax.tree.map(jnp.array, budget)


def choose(
  costs: StepCosts,
  budget: BudgetState,
  widths: tuple[int, ...],
  tree: DraftTree,
  length: Int32[Array, ' B'],
  max_length: Int32[Array, ' B'],
  done: Bool[Array, ' B'],
) -> Choice:
  """The nodes of the next round.

  Args:
    costs: the price of every number of rows.
    budget: the batch's past.
    widths: the programs' nodes a row, ascending.
    tree: the largest tree; its prefixes are the smaller ones.
    length: committed tokens.
    max_length: the length at which a row is complete: no row takes more nodes
      than could be committed before it.
    done: rows that take no part.
  """
  slot = jnp.arange(1, tree.tokens.shape[1], dtype=jnp.int32)[None, :]
  left = (max_length - length - 1)[:, None]
  allowed = tree.valid[:, 1:] & (slot <= jnp.minimum(left, costs.max_nodes))
  allowed &= ~done[:, None]
  probability = path_probabilities(budget.calibration, tree)[:, 1:]
  gain = jnp.where(allowed & (tree.depths[:, 1:] <= left), probability, 0.0)
  live = (~done).sum(dtype=jnp.int32)
  ms = step_ms(costs, budget.overlap, _context(length, done))
  rate = _rate(budget, ms[AR, live], live)
  counts = jnp.arange(gain.size + 1, dtype=jnp.int32)
  worth, places = [], []
  for program, width in enumerate((0, *widths), ROOT_ONLY):
    fits = allowed & (slot <= width)
    order = _order(probability, fits)
    gains = jnp.take(jnp.where(fits, gain, 0.0), order)
    expected = jnp.append(jnp.float32(0), jnp.cumsum(gains))
    value = expected - rate * ms[program, live + counts]
    worth.append(jnp.where(counts <= fits.sum(), value, -jnp.inf))
    place = jnp.zeros_like(order).at[order].set(counts[1:])
    places.append(jnp.where(fits, place.reshape(fits.shape), gain.size + 1))
  best = jnp.argmax(jnp.stack(worth))
  which, count = best // len(counts), (best % len(counts)).astype(jnp.int32)
  taken = jnp.stack(places)[which] <= count
  program = (ROOT_ONLY + which).astype(jnp.int32)
  predicted = 1 + jnp.where(taken, gain, 0.0).sum(axis=1)
  return Choice(
    nodes=taken.sum(axis=1, dtype=jnp.int32),
    program=program,
    predicted=jnp.where(done, 0.0, predicted),
    ms=ms[program, live + count],
    ar_ms=ms[AR, live],
  )


def _order(
  probability: Float32[Array, 'B nodes'], allowed: Bool[Array, 'B nodes']
) -> Int32[Array, ' candidates']:
  """All rows' nodes by falling probability, each row's in its own order."""
  # A policy's order may differ from that of the corrected probabilities; a
  # node never comes before an earlier one of its row.
  key = lax.cummin(jnp.where(allowed, probability, -1.0), axis=1)
  if len(key) == 1:
    return jnp.arange(key.size, dtype=jnp.int32)
  return jnp.argsort(-key.reshape(-1), stable=True).astype(jnp.int32)


def _context(
  length: Int32[Array, ' B'], done: Bool[Array, ' B']
) -> Float32[Array, '']:
  """The mean length of the rows that take part."""
  total = jnp.where(done, 0, length).sum().astype(jnp.float32)
  return total / jnp.maximum((~done).sum(), 1).astype(jnp.float32)


def _rate(
  budget: BudgetState, ar_ms: Float32[Array, ''], live: Int32[Array, '']
) -> Float32[Array, '']:
  """Tokens per millisecond so far, started from AR, and never below it."""
  tokens = live.astype(jnp.float32)
  so_far = (budget.tokens + tokens) / (budget.ms + ar_ms)
  return jnp.maximum(so_far, tokens / ar_ms)


def active_experts(
  costs: StepCosts,
  rows: Float32[Array, '*batch'],
  overlap: Float32[Array, ''],
) -> Float32[Array, '*batch']:
  """Experts of a layer that some rows activate; see `StepCosts.overlap`."""
  experts = jnp.maximum(costs.num_experts, 1.0)
  # An expert that every token takes would make the logarithm infinite.
  missed = jnp.log1p(-jnp.minimum(costs.experts_per_token / experts, 0.999999))
  return -costs.num_experts * jnp.expm1(missed * rows**overlap)


def step_ms(
  costs: StepCosts, overlap: Float32[Array, ''], context: Float32[Array, '']
) -> Float32[Array, 'programs rows']:
  """Milliseconds of every program by live rows, at a context and an overlap."""
  last = costs.contexts.shape[0] - 1
  right = jnp.clip(jnp.searchsorted(costs.contexts, context), min(1, last))
  right = jnp.minimum(right, last)
  at = jnp.maximum(right - 1, 0)
  span = costs.contexts[right] - costs.contexts[at]
  share = jnp.clip((context - costs.contexts[at]) / jnp.maximum(span, 1), 0, 1)
  ms = costs.ms[at] * (1 - share) + costs.ms[right] * share
  rows = jnp.arange(costs.ms.shape[2], dtype=jnp.float32)
  saved = active_experts(costs, rows, costs.overlap)
  saved -= active_experts(costs, rows, overlap)
  # However much the experts overlap, no step is free.
  return jnp.maximum(ms - costs.ms_per_expert * saved[None, :], 0.1 * ms)


def observed_overlap(
  experts: Float32[Array, ''],
  rows: Int32[Array, ''],
  num_experts: int,
  experts_per_token: int,
) -> Float32[Array, '']:
  """The exponent g that `experts` active experts of `rows` rows show.

  Exact for the mean of a layer's active experts; clipped to 0.5..1.
  """
  share = jnp.clip(experts / num_experts, 1e-6, 1 - 0.5 / num_experts)
  missed = jnp.log1p(-min(experts_per_token / num_experts, 0.999999))
  count = jnp.log1p(-share) / missed
  exponent = jnp.log(count)
  exponent /= jnp.log(jnp.maximum(rows, 2).astype(jnp.float32))
  return jnp.clip(exponent, 0.5, 1.0)


def after_round(
  costs: StepCosts,
  budget: BudgetState,
  choice: Choice,
  committed: Int32[Array, ' B'],
  overlap: Float32[Array, ''],
  done: Bool[Array, ' B'],
) -> BudgetState:
  """The state after a round that drafted.

  Args:
    costs: what steps cost.
    budget: the state before the round.
    choice: what the round verified.
    committed: tokens that each row committed.
    overlap: the exponent that the round's active experts show, or the running
      one, if it shows none.
    done: rows that took no part.
  """
  live = (~done).sum(dtype=jnp.int32)
  of_ar = live.astype(jnp.float32) / choice.ar_ms
  loses = choice.predicted.sum() < of_ar * choice.ms
  losing = jnp.where(loses, budget.losing + 1, 0)
  pauses = losing >= PATIENCE
  pause = budget.next_pause
  longer = jnp.minimum(2 * pause, LONGEST_PAUSE)
  return budget.replace(
    tokens=budget.tokens + committed.sum().astype(jnp.float32),
    ms=budget.ms + choice.ms,
    overlap=budget.overlap + costs.adapt * (overlap - budget.overlap),
    # After a pause, a single round that loses begins the next one.
    losing=jnp.where(pauses, PATIENCE - 1, losing),
    asleep=jnp.where(pauses, pause, 0),
    next_pause=jnp.where(pauses, longer, jnp.where(loses, pause, FIRST_PAUSE)),
  )


def ar_choice(
  costs: StepCosts,
  budget: BudgetState,
  length: Int32[Array, ' B'],
  done: Bool[Array, ' B'],
) -> Choice:
  """The choice of a step that does not draft."""
  live = (~done).sum(dtype=jnp.int32)
  ms = step_ms(costs, budget.overlap, _context(length, done))[AR, live]
  return Choice(
    nodes=jnp.zeros_like(length),
    program=jnp.int32(AR),
    predicted=jnp.where(done, 0.0, 1.0),
    ms=ms,
    ar_ms=ms,
  )


def after_ar_step(
  budget: BudgetState, choice: Choice, committed: Int32[Array, ' B']
) -> BudgetState:
  """The state after a step that did not draft."""
  return budget.replace(
    tokens=budget.tokens + committed.sum().astype(jnp.float32),
    ms=budget.ms + choice.ms,
    asleep=jnp.maximum(budget.asleep - 1, 0),
  )


def learnt(
  budget: BudgetState,
  tree: DraftTree,
  choice: Choice,
  target_tokens: Int32[Array, 'B N'],
  acceptance: Acceptance,
  done: Bool[Array, ' B'],
) -> BudgetState:
  """The state with the correction that a round's labels teach."""
  slots = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)
  steps = jnp.arange(acceptance.path.shape[1], dtype=jnp.int32)
  walked = steps[None, :] < acceptance.acceptance_length[:, None]
  reached = (acceptance.path[:, :, None] == slots[None, None, :]) & walked[
    :, :, None
  ]
  calibration = learn(
    budget.calibration,
    tree,
    jnp.where(done, 0, 1 + choice.nodes),
    target_tokens,
    reached.any(axis=1),
  )
  return budget.replace(calibration=calibration)
