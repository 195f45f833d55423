"""Pictures of a sweep, by matplotlib (the extra `plots`)."""

import io
from collections.abc import Sequence
from typing import Any

from kdtree_jax.analysis.acceptance import histogram
from kdtree_jax.analysis.tables import Row, Setting, detail_tree, name
from kdtree_jax.errors import UserError

# Inches of one part, parts side by side, dots an inch.
_WIDTH, _HEIGHT, _COLUMNS, _DPI = 4.4, 3.6, 3, 110
_CHAIN, _TREE = 'tab:orange', 'tab:blue'


def check_plots() -> None:
  """Refuses before the work what could not be drawn after it.

  Raises:
    UserError: matplotlib is not installed.
  """
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    raise UserError(
      '--plots needs matplotlib: pip install kdtree_jax[plots]'
    ) from None


def _figure(count: int) -> tuple[Any, list[Any]]:
  """A figure that needs no display, and `count` axes, in rows of three."""
  from matplotlib.figure import Figure

  columns = min(count, _COLUMNS)
  rows = -(-count // columns)
  size = _WIDTH * columns, _HEIGHT * rows
  figure = Figure(figsize=size, dpi=_DPI, layout='constrained')
  axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
  for axis in axes[count:]:
    axis.remove()
  return figure, list(axes[:count])


def _png(figure: Any) -> bytes:
  buffer = io.BytesIO()
  # Without the time and the version: equal numbers give equal bytes.
  figure.savefig(buffer, format='png', metadata={'Software': None})
  return buffer.getvalue()


def _settings(rows: Sequence[Row]) -> list[Setting]:
  return sorted({row.setting for row in rows})


def acceptance_by_budget(rows: Sequence[Row]) -> bytes:
  """PNG: mean acceptance length against the tree's budget, by setting."""
  settings = _settings(rows)
  figure, axes = _figure(len(settings))
  for axis, setting in zip(axes, settings, strict=True):
    mine = [row for row in rows if row.setting == setting]
    for seeded, style in ((False, 'o-'), (True, 's--')):
      trees = [
        (row.tree_budget, row.acceptance)
        for row in mine
        if row.method == 'ddtree' and row.keep_top1_chain == seeded
        if row.acceptance is not None
      ]
      if not trees:
        continue
      budgets, means = zip(*trees, strict=True)
      label = 'DDTree, chain kept' if seeded else 'DDTree'
      color = 'tab:cyan' if seeded else _TREE
      axis.plot(
        budgets, [m.mean for m in means], style, label=label, color=color
      )
      axis.fill_between(
        budgets,
        [m.low for m in means],
        [m.high for m in means],
        color=color,
        alpha=0.15,
        linewidth=0,
      )
    for row in mine:
      if row.method == 'chain' and row.acceptance is not None:
        axis.axhline(row.acceptance.mean, color=_CHAIN, label=name(row))
        band = row.acceptance.low, row.acceptance.high
        axis.axhspan(*band, color=_CHAIN, alpha=0.15, linewidth=0)
    axis.set_xscale('log', base=2)
    axis.xaxis.set_major_formatter('{x:.0f}')
    axis.set_xlabel('tree budget')
    axis.set_title(_wrapped(setting), fontsize='medium')
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('acceptance length')
  axes[0].legend()
  return _png(figure)


def acceptance_histogram(rows: Sequence[Row]) -> bytes:
  """PNG: how often a round commits so many tokens, chain beside tree."""
  settings = _settings(rows)
  figure, axes = _figure(len(settings))
  for axis, setting in zip(axes, settings, strict=True):
    mine = [row for row in rows if row.setting == setting]
    tree = detail_tree(mine)
    shown = [row for row in mine if row.method == 'chain']
    shown += [] if tree is None else [tree]
    for i, row in enumerate(shown):
      counts = histogram(row.lengths, row.block_size)
      places = [n + 0.4 * (i - (len(shown) - 1) / 2) for n in _numbers(counts)]
      shares = [count / len(row.lengths) for count in counts]
      color = _CHAIN if row.method == 'chain' else _TREE
      axis.bar(places, shares, width=0.4, label=name(row), color=color)
      axis.set_xticks(_numbers(counts))
    axis.set_xlabel('tokens committed by a round')
    axis.set_title(_wrapped(setting), fontsize='medium')
    axis.grid(alpha=0.3, axis='y')
  axes[0].set_ylabel('share of rounds')
  axes[0].legend()
  return _png(figure)


def _numbers(counts: Sequence[int]) -> list[int]:
  return list(range(1, len(counts) + 1))


def _wrapped(setting: Setting) -> str:
  head, _, rest = setting.title.partition(', ')
  return f'{head},\n{rest.replace(" where ", " where" + chr(10))}'
