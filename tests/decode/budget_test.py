"""The number of nodes that a round verifies, chosen by cost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.decode import budget, calibration
from kdtree_jax.decode.budget import StepCosts, choose, init_budget
from kdtree_jax.tree import Acceptance, check_invariants, prefix
from kdtree_jax.tree.policies import best_first

WIDTHS = (3, 9)
DEPTH = 4


def trees(rng, batch, sharp=2.0, vocab=7):
  logits = rng.normal(0, sharp, (batch, DEPTH, vocab)).astype(np.float32)
  root = jnp.zeros((batch,), jnp.int32)
  return best_first(jnp.asarray(logits), root, WIDTHS[-1])


def costs_of(ms, **changes):
  """Costs `[programs, rows]` at one context; no correction by overlap."""
  fields = {
    'ms_per_expert': 0.0,
    'num_experts': 0.0,
    'experts_per_token': 0.0,
    'overlap': 1.0,
    'adapt': 0.0,
  }
  fields = {k: jnp.float32(v) for k, v in (fields | changes).items()}
  return StepCosts(
    contexts=jnp.zeros((1,), jnp.float32),
    ms=jnp.asarray(np.asarray(ms, np.float32)[None]),
    max_nodes=jnp.int32(WIDTHS[-1]),
    **fields,
  )


def concave(rng, batch):
  """Times that saturate as the experts of a mixture do, program by program."""
  rows = np.arange(batch * (1 + WIDTHS[-1]) + 1)
  slope, reach = rng.uniform(0.5, 8), rng.uniform(1, 10)
  curve = 1 + slope * (1 - np.exp(-rows / reach))
  steps = np.cumsum(rng.uniform(0, 1, 2 + len(WIDTHS)))
  return steps[:, None] + curve[None, :]


def brute_force(ms, tree, rate, left, done):
  """The best sets of first nodes of each row, by trying all of them."""
  p = np.where(tree.valid, np.exp(tree.scores), 0)
  depths, counts = np.asarray(tree.depths), np.asarray(tree.num_nodes) - 1
  live = int((~done).sum())
  most = [
    0 if d else min(c, le) for c, le, d in zip(counts, left, done, strict=True)
  ]
  best = (-np.inf, None)
  for nodes in itertools.product(*(range(m + 1) for m in most)):
    gain = sum(
      p[b, i]
      for b, n in enumerate(nodes)
      for i in range(1, n + 1)
      if depths[b, i] <= left[b]
    )
    widest = max(nodes)
    price = min(
      ms[program, live + sum(nodes)]
      for program, width in enumerate((0, *WIDTHS), 1)
      if width >= widest
    )
    worth = gain - rate * price
    if worth > best[0] + 1e-6:
      best = (worth, nodes)
  return best


@pytest.mark.parametrize('batch', (1, 2))
def test_the_choice_is_the_best_of_all(batch):
  rng = np.random.default_rng(batch)
  call = jax.jit(choose, static_argnums=2)
  chosen = set()
  for trial in range(60):
    tree = trees(rng, batch, sharp=rng.uniform(0.2, 4))
    ms = concave(rng, batch)
    if trial % 4 == 0:
      ms = rng.uniform(0.5, 9, ms.shape)
    done = rng.random(batch) < 0.2 if batch > 1 else np.zeros(1, bool)
    if done.all():
      continue
    left = rng.choice((0, 1, 2, 3, 30), batch)
    costs = costs_of(ms)
    state = init_budget(costs)
    past = rng.uniform(0, 50), rng.uniform(0, 50)
    state = state.replace(tokens=jnp.float32(past[0]), ms=jnp.float32(past[1]))
    length = rng.integers(1, 9, batch).astype(np.int32)
    found = call(
      costs,
      state,
      WIDTHS,
      tree,
      jnp.asarray(length),
      jnp.asarray((length + left + 1).astype(np.int32)),
      jnp.asarray(done),
    )
    live = int((~done).sum())
    ar = ms[0, live]
    rate = max((past[0] + live) / (past[1] + ar), live / ar)
    best, _ = brute_force(ms, tree, rate, left, done)
    nodes = np.asarray(found.nodes)
    gain = float(found.predicted.sum()) - live
    assert gain - rate * float(found.ms) == pytest.approx(best, abs=1e-3)
    program = int(found.program)
    assert float(found.ms) == pytest.approx(
      ms[program, live + nodes.sum()], rel=1e-5
    )
    widths = (0, *WIDTHS)
    assert nodes.max() <= widths[program - 1]
    assert (nodes <= np.maximum(left, 0)).all() and not nodes[done].any()
    chosen.add(program)
  assert chosen == {1, 2, 3}, 'the cases are too much alike'


def test_a_valley_does_not_stop_the_search():
  """Worth falls at first and rises again: an early stop would choose 0."""
  tree = trees(np.random.default_rng(0), 1, sharp=0.05)
  ms = np.full((4, 1 + 1 + WIDTHS[-1]), 1.0)
  ms[1:, 2:] = 1.3
  found = choose(
    costs_of(ms),
    init_budget(costs_of(ms)),
    WIDTHS,
    tree,
    jnp.array([5], jnp.int32),
    jnp.array([50], jnp.int32),
    jnp.array([False]),
  )
  assert int(found.nodes[0]) == WIDTHS[-1]


def test_prefixes_are_trees():
  tree = trees(np.random.default_rng(3), 3)
  for nodes in ((0, 0, 0), (1, 2, 3), (9, 0, 5)):
    width = max(nodes)
    cut = prefix(tree, jnp.array(nodes, jnp.int32), width)
    check_invariants(cut)
    assert cut.num_nodes.tolist() == [1 + n for n in nodes]
    assert cut.tokens.shape[1] == 1 + width


def test_a_neutral_calibration_changes_nothing():
  tree = trees(np.random.default_rng(4), 3, sharp=1.0)
  p = calibration.path_probabilities(calibration.neutral(), tree)
  wanted = np.where(tree.valid, np.exp(tree.scores), 0)
  assert np.allclose(p, wanted, rtol=2e-3, atol=1e-4)


def walk_of(rng, tree, accept):
  """Target tokens, and the walk along children that are right by chance."""
  tokens = np.full(tree.tokens.shape, 99, np.int32)
  path = np.zeros((1, DEPTH + 1), np.int32)
  parents, node, length = np.asarray(tree.parents[0]), 0, 1
  q = np.exp(np.asarray(tree.scores[0]))
  for i in range(int(tree.num_nodes[0])):
    children = np.flatnonzero(parents == i)
    odds = [accept(q[c] / q[i]) for c in children]
    if len(children):
      odds = np.append(odds, max(0.0, 1 - sum(odds)))
      pick = rng.choice(len(odds), p=np.array(odds) / sum(odds))
      if pick < len(children):
        tokens[0, i] = tree.tokens[0, children[pick]]
  while (
    found := np.flatnonzero(
      (parents == node) & (np.asarray(tree.tokens[0]) == tokens[0, node])
    )
  ).size:
    node = int(found[0])
    path[0, length:] = node
    length += 1
  return jnp.asarray(tokens), Acceptance(
    path=jnp.asarray(path),
    tokens=jnp.zeros_like(path),
    acceptance_length=jnp.array([length], jnp.int32),
    stopped=jnp.zeros((1,), jnp.bool_),
  )


def test_overconfidence_is_learnt():
  """Edges are right half as often as the drafter claims."""
  rng = np.random.default_rng(5)
  state = init_budget(costs_of(concave(rng, 1)))
  learn = jax.jit(budget.learnt)
  choice = budget.ar_choice(
    costs_of(concave(rng, 1)),
    state,
    jnp.ones((1,), jnp.int32),
    jnp.zeros(1, bool),
  ).replace(nodes=jnp.array([WIDTHS[-1]], jnp.int32))
  before, after = [], []
  for round_ in range(150):
    tree = trees(rng, 1, sharp=3.0)
    tokens, acceptance = walk_of(rng, tree, lambda q: 0.5 * q)
    if round_ >= 100:
      count = int(acceptance.acceptance_length[0]) - 1
      for map_, gaps in (
        (calibration.neutral(), before),
        (state.calibration, after),
      ):
        p = calibration.path_probabilities(map_, tree)[0, 1:]
        gaps.append(float(p.sum()) - count)
    state = learn(state, tree, choice, tokens, acceptance, jnp.zeros(1, bool))
  assert abs(np.mean(after)) < 0.35 * abs(np.mean(before))


def test_finished_rows_teach_nothing():
  rng = np.random.default_rng(6)
  costs = costs_of(concave(rng, 1))
  state = init_budget(costs)
  tree = trees(rng, 1)
  tokens, acceptance = walk_of(rng, tree, lambda q: q)
  choice = budget.ar_choice(
    costs, state, jnp.ones((1,), jnp.int32), jnp.zeros(1, bool)
  ).replace(nodes=jnp.array([WIDTHS[-1]], jnp.int32))
  same = budget.learnt(
    state, tree, choice, tokens, acceptance, jnp.ones(1, bool)
  )
  for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True):
    assert np.array_equal(a, b)


@pytest.mark.parametrize(('experts', 'each'), ((64, 6), (256, 8), (16, 4)))
def test_the_overlap_is_recovered(experts, each):
  costs = costs_of(
    np.ones((4, 20)), num_experts=experts, experts_per_token=each
  )
  for rows, overlap in itertools.product((2, 5, 17), (0.6, 0.82, 1.0)):
    active = budget.active_experts(
      costs, jnp.float32(rows), jnp.float32(overlap)
    )
    if float(active) > experts - 0.6:
      continue
    found = budget.observed_overlap(active, jnp.int32(rows), experts, each)
    assert float(found) == pytest.approx(overlap, abs=2e-3)


def test_shared_experts_make_rows_cheaper():
  ms = concave(np.random.default_rng(7), 1)
  costs = costs_of(ms, num_experts=64, experts_per_token=6, ms_per_expert=0.1)
  at = jnp.float32(0)
  usual = budget.step_ms(costs, jnp.float32(1.0), at)
  assert np.allclose(usual, ms, rtol=1e-6)
  shared = np.asarray(budget.step_ms(costs, jnp.float32(0.8), at))
  # One row has no neighbour.
  assert np.allclose(shared[:, 1], ms[:, 1], rtol=1e-6)
  assert (shared[:, 3:] < ms[:, 3:] - 0.05).all()


def test_costs_are_interpolated_in_context():
  ms = np.stack([np.full((4, 11), 1.0), np.full((4, 11), 3.0)])
  costs = costs_of(ms[0]).replace(
    contexts=jnp.array([100.0, 300.0]), ms=jnp.asarray(ms, jnp.float32)
  )
  for context, wanted in ((0, 1), (100, 1), (150, 1.5), (300, 3), (900, 3)):
    found = budget.step_ms(costs, costs.overlap, jnp.float32(context))
    assert np.allclose(found, wanted)


def rounds(costs, predicted, count):
  """States after rounds that are expected to commit so many tokens."""
  state = init_budget(costs)
  length, done = jnp.array([9], jnp.int32), jnp.zeros(1, bool)
  for _ in range(count):
    if int(state.asleep):
      choice = budget.ar_choice(costs, state, length, done)
      state = budget.after_ar_step(state, choice, jnp.array([1], jnp.int32))
    else:
      choice = budget.Choice(
        nodes=jnp.array([0], jnp.int32),
        program=jnp.int32(1),
        predicted=jnp.array([predicted], jnp.float32),
        ms=jnp.float32(1.2),
        ar_ms=jnp.float32(1.0),
      )
      state = budget.after_round(
        costs,
        state,
        choice,
        jnp.array([1], jnp.int32),
        state.overlap,
        done,
      )
    yield state


def test_pauses_grow_while_drafting_does_not_pay():
  costs = costs_of(np.ones((4, 11)))
  asleep = [int(s.asleep) for s in rounds(costs, 1.0, 1200)]
  pairs = list(zip(asleep, [0, *asleep[:-1]], strict=True))
  lengths = [a for a, b in pairs if a > b]
  assert asleep.index(16) == budget.PATIENCE - 1
  assert lengths[:6] == [16, 32, 64, 128, 256, 256]
  # One round between two pauses.
  starts = [i for i, (a, b) in enumerate(pairs) if a > b]
  gaps = np.diff(starts)
  assert gaps[:3].tolist() == [17, 33, 65]
  assert not any(int(s.asleep) for s in rounds(costs, 1.5, 40))
