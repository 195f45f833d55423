"""Numbers of runs, against examples worked by hand."""

import math

import numpy as np
import pytest

from kdtree_jax.analysis import acceptance, plots, tables
from kdtree_jax.errors import UserError


def test_sibling_ranks():
  # Root; a, b under it; a1, a2 under a; c the root's third child; a3; b1.
  parents = [-1, 0, 0, 1, 1, 0, 1, 2]
  ranks = acceptance.sibling_ranks(parents)
  assert ranks.tolist() == [0, 0, 1, 0, 1, 2, 2, 0]


def test_counts_of_one_tree():
  # Root -> x (0.45), y (0.25); x -> x1 (0.35), x2 (0.04). Accepted: y, alone.
  parents = [-1, 0, 1, 0, 1]
  scores = np.log([1.0, 0.45, 0.35, 0.25, 0.04]).tolist()
  counts = acceptance.count_nodes([(parents, scores, [0, 3])])
  bins = {round(p, 2): i for i, p in enumerate(acceptance.PROBABILITIES)}
  wanted = [0] * len(bins)
  for p in (0.5, 0.4, 0.3, 0.05):
    wanted[bins[p]] += 1
  assert counts.nodes == wanted
  assert counts.accepted[bins[0.3]] == 1 and sum(counts.accepted) == 1
  assert counts.predicted[bins[0.3]] == pytest.approx(0.25)
  assert sum(counts.predicted) == pytest.approx(1.09)
  # x and y were offered under the root; x's children lost their parent.
  assert counts.rank_offered == [1, 1, 0, 0, 0, 0, 0, 0]
  assert counts.rank_accepted == [0, 1, 0, 0, 0, 0, 0, 0]
  both = acceptance.add_counts([counts, counts])
  assert both.nodes == [2 * n for n in wanted]
  assert both.rank_offered[:2] == [2, 2]


def test_late_siblings_share_the_last_rank():
  parents = [-1] + [0] * 12
  scores = [0.0] + [-5.0] * 12
  counts = acceptance.count_nodes([(parents, scores, [0, 11])])
  assert counts.rank_offered == [1] * 7 + [5]
  assert counts.rank_accepted == [0] * 7 + [1]
  empty = acceptance.count_nodes([([-1], [0.0], [0])])
  assert sum(empty.nodes) == sum(empty.rank_offered) == 0


@pytest.mark.parametrize(
  ('tokens', 'start'),
  [
    ([], None),
    ([1, 2, 3], None),
    # Often enough, but too short to be a loop.
    ([9, 1, 2, 1, 2, 1, 2], None),
    # Long enough, but said only twice.
    ([*range(20), *range(20)], None),
    # One token for ever: it is said once at 2, repeated from 3 on.
    ([5, 6] + [7] * 16, 3),
    ([5, 6] + [7] * 15, None),
    # A period of three; the tail is cut in the middle of it.
    ([8, 9, *([1, 2, 3] * 6), 1], 5),
    # A period of ten, three times.
    ([50, 51, *([*range(10)] * 3)], 12),
    # The loop ends again: it flattered what was in it.
    ([4, *([1, 2] * 9), *range(30, 60)], 3),
  ],
)
def test_where_a_loop_starts(tokens, start):
  assert acceptance.loop_start(tokens) == start


def test_rounds_before_a_loop():
  lengths = [3, 1, 4, 2]
  # They begin at 0, 3, 4, 8.
  assert acceptance.rounds_before(lengths, None) == lengths
  assert acceptance.rounds_before(lengths, 4) == [3, 1]
  assert acceptance.rounds_before(lengths, 5) == [3, 1, 4]
  assert acceptance.rounds_before(lengths, 0) == []


def test_means_are_tokens_over_rounds():
  """Not means of means: a long run counts for more."""
  found = acceptance.mean_interval([[4], [1, 1, 1]])
  assert found.mean == 7 / 4
  assert found.low == 1.0 and found.high == 4.0
  assert acceptance.mean_interval([[], []]) is None
  same = acceptance.mean_interval([[2, 3]] * 5)
  assert same == acceptance.Interval(2.5, 2.5, 2.5)


def test_intervals_are_the_same_every_time_and_cover():
  rng = np.random.default_rng(1)
  runs = [rng.integers(1, 8, 30).tolist() for _ in range(40)]
  first = acceptance.mean_interval(runs)
  assert first == acceptance.mean_interval(runs)
  assert first != acceptance.mean_interval(runs, seed=1)
  # What the central limit theorem says of 1200 draws from 1..7.
  half = 1.96 * 2 / math.sqrt(1200)
  assert first.low == pytest.approx(first.mean - half, abs=0.25 * half)
  assert first.high == pytest.approx(first.mean + half, abs=0.25 * half)


