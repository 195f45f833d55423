"""Prices measured steps by measured acceptance: docs/speedup.png and its table.

`python docs/pictures.py` draws the picture from docs/speedup.json (matplotlib,
the extra `plots`) and prints the table, which README.md repeats.
"""

import json
import pathlib
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parent


class Point(NamedTuple):
  """What one round costs and what it is priced at.

  Attributes:
    batch: sequences decoded together.
    budget: draft nodes of each sequence; 0 is AR.
    milliseconds: of one round, measured.
    acceptance_length: tokens a round commits for each sequence, measured on
      another model; 1 for AR.
    speedup: acceptance length x AR's milliseconds / milliseconds.
  """

  batch: int
  budget: int
  milliseconds: float
  acceptance_length: float
  speedup: float


def points() -> list[Point]:
  """Every measured step with its price, by batch and budget."""
  data = json.loads((FOLDER / 'speedup.json').read_text())
  lengths = {'0': 1.0} | data['acceptance_length']['by_budget']
  return [
    Point(int(batch), int(budget), ms, lengths[budget], speedup)
    for batch, steps in data['step_ms']['by_batch_and_budget'].items()
    for budget, ms in steps.items()
    for speedup in [lengths[budget] * steps['0'] / ms]
  ]


def table() -> str:
  """Markdown: a row for each budget, a column for each batch."""
  found = points()
  batches = sorted({point.batch for point in found})
  lines = [
    '| tree budget | acceptance length | '
    + ' | '.join(f'batch {batch}' for batch in batches)
    + ' |',
    '|---' * (2 + len(batches)) + '|',
  ]
  for budget in sorted({point.budget for point in found}):
    row = {point.batch: point for point in found if point.budget == budget}
    cells = [
      f'{row[batch].milliseconds:.2f} ms, {row[batch].speedup:.2f}x'
      if batch in row
      else ''
      for batch in batches
    ]
    (length,) = {point.acceptance_length for point in row.values()}
    name = f'{budget}' if budget else '0 (AR)'
    lines.append(f'| {name} | {length:.2f} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def draw(path: pathlib.Path) -> None:
  """Draws the priced speedup over AR against the budget, a line a batch."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7, 4.2), dpi=110, layout='constrained')
  axis = figure.subplots()
  found = [point for point in points() if point.budget]
  colors = ('tab:blue', 'tab:orange', 'tab:green', 'tab:red')
  batches = sorted({point.batch for point in found})
  for batch, color in zip(batches, colors, strict=True):
    mine = [point for point in found if point.batch == batch]
    axis.plot(
      [point.budget for point in mine],
      [point.speedup for point in mine],
      'o-',
      color=color,
      label=f'batch {batch}',
    )
  axis.axhline(1, color='gray', linestyle='--', linewidth=1)
  axis.text(4, 0.95, 'AR', color='gray', va='top')
  budgets = sorted({point.budget for point in found})
  axis.set_xscale('log', base=2)
  axis.set_xticks(budgets, [str(budget) for budget in budgets])
  axis.set_ylim(0, 4)
  axis.set_xlabel('tree budget (draft nodes a round and sequence)')
  axis.set_ylabel('priced speedup over AR')
  axis.set_title(
    'Step times of a 16B MoE (H200, random weights)\n'
    'x acceptance lengths of the small trained pair',
    fontsize='medium',
  )
  axis.grid(alpha=0.3)
  axis.legend()
  # Without the version of matplotlib: equal numbers give equal bytes.
  figure.savefig(path, metadata={'Software': None})


if __name__ == '__main__':
  draw(FOLDER / 'speedup.png')
  print(table())
