"""Speedups computed from measured times, and tables of all results."""

import rich.box
import rich.console
import rich.table

from kdtree_jax.benchmark import Record

ACCEPTANCE_LENGTHS = (2, 3, 4, 5, 6, 8)

Records = list[Record]


def computed(records: Records) -> Records:
  """Break-even and speedups of every measured round, from its own context.

  The break-even acceptance length is a round's time over an AR step's: below
  it AR is faster. The speedup at an acceptance length a is a times an AR
  step's time over a round's; None if no tree of that budget and block reaches
  a.
  """
  ar = {
    r['context']: r['measured']['ms']
    for r in records
    if r['kind'] == 'step' and r['method'] == 'ar'
  }
  found = []
  for r in records:
    if r['kind'] != 'step' or r['method'] == 'ar' or r['context'] not in ar:
      continue
    ratio = r['measured']['ms'] / ar[r['context']]
    most = min(r['block_size'], 1 + r['tree_budget'])
    found.append(
      {
        'kind': 'computed',
        'context': r['context'],
        'tree_budget': r['tree_budget'],
        'break_even_acceptance_length': ratio,
        'speedup_at_acceptance_length': {
          str(a): a / ratio if a <= most else None for a in ACCEPTANCE_LENGTHS
        },
      }
    )
  return found


def show(records: Records) -> None:
  """Prints the tables of a sweep."""
  console = rich.console.Console(width=160, highlight=False)
  head = next(r for r in reversed(records) if r['kind'] == 'run')
  bandwidth = head['measured']['copy_bytes_per_second'] / 1e12
  s = head['settings']
  console.print(
    f'{s["name"]}, {s["layers"]} layers, {s["weights"]}, {s["dtype"]}, batch '
    f'1; {head["hardware"]["device"]}, copy {bandwidth:.2f} TB/s, JAX '
    f'{head["versions"]["jax"]}',
  )
  _print_steps(console, records)
  _print_others(console, records)
  _print_speedups(console, computed(records))
  console.print(
    'Measured: ms with its spread, us of draft, tree, accept and commit (in '
    'loops of their own), unique experts a layer. Computed: GB that the step '
    'must move, the limit (GB over the copy bandwidth of the run), verify us '
    '(the round less the other stages), break-even acceptance lengths and '
    'speedups.',
  )


def _table(*columns: str) -> rich.table.Table:
  """An empty table in Markdown."""
  table = rich.table.Table(box=rich.box.MARKDOWN)
  for name in columns:
    table.add_column(name, justify='right', no_wrap=True)
  return table


def _print_steps(console: rich.console.Console, records: Records) -> None:
  table = _table(
    'context',
    'budget',
    'ms',
    'min..max',
    'GB',
    'limit ms',
    'of limit',
    'draft us',
    'tree us',
    'verify us',
    'accept us',
    'commit us',
    'experts',
  )
  for r in sorted(_of(records, 'step'), key=_order):
    m, c = r['measured'], r['computed']
    stages = [
      m['stages_us'].get('draft'),
      m['stages_us'].get('tree_build'),
      c.get('verify_us'),
      m['stages_us'].get('accept'),
      m['stages_us'].get('commit'),
    ]
    table.add_row(
      str(r['context']),
      'AR' if r['method'] == 'ar' else str(r['tree_budget']),
      f'{m["ms"]:.3f}',
      f'{m["ms_min"]:.3f}..{m["ms_max"]:.3f}',
      f'{sum(c["bytes"].values()) / 1e9:.2f}',
      f'{c["limit_ms"]:.3f}',
      f'{c["fraction_of_limit"]:.0%}',
      *('' if us is None else f'{us:.0f}' for us in stages),
      f'{m["unique_experts"]:.1f}',
    )
  console.print(table)


def _print_others(console: rich.console.Console, records: Records) -> None:
  for r in _of(records, 'prefill'):
    console.print(
      f'prefill of {r["tokens"]} tokens up to {r["context"]}: '
      f'{r["measured"]["ms"]:.1f} ms',
    )
  for r in _of(records, 'failure'):
    console.print(
      f'budget {r["tree_budget"]} does not compile: {r["reason"][:200]}',
      markup=False,
    )
  for r in _of(records, 'compile'):
    warm = r['measured']['warm_seconds']
    warm = 'cannot be stored' if warm is None else f'load in {warm:.1f} s'
    console.print(
      f'first-call compilation of generate at budget {r["tree_budget"]}: '
      f'{r["measured"]["cold_seconds"]:.1f} s; its programs {warm}',
    )
  for r in _of(records, 'memory'):
    m = r['measured']
    peak = m['peak_beyond_bytes']
    peak = 'unknown' if peak is None else f'{peak / 1e9:.2f} GB'
    console.print(
      f'memory: weights {m["weight_bytes"] / 1e9:.2f} GB, state '
      f'{m["state_bytes"] / 1e9:.2f} GB, device peak beyond both {peak}, '
      f'largest temporary of a loop {m["temporary_bytes"] / 1e9:.3f} GB',
    )
  for r in _of(records, 'end_to_end'):
    m = r['measured']
    console.print(
      f'end to end, {r["drafter"]}, budget {r["tree_budget"]}: '
      f'{m["tokens_per_second"]:.0f} tokens/s, AR '
      f'{m["ar_tokens_per_second"]:.0f}, acceptance length '
      f'{m["acceptance_length"]:.2f}, '
      + (
        'tokens equal'
        if m['first_difference'] is None
        else f'tokens differ from AR at {m["first_difference"]}, '
        f'{m["revisions"]} revisions'
      ),
    )


def _print_speedups(console: rich.console.Console, rows: Records) -> None:
  if not rows:
    return
  lengths = (f'speedup at {a}' for a in ACCEPTANCE_LENGTHS)
  table = _table('context', 'budget', 'break-even', *lengths)
  for r in sorted(rows, key=_order):
    speedups = r['speedup_at_acceptance_length'].values()
    table.add_row(
      str(r['context']),
      str(r['tree_budget']),
      f'{r["break_even_acceptance_length"]:.2f}',
      *('' if x is None else f'{x:.2f}' for x in speedups),
    )
  console.print(table)


def _of(records: Records, kind: str) -> Records:
  return [r for r in records if r['kind'] == kind]


def _order(record: Record) -> tuple[int, bool, int]:
  drafted = record.get('method') != 'ar'
  return record['context'], drafted, record['tree_budget']