def test_ratios_are_paired():
  """The same resample for both: a constant factor has no spread."""
  base = [[1, 2], [3, 3], [2, 6]]
  runs = [[2 * n for n in run] for run in base]
  found = acceptance.ratio_interval(runs, base)
  assert (found.mean, found.low, found.high) == pytest.approx((2, 2, 2))
  assert acceptance.ratio_interval(runs, [[], [], []]) is None


def test_histogram_and_depths():
  lengths = [1, 1, 3, 4]
  assert acceptance.histogram(lengths, 4) == [2, 0, 1, 1]
  assert acceptance.by_depth(lengths, 4) == [
    (0.5, 0.5),
    (0.5, 1.0),
    (0.25, 0.5),
  ]
  assert acceptance.by_depth([1, 1], 3) == [(0.0, 0.0), (0.0, None)]


def record(id, method, budget, lengths, **changes):
  trees = [([-1, 0], [0.0, -0.5], [0, 1][: min(n, 2)]) for n in lengths]
  nodes = vars(acceptance.count_nodes(trees))
  fields = {
    'id': id,
    'temperature': 0.0,
    'forced': False,
    'method': method,
    'tree_budget': budget,
    'keep_top1_chain': False,
    'block_size': 4,
    'acceptance_lengths': lengths,
    'output_ids': list(range(sum(lengths))),
    'match': True,
    'nodes': nodes,
  }
  return fields | changes


def sweep():
  forced = {'forced': True, 'match': None}
  forced['target_acceptance_lengths'] = [2, 2]
  return [
    record('a', 'ar', 0, [1] * 6, match=None, nodes=None),
    record('b', 'ar', 0, [1] * 6, match=None, nodes=None),
    record('a', 'chain', 3, [2, 4]),
    record('b', 'chain', 3, [3, 1, 2]),
    record('b', 'ddtree', 8, [3, 3], match=False),
    record('a', 'ddtree', 8, [4, 2]),
    record('a', 'ddtree', 512, [4, 2]),
    record('b', 'ddtree', 512, [4, 2], keep_top1_chain=True),
    record('a', 'chain', 3, [1, 2], **forced),
  ]


def test_rows_of_a_sweep():
  rows = tables.summarise(sweep())
  titles = [(row.setting.title.split(',')[0], tables.name(row)) for row in rows]
  assert titles == [
    ('temperature 0', 'AR'),
    ('temperature 0', 'DFlash chain'),
    ('temperature 0', 'DDTree 8'),
    ('temperature 0', 'DDTree 512'),
    ('temperature 0', 'DDTree 512, chain kept'),
    ('real text', 'DFlash chain'),
    ('real text', 'DFlash chain'),
  ]
  ar, chain, tree = rows[:3]
  assert ar.acceptance.mean == 1 and len(ar.lengths) == 12
  assert chain.acceptance.mean == 12 / 5
  assert tree.acceptance.mean == 3 and tree.over_chain.mean == 3 / (12 / 5)
  assert tree.matches == (1, 2) and ar.matches == (0, 0)
  by_target, by_text = rows[5:]
  assert not by_target.setting.by_text and by_target.counts is None
  assert by_target.acceptance.mean == 2 and by_text.acceptance.mean == 1.5
  assert by_text.before_loops is None and chain.before_loops.mean == 12 / 5
  assert tables.detail_tree(rows) is tree
  assert all(row.looping == 0 for row in rows)


def test_loops_in_rows():
  """Two tokens, then eighteen of one kind: it repeats from the fourth on."""
  output = [5, 6] + [7] * 18
  walk = [1, 1, 2, 8, 8]
  (row,) = tables.summarise([record('a', 'chain', 3, walk, output_ids=output)])
  assert row.looping == 17 / 20
  # Rounds begin at 0, 1, 2, 4, 12: three of them before token 3.
  assert row.before_loops.mean == 4 / 3 and row.acceptance.mean == 4
  assert '85.0% of the tokens' in tables.markdown([row])


def test_markdown_of_a_sweep():
  text = tables.markdown(tables.summarise(sweep()))
  assert '| DDTree 8 | 3.00 [' in text and '| 4 | 1 of 2 |' in text
  # Every line of a table has as many cells as its head.
  for block in text.split('\n\n'):
    if '|' not in block:
      continue
    widths = {line.count('|') for line in block.strip().splitlines()}
    assert len(widths) == 1, block


def test_pictures_of_a_sweep():
  rows = tables.summarise(sweep())
  for draw in (plots.acceptance_by_budget, plots.acceptance_histogram):
    picture = draw(rows)
    assert picture.startswith(b'\x89PNG') and picture == draw(rows)


def test_without_matplotlib(monkeypatch):
  import sys

  plots.check_plots()
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(UserError, match=r'pip install kdtree_jax\[plots\]'):
    plots.check_plots()
