"""tree_build against plain Python: enumeration of all prefixes, and a heap.

Scores are integers, so every comparison is strict equality.
"""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import _bits
from pallas_kernels.tree_build import api, cases, reference

BUDGETS = (0, 1, 2, 7, 31, 32, 33, 64)
STYLES = cases.STYLES

build = jax.jit(api.tree_build, static_argnames=('budget', 'implementation'))
build_from_ranks = jax.jit(
  reference.tree_from_ranks, static_argnames=('budget',)
)
rank_marginals = jax.jit(reference.rank_marginals, static_argnums=1)


@pytest.fixture(autouse=True, scope='module')
def strict():
  with (
    jax.numpy_dtype_promotion('strict'),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


def make_logits(style, shape, seed=0):
  return cases.make_logits(style, shape, np.random.default_rng(seed))


def ranked_tokens(logits):
  """Per depth the allowed token ids by (logit descending, id ascending)."""
  return [
    sorted(
      (v for v in range(len(row)) if row[v] > -np.inf), key=lambda v: -row[v]
    )
    for row in logits  # NaN is not > -inf; sorted is stable
  ]


def fixed_log_q(logits):
  """`{(depth, rank): (int log q, token)}` of one row, lse from the op.

  The sum under the logarithm may round either way by a unit, so lse is taken
  from `rank_marginals` (checked by itself below); z is recomputed.
  """
  got, _ = rank_marginals(logits[None], logits.shape[1])
  table = []
  for row, order, got_row in zip(
    logits, ranked_tokens(logits), np.asarray(got)[0], strict=True
  ):
    lse = -int(got_row[0])  # z is 0 at rank 0
    top = row[order[0]] if order else np.float32(0)
    z = [
      max(round(float((row[v] - top) * np.float32(2**20))), -50 * 2**20)
      for v in order
    ]
    table.append([(int(q) - lse, v) for q, v in zip(z, order, strict=True)])
  return table


def all_prefixes(table, max_rank):
  """Every prefix as (-score, path of ranks), sorted: the definition."""
  found = []
  for depth in range(1, len(table) + 1):
    choices = [range(min(len(row), max_rank)) for row in table[:depth]]
    for path in itertools.product(*choices):
      score = sum(table[d][r][0] for d, r in enumerate(path))
      found.append((-score, path))
  return sorted(found)


def heap_prefixes(table, budget, max_rank):
  """The same order popped from a heap, as the published code does it."""
  found, heap = [], []

  def push(path, score):
    d, r = len(path) - 1, path[-1]
    if d < len(table) and r < min(len(table[d]), max_rank):
      heapq.heappush(heap, (-(score + table[d][r][0]), path, score))

  push((0,), 0)
  while heap and len(found) < budget:
    cost, path, parent_score = heapq.heappop(heap)
    found.append((cost, path))
    push((*path[:-1], path[-1] + 1), parent_score)
    push((*path, 0), -cost)
  return found


def expected_tree(prefixes, table, root, budget):
  """The TreeArrays of one row from its sorted prefixes."""
  n = 1 + budget
  tokens, parents = np.zeros(n, np.int32), np.full(n, -1, np.int32)
  depths, scores = np.zeros(n, np.int32), np.full(n, -np.inf, np.float32)
  ancestors = np.zeros((n, n), bool)
  tokens[0], scores[0], ancestors[0, 0] = root, 0, True
  index = {(): 0}
  for i, (cost, path) in enumerate(prefixes[:budget], 1):
    index[path] = i
    tokens[i] = table[len(path) - 1][path[-1]][1]
    parents[i], depths[i] = index[path[:-1]], len(path)
    scores[i] = np.float32(-cost) / np.float32(2**20)
    ancestors[i] = ancestors[parents[i]]
    ancestors[i, i] = True
  words = np.zeros((n, -(-n // 32)), np.uint32)
  for i, j in zip(*np.nonzero(ancestors), strict=True):
    words[i, j // 32] |= np.uint32(1 << (j % 32))
  return api.TreeArrays(
    tokens, parents, depths, scores, np.int32(len(index)), words
  )


def check(tree, logits, root, budget, prefixes=None):
  for b in range(logits.shape[0]):
    table = fixed_log_q(logits[b])
    found = (prefixes or all_prefixes)(table, min(budget, logits.shape[2]))
    want = expected_tree(found, table, root[b], budget)
    for name, have in tree._asdict().items():
      np.testing.assert_array_equal(
        np.asarray(have)[b], getattr(want, name), err_msg=f'{name} of row {b}'
      )


def roots(batch):
  return np.arange(11, 11 + batch, dtype=np.int32)


@pytest.mark.parametrize('budget', BUDGETS)
def test_equals_enumeration_of_all_prefixes(budget):
  @settings(derandomize=True, database=None, deadline=None, max_examples=5)
  @given(seed=st.integers(0, 2**31))
  def run(seed):
    for style in STYLES:
      logits = make_logits(style, (2, 3, 5), seed)
      tree = build(logits, roots(2), budget=budget)
      check(tree, logits, roots(2), budget)
      check_invariants(tree)

  run()


def check_invariants(tree):
  tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
  for b, n in enumerate(np.asarray(tree.num_nodes)):
    assert (parents[b, 1:n] >= 0).all() and (parents[b, n:] == -1).all()
    assert (parents[b, 1:n] < np.arange(1, n)).all()
    pairs = zip(parents[b, 1:n], tokens[b, 1:n], strict=True)
    assert len(set(pairs)) == n - 1


@pytest.mark.parametrize('style', STYLES)
def test_enumeration_and_heap_agree(style):
  table = fixed_log_q(make_logits(style, (1, 4, 4), 3)[0])
  assert heap_prefixes(table, 50, 4) == all_prefixes(table, 4)[:50]


@pytest.mark.parametrize(
  'case', cases.small_cases(), ids=lambda case: case.name
)
def test_case(case):
  logits, root = map(np.asarray, case.make_inputs(jax.random.key(0)))
  budget = case.reference.keywords['budget']
  tree = build(logits, root, budget=budget)
  check(tree, logits, root, budget)


def test_budget_one_thousand_equals_heap():
  logits = make_logits('normal', (1, 7, 2000), 8)
  tree = build(logits, roots(1), budget=1024)
  heap = functools.partial(heap_prefixes, budget=1024)
  check(tree, logits, roots(1), 1024, lambda t, k: heap(t, max_rank=k))
  assert int(tree.num_nodes[0]) == 1025


def test_ties_at_the_edge_of_a_depth_go_by_path():
  """A prefix that 17 of its depth reach, in a tree of 15, by its path.

  [0, 1, 0] ties with [1, 0, 1..7]. Its parent scores lower than theirs, but
  its path is smaller, so it is the tree's last node, and the depth that keeps
  15 prefixes must order its ties by path as well.
  """
  never = reference.DEAD
  log_q = np.full((1, 3, 8), never, np.int32)
  log_q[0, 0, :2] = 0, -1
  log_q[0, 1, :2] = 0, -2
  log_q[0, 2] = [0] + [-1] * 7
  ids = np.tile(np.arange(8, dtype=np.int32), (1, 3, 1))
  tree = build_from_ranks(log_q, ids, roots(1), budget=15)
  table = [
    [(int(q), r) for r, q in enumerate(d) if q > never] for d in log_q[0]
  ]
  want = expected_tree(all_prefixes(table, 8), table, 11, 15)
  for have, row in zip(tree, want, strict=True):
    np.testing.assert_array_equal(np.asarray(have)[0], row)
  assert tree.depths[0, 15] == 3 and tree.depths[0, tree.parents[0, 15]] == 2


def test_candidates_are_few():
  parents, ranks = reference._candidates(1024, 1024)
  assert len(parents) == 7262
  assert ((parents + 1) * (ranks + 1) <= 1024).all()


def test_deepest_tree_and_lowest_scores_do_not_overflow():
  logits = np.full((2, 31, 40), 0.0, np.float32)
  logits[1] = -1e30  # all but one token at the floor of 50 nats
  logits[1, :, 3] = 0
  tree = build(logits, roots(2), budget=33)
  heap = functools.partial(heap_prefixes, budget=33)
  check(tree, logits, roots(2), 33, lambda t, k: heap(t, max_rank=k))
  # The lowest score that the limits on D and V allow, on the integers.
  low = -round((50 + np.log(reference.MAX_VOCAB)) * reference.SCALE)
  lowest = jnp.full((1, 31, 1), low, jnp.int32)
  chain = build_from_ranks(
    lowest, jnp.zeros_like(lowest), jnp.zeros(1, jnp.int32), budget=40
  )
  assert int(chain.num_nodes[0]) == 32
  np.testing.assert_array_equal(
    chain.scores[0, 1:32],
    np.float32(low * np.arange(1, 32, dtype=np.int64)) / np.float32(2**20),
  )


@pytest.mark.parametrize('style', ['normal', 'grid', 'holes'])
def test_budget_is_a_prefix_of_the_next(style):
  logits = make_logits(style, (2, 3, 5), 21)
  trees = [build(logits, roots(2), budget=b) for b in (31, 32, 33)]
  for small, large in itertools.pairwise(trees):
    n = small.tokens.shape[1]
    for name in ('tokens', 'parents', 'depths', 'scores'):
      np.testing.assert_array_equal(
        getattr(small, name), getattr(large, name)[:, :n]
      )


def test_rows_do_not_depend_on_their_neighbours():
  logits = np.concatenate(
    [make_logits(s, (1, 3, 300), 2) for s in ('normal', 'holes', 'equal')]
  )
  logits[2, 1:] = np.nan
  together = build(logits, roots(3), budget=33)
  for b in range(3):
    alone = build(logits[b : b + 1], roots(3)[b : b + 1], budget=33)
    for have, want in zip(together, alone, strict=True):
      np.testing.assert_array_equal(np.asarray(have)[b], np.asarray(want)[0])


def test_jit_equals_eager_and_itself():
  logits = make_logits('grid', (2, 3, 5), 13)
  first, second = (build(logits, roots(2), budget=7) for _ in range(2))
  with jax.disable_jit():
    eager = api.tree_build(logits, roots(2), budget=7)
  for have, again, plain in zip(first, second, eager, strict=True):
    np.testing.assert_array_equal(have, again)
    np.testing.assert_array_equal(have, plain)


def test_log_q_is_the_log_softmax_of_the_best_tokens():
  logits = make_logits('normal', (2, 3, 300), 4) * 3
  log_q, ids = rank_marginals(logits, 17)
  exact = logits.astype(np.float64)
  exact -= exact.max(axis=2, keepdims=True)
  exact -= np.log(np.exp(exact).sum(axis=2, keepdims=True))
  order = np.argsort(-exact, axis=2, kind='stable')[:, :, :17]
  np.testing.assert_array_equal(ids, order)
  want = np.take_along_axis(exact, order, axis=2)
  # lse of up to 8 nats has half an ulp of 2^-22; rounding adds half a unit.
  np.testing.assert_allclose(log_q, want * 2**20, rtol=0, atol=3)
  assert (np.diff(np.asarray(log_q), axis=2) <= 0).all()


def test_bfloat16_equals_its_float32_values():
  logits = jnp.asarray(make_logits('normal', (2, 3, 5), 4), jnp.bfloat16)
  for have, want in zip(
    build(logits, roots(2), budget=31),
    build(logits.astype(jnp.float32), roots(2), budget=31),
    strict=True,
  ):
    np.testing.assert_array_equal(have, want)


def test_depth_without_tokens_ends_the_tree():
  logits = make_logits('normal', (2, 3, 5), 4)
  logits[0, 0] = -np.inf
  logits[1, 1] = np.nan
  tree = build(logits, roots(2), budget=31)
  np.testing.assert_array_equal(tree.num_nodes, [1, 6])
  check(tree, logits, roots(2), 31)


def test_no_nan_arises_where_no_token_is_possible():
  logits = jnp.asarray(make_logits('normal', (1, 2, 5), 4))
  logits = logits.at[0, 0].set(-jnp.inf)
  with jax.debug_nans(True), jax.disable_jit():
    log_q, _ = reference.rank_marginals(logits, 5)
  assert (log_q[0, 0] == reference.DEAD).all() and (log_q[0, 1] < 0).all()


def test_infinite_logits_tie_by_token_id():
  logits = make_logits('normal', (2, 3, 5), 4)
  logits[0, 0, [1, 4]] = np.inf
  tree = build(logits, roots(2), budget=2)
  assert tree.tokens[0, 1] == 1  # log 1/2, before any child of it
  assert np.isfinite(tree.scores).all()
  np.testing.assert_allclose(tree.scores[0, 1], -np.log(2), rtol=1e-6)
  # They share all probability: nothing else is possible at their depth.
  tree = build(logits, roots(2), budget=62)
  assert {*np.asarray(tree.tokens[0])[tree.depths[0] == 1].tolist()} == {1, 4}
  assert tree.num_nodes.tolist() == [1 + 2 * (1 + 5 + 25), 63]


def test_no_prefix_closed_set_of_the_size_has_more_mass():
  """Optimality (FAULTS A10), against random prefix-closed sets."""
  logits = make_logits('normal', (2, 3, 5), 17)
  mass = np.exp(np.asarray(build(logits, roots(2), budget=7).scores))[0].sum()
  q = np.exp(logits[0]) / np.exp(logits[0]).sum(axis=1, keepdims=True)
  rng = np.random.default_rng(0)
  for _ in range(300):
    nodes, frontier = {(): 1.0}, [(v,) for v in range(5)]
    while len(nodes) < 8:
      path = frontier.pop(rng.integers(len(frontier)))
      nodes[path] = nodes[path[:-1]] * q[len(path) - 1, path[-1]]
      if len(path) < 3:
        frontier += [(*path, v) for v in range(5)]
    assert sum(nodes.values()) <= mass + 1e-5


def test_ancestors_of_chains_and_of_corrupted_parents():
  chain = np.tile(np.arange(-1, 39, dtype=np.int32), (2, 1))
  words = _bits.ancestors_from_parents(jnp.asarray(chain), 39)
  mask = _bits.unpack_bits(words, 40)
  np.testing.assert_array_equal(mask[1], np.tril(np.ones((40, 40), bool)))
  # A cycle ends, out-of-range parents make padding.
  bad = jnp.asarray([[-1, 2, 1, 99, -7, 0]], jnp.int32)
  mask = np.asarray(_bits.unpack_bits(_bits.ancestors_from_parents(bad, 9), 6))
  want = np.zeros((6, 6), bool)
  want[0, 0] = want[5, 5] = want[5, 0] = True
  want[1:3, 1:3] = True
  np.testing.assert_array_equal(mask[0], want)


@pytest.mark.parametrize(
  'name,change',
  [
    ('logits', dict(logits=np.zeros((2, 5), np.float32))),
    ('logits', dict(logits=np.zeros((2, 3, 5), np.int32))),
    ('logits', dict(logits=np.zeros((2, 32, 5), np.float32))),
    ('logits', dict(logits=np.zeros((2, 3, 0), np.float32))),
    ('root', dict(root=np.zeros(3, np.int32))),
    ('root', dict(root=np.zeros(2, np.float32))),
    ('budget', dict(budget=-1)),
    ('budget', dict(budget=True)),
    ('budget', dict(budget=2.0)),
    ("implementation.*'reference'", dict(implementation='mosaic')),
  ],
)
def test_invalid_arguments_name_the_argument(name, change):
  arguments = dict(
    logits=np.zeros((2, 3, 5), np.float32),
    root=np.zeros(2, np.int32),
    budget=4,
  )
  with pytest.raises(ValueError, match=f'^{name}'):
    api.tree_build(**(arguments | change))
