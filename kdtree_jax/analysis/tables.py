"""A sweep's records as rows of numbers and as Markdown."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kdtree_jax.analysis.acceptance import (
  PROBABILITIES,
  RANKS,
  Interval,
  NodeCounts,
  add_counts,
  by_depth,
  histogram,
  loop_start,
  mean_interval,
  ratio_interval,
  rounds_before,
)

# The tree that the details show, where it was measured.
DETAIL_BUDGET = 64
BEFORE_LOOPS = 'without loops'


class Setting(NamedTuple):
  """Under what a walk was taken.

  Attributes:
    forced: the committed text is a given one, not the model's own.
    by_text: the walk, too, is along that text, not the target's tokens.
    temperature: of the target.
  """

  forced: bool
  by_text: bool
  temperature: float

  @property
  def title(self) -> str:
    if not self.forced:
      return f"temperature {self.temperature:g}, the model's own text"
    if self.by_text:
      return 'real text, accepted where the text says the same'
    return "real text, accepted where the target's greedy token is the same"


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """One method under one setting, over all prompts.

  Attributes:
    setting: see there.
    method: `ar`, `chain` or `ddtree`.
    tree_budget: 0 for AR.
    keep_top1_chain: of a tree.
    block_size: of the drafter.
    prompts: how many.
    acceptance: mean acceptance length.
    before_loops: the same until the text begins to repeat itself; None for a
      given text, or if nothing is left.
    looping: the share of the output's tokens behind that point.
    over_chain: the mean over that of the chain, where there is one.
    lengths: of all rounds.
    matches: outputs equal to AR's, of how many compared.
    counts: of the nodes, None for AR.
  """

  setting: Setting
  method: str
  tree_budget: int
  keep_top1_chain: bool
  block_size: int
  prompts: int
  acceptance: Interval | None
  before_loops: Interval | None
  looping: float
  over_chain: Interval | None
  lengths: list[int]
  matches: tuple[int, int]
  counts: NodeCounts | None


# Setting, method, tree budget, kept chain.
_Key = tuple[Setting, str, int, bool]


def summarise(records: Iterable[Mapping[str, Any]]) -> list[Row]:
  """Rows in the order: settings, then AR, chain and trees by budget.

  Args:
    records: lines of `--mode=bench_acceptance`.
  """
  groups: dict[_Key, list[tuple[Mapping[str, Any], list[int]]]] = {}
  for record in records:
    temperature, forced = record['temperature'], record['forced']
    walks = {Setting(forced, forced, temperature): 'acceptance_lengths'}
    if forced:
      walks[Setting(True, False, temperature)] = 'target_acceptance_lengths'
    for setting, field in walks.items():
      key = setting, record['method'], record['tree_budget']
      key = *key, record['keep_top1_chain']
      groups.setdefault(key, []).append((record, record[field]))
  chains = {
    key[0]: {record['id']: walk for record, walk in group}
    for key, group in groups.items()
    if key[1] == 'chain'
  }
  return [
    _row(key, group, chains.get(key[0], {}))
    for key, group in sorted(groups.items())
  ]


def _row(
  key: _Key,
  group: list[tuple[Mapping[str, Any], list[int]]],
  chain: Mapping[Any, list[int]],
) -> Row:
  setting, method, budget, keep_top1_chain = key
  walks = [walk for _, walk in group]
  before = over = None
  looping = 0.0
  if not setting.forced:
    cuts = [loop_start(record['output_ids']) for record, _ in group]
    total = sum(len(record['output_ids']) for record, _ in group)
    behind = sum(
      len(record['output_ids']) - cut
      for (record, _), cut in zip(group, cuts, strict=True)
      if cut is not None
    )
    looping = behind / total if total else 0.0
    before = mean_interval(
      [rounds_before(w, cut) for w, cut in zip(walks, cuts, strict=True)]
    )
  if method == 'ddtree' and all(record['id'] in chain for record, _ in group):
    base = [chain[record['id']] for record, _ in group]
    over = ratio_interval(walks, base)
  compared = [r['match'] for r, _ in group if r['match'] is not None]
  counts = None
  # The nodes were counted along the walk that was committed.
  if method != 'ar' and setting.by_text == setting.forced:
    counts = add_counts([NodeCounts(**record['nodes']) for record, _ in group])
  return Row(
    setting=setting,
    method=method,
    tree_budget=budget,
    keep_top1_chain=keep_top1_chain,
    block_size=group[0][0]['block_size'],
    prompts=len(group),
    acceptance=mean_interval(walks),
    before_loops=before,
    looping=looping,
    over_chain=over,
    lengths=list(itertools.chain.from_iterable(walks)),
    matches=(sum(compared), len(compared)),
    counts=counts,
  )


def markdown(rows: Sequence[Row]) -> str:
  """Tables of all rows, then details of the chain and of one tree."""
  parts = []
  for setting, group in itertools.groupby(rows, lambda row: row.setting):
    members = list(group)
    parts += [f'### {_upper(setting.title)}', _table(members)]
    if not setting.forced:
      looping = _percent(members[0].looping)
      parts.append(f'{looping} of the tokens are in text that repeats itself.')
    for row in _shown(members):
      parts += [f'{_upper(name(row))}:', _lengths(row)]
      if row.counts is not None:
        parts += [_ranks(row.counts), _calibration(row.counts)]
  return '\n\n'.join(parts) + '\n'


def name(row: Row) -> str:
  """What a row is called in tables and legends."""
  if row.method != 'ddtree':
    return {'ar': 'AR', 'chain': 'DFlash chain'}[row.method]
  seeded = ', chain kept' if row.keep_top1_chain else ''
  return f'DDTree {row.tree_budget}{seeded}'


def detail_tree(rows: Sequence[Row]) -> Row | None:
  """The tree shown in detail: the largest of at most `DETAIL_BUDGET`."""
  trees = [r for r in rows if r.method == 'ddtree' and not r.keep_top1_chain]
  small = [row for row in trees if row.tree_budget <= DETAIL_BUDGET]
  if not trees:
    return None
  return max(small or trees[:1], key=lambda row: row.tree_budget)


def _shown(rows: Sequence[Row]) -> list[Row]:
  tree = detail_tree(rows)
  chains = [row for row in rows if row.method == 'chain']
  return [*chains, *([] if tree is None else [tree])]


def _table(rows: Sequence[Row]) -> str:
  head = ['', 'acceptance length', BEFORE_LOOPS, 'over the chain']
  head += ['target forwards', 'same as AR']
  body = []
  for row in rows:
    same, compared = row.matches
    body.append(
      [
        name(row),
        _text(row.acceptance),
        _text(row.before_loops),
        _text(row.over_chain),
        f'{len(row.lengths):,}',
        f'{same} of {compared}' if compared else '',
      ]
    )
  return _grid(head, body)


def _lengths(row: Row) -> str:
  """Histogram and acceptance by depth, side by side."""
  counts = histogram(row.lengths, row.block_size)
  depths = by_depth(row.lengths, row.block_size)
  head = ['acceptance length', *map(str, range(1, row.block_size + 1))]
  share = ['share of rounds', *(_percent(c, len(row.lengths)) for c in counts)]
  reached = ['reach this depth', '', *(_percent(d[0]) for d in depths)]
  given = ['if the depth before is', '', *(_percent(d[1]) for d in depths)]
  return _grid(head, [share, reached, given])


def _ranks(counts: NodeCounts) -> str:
  head = ['sibling rank', *map(str, range(1, RANKS)), f'{RANKS} and more']
  pairs = list(zip(counts.rank_accepted, counts.rank_offered, strict=True))
  total = sum(counts.rank_accepted)
  share = [_percent(taken, total) for taken, _ in pairs]
  chance = [_percent(taken, offered) for taken, offered in pairs]
  return _grid(
    head,
    [['share of accepted nodes', *share], ['accepted if offered', *chance]],
  )


def _calibration(counts: NodeCounts) -> str:
  head = ['path probability up to', *(f'{p:g}' for p in PROBABILITIES)]
  nodes = [f'{count:,}' for count in counts.nodes]
  said = [
    _percent(p, n) for p, n in zip(counts.predicted, counts.nodes, strict=True)
  ]
  was = [
    _percent(a, n) for a, n in zip(counts.accepted, counts.nodes, strict=True)
  ]
  return _grid(
    head,
    [
      ['nodes', *nodes],
      ['predicted by the drafter', *said],
      ['accepted', *was],
    ],
  )


def _grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
  rule = ['---', *('--:' for _ in head[1:])]
  lines = [head, rule, *body]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _text(interval: Interval | None) -> str:
  if interval is None:
    return ''
  return f'{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]'


def _percent(part: float | None, whole: float = 1.0) -> str:
  return '' if part is None or not whole else f'{part / whole:.1%}'


def _upper(text: str) -> str:
  return text[:1].upper() + text[1:]
