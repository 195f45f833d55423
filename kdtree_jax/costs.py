"""Tables of what steps cost, from which rounds choose their number of nodes.

A table is a JSON file: what it belongs to (device, JAX, shapes of the models,
dtype, kernels) and measured points. Between points, milliseconds are
interpolated in the experts that the rows activate and in the rows.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jaxtyping import Float

from kdtree_jax.decode import Engine
from kdtree_jax.decode.budget import StepCosts
from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import sha256
from kdtree_jax.io.files import (
  StrPath,
  one_line,
  parse_json,
  reason,
  write_atomically,
)
from kdtree_jax.schema import from_json

FORMAT = 'kdtree_jax costs 1'
# Weight of a round's own exponent of active experts in the running one.
ADAPT = 0.1
# What the costs of a step do not depend on.
_NOT_SHAPE = {
  'eos_token_id',
  'max_position_embeddings',
  'mask_token_id',
  'rope_theta',
  'rope_scaling',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostPoint:
  """One measured step.

  Attributes:
    batch: rows of the batch.
    context: committed tokens of each row.
    width: nodes a row that the program has space for; None for AR's step,
      which does not draft.
    nodes: nodes verified for each row, the root not counted.
    ms: milliseconds of a step.
    experts: mean active experts of a layer; None for a dense model.
  """

  batch: int
  context: int
  width: int | None
  nodes: int
  ms: float
  experts: float | None

  @property
  def rows(self) -> int:
    """Rows of the verify."""
    return self.batch * (1 + self.nodes)


@dataclasses.dataclass(frozen=True)
class CostTable:
  """Measured points and what they belong to.

  Attributes:
    name: where the table comes from, for messages.
    key: what the table belongs to; see `cost_key`.
    points: measured steps.
    fixed: whether the overlap of experts stays that of the table, because the
      table is of another model: for studies.
  """

  name: str
  key: dict[str, Any]
  points: tuple[CostPoint, ...]
  fixed: bool = False

  def __post_init__(self):
    if not self.points:
      raise UserError(f'{self.name}: the table of costs has no points')
    for point in self.points:
      where = f'{self.name}: batch {point.batch}, context {point.context}'
      if not 0 < point.ms < 1e6:
        raise UserError(f'{where}: {point.ms} ms is no time of a step')
      if min(point.batch, point.context + 1, point.nodes + 1) < 1 or (
        point.nodes > (point.width or 0)
      ):
        raise UserError(
          f'{where}: no program of width {point.width} verifies {point.nodes} '
          'nodes'
        )
    for batch, context in sorted({(p.batch, p.context) for p in self.points}):
      self._check_complete(batch, context)

  def _check_complete(self, batch: int, context: int) -> None:
    found = self._at(batch, context)
    where = f'{self.name}: batch {batch}, context {context}'
    if not any(p.width is None for p in found):
      raise UserError(f'{where} has no AR step')
    if not any(p.width == 0 for p in found):
      raise UserError(f'{where} has no round without nodes')
    for width in {p.width for p in found if p.width}:
      if not any(p.width == width == p.nodes for p in found):
        raise UserError(f'{where} has no round of all {width} nodes')

  def _at(self, batch: int, context: int) -> list[CostPoint]:
    return [p for p in self.points if (p.batch, p.context) == (batch, context)]

  def step_costs(self, engine: Engine, batch: int) -> StepCosts:
    """The table as operands of an engine's program."""
    contexts = self._contexts(batch)
    model = self.key.get('target', {})
    experts = model.get('n_routed_experts', 0)
    each = model.get('num_experts_per_tok', 0)
    surfaces = [
      _Surface(self._between(batch, context), experts, each)
      for context in contexts
    ]
    widths = engine.decode.widths
    rows = np.arange(batch * (1 + max(widths)) + 1, dtype=np.float64)
    ms = [
      [surface.ms(width, rows, batch) for width in (None, 0, *widths)]
      for surface in surfaces
    ]
    f32 = jnp.float32
    return StepCosts(
      contexts=jnp.array(contexts, f32),
      ms=jnp.array(np.array(ms), f32),
      ms_per_expert=f32(np.mean([s.ms_per_expert for s in surfaces])),
      num_experts=f32(experts),
      experts_per_token=f32(each),
      overlap=f32(np.mean([s.overlap for s in surfaces])),
      adapt=f32(0 if self.fixed else ADAPT),
      max_nodes=jnp.int32(max(widths)),
    )

  def _contexts(self, batch: int) -> list[int]:
    """Contexts that were measured at the batches next to this one."""
    low, high = self._batches(batch)
    of = [{p.context for p in self.points if p.batch == b} for b in (low, high)]
    if not (shared := sorted(of[0] & of[1])):
      raise UserError(
        f'{self.name}: batches {low} and {high} share no context, so nothing '
        f'is known of batch {batch}'
      )
    return shared

  def _batches(self, batch: int) -> tuple[int, int]:
    known = sorted({p.batch for p in self.points})
    low = max((b for b in known if b <= batch), default=known[0])
    high = min((b for b in known if b >= batch), default=known[-1])
    return low, high

  def _between(self, batch: int, context: int) -> list[CostPoint]:
    """The points of a batch, interpolated between its neighbours' if need be.

    Milliseconds are linear in the logarithm of the batch, which is where the
    active experts of few rows grow evenly.
    """
    low, high = self._batches(batch)
    left, right = self._at(low, context), self._at(high, context)
    if low == high:
      return left
    share = np.log(batch / low) / np.log(high / low)
    pairs = {(p.width, p.nodes): p for p in right}
    return [
      dataclasses.replace(
        p,
        batch=batch,
        ms=p.ms * (1 - share) + other.ms * share,
        experts=None
        if p.experts is None or other.experts is None
        else p.experts * (1 - share) + other.experts * share,
      )
      for p in left
      if (other := pairs.get((p.width, p.nodes))) is not None
    ]

  def to_json(self) -> str:
    """The contents of the table's file."""
    points = [dataclasses.asdict(point) for point in self.points]
    content = {'format': FORMAT, 'key': self.key, 'points': points}
    return json.dumps(content, indent=1) + '\n'


class _Surface:
  """Milliseconds of one batch and context, by program and live rows."""

  def __init__(self, points: list[CostPoint], experts: int, each: int):
    self.points = points
    self.experts, self.each = experts, each
    self.overlap = self._overlap()
    self.ms_per_expert, self._ms_per_row = self._slopes()

  def _overlap(self) -> float:
    """The median exponent of the points; 1 where they show none."""
    missed = np.log1p(-min(self.each / max(self.experts, 1), 0.999999))
    found = [
      np.log(np.log1p(-p.experts / self.experts) / missed) / np.log(p.rows)
      for p in self.points
      if p.experts is not None
      and p.rows >= 2
      and 0 < p.experts < self.experts - 0.5
    ]
    return float(np.clip(np.median(found), 0.5, 1.0)) if found else 1.0

  def active(
    self, rows: Float[np.ndarray, ' rows']
  ) -> Float[np.ndarray, ' rows']:
    """Active experts of a layer by rows."""
    if not self.experts:
      return np.zeros_like(rows)
    missed = np.log1p(-min(self.each / self.experts, 0.999999))
    return -self.experts * np.expm1(missed * rows**self.overlap)

  def _slopes(self) -> tuple[float, float]:
    """Milliseconds an active expert and a row, by least squares."""
    rows = np.array([p.rows for p in self.points], np.float64)
    terms = [self.active(rows), rows]
    for program in {p.width for p in self.points}:
      terms.append(np.array([p.width == program for p in self.points], float))
    ms = np.array([p.ms for p in self.points])
    found, _ = scipy.optimize.nnls(np.stack(terms, axis=1), ms)
    return float(found[0]), float(found[1])

  def ms(
    self, width: int | None, rows: Float[np.ndarray, ' rows'], batch: int
  ) -> Float[np.ndarray, ' rows']:
    """Milliseconds of a program, by live rows.

    For a width that was not measured, those of the next one that was.
    """
    known = sorted({p.width for p in self.points if p.width is not None})
    if width is not None:
      width = min((w for w in known if w >= width), default=known[-1])
    points = sorted(
      (p for p in self.points if p.width == width), key=lambda p: p.rows
    )
    # A small slope at least, so that this coordinate grows with the rows.
    slope = max(self._ms_per_row, 1e-6)
    of = lambda n: self.ms_per_expert * self.active(n) + slope * n  # noqa: E731
    at = of(np.array([p.rows for p in points], np.float64))
    known_ms = np.array([p.ms for p in points])
    x = of(rows)
    inside = np.interp(x, at, known_ms)
    below = known_ms[0] + np.minimum(x - at[0], 0)
    above = known_ms[-1] + np.maximum(x - at[-1], 0)
    ms = np.where(x < at[0], below, np.where(x > at[-1], above, inside))
    return np.maximum(ms, 0.01 * known_ms[0])


def cost_key(engine: Engine, dtype: Any, weights: str = '') -> dict[str, Any]:
  """What a table of costs belongs to, as JSON."""
  drafter = engine.drafter
  drafts = {'type': type(drafter).__name__}
  if dataclasses.is_dataclass(drafter) and not isinstance(drafter, type):
    drafts |= dataclasses.asdict(drafter)
  return json.loads(
    json.dumps(
      {
        'device': jax.devices()[0].device_kind,
        'jax': jax.__version__,
        'dtype': jnp.dtype(dtype).name,
        'weights': weights,
        'kernels': engine.decode.kernels,
        'target': _shape(engine.config.to_dict()),
        'drafter': _shape(drafts),
      }
    )
  )


def _shape(fields: Mapping[str, Any]) -> dict[str, Any]:
  return {
    name: _shape(value) if isinstance(value, Mapping) else value
    for name, value in fields.items()
    if name not in _NOT_SHAPE
  }


def difference(
  one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ''
) -> str | None:
  """The first field in which two keys differ, with both values."""
  for name in [*other, *(n for n in one if n not in other)]:
    a, b = one.get(name), other.get(name)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      if found := difference(a, b, f'{prefix}{name}.'):
        return found
    elif a != b:
      return f'{prefix}{name}={a}, not {b}'
  return None


def read_costs(path: StrPath) -> CostTable:
  """A table from a file.

  Raises:
    UserError: the file is no table of costs, or one with gaps.
  """
  try:
    content = parse_json(pathlib.Path(path).read_bytes())
  except (OSError, ValueError) as error:
    raise UserError(f'--costs={path}: {reason(error)}') from None
  if not isinstance(content, dict) or content.get('format') != FORMAT:
    raise UserError(f'{path} is not a table of costs of --mode=bench')
  key, points = content.get('key'), content.get('points')
  if not isinstance(key, dict) or not isinstance(points, list):
    raise UserError(f'{path}: a table of costs has a key and points')
  found = []
  for i, point in enumerate(points):
    try:
      found.append(from_json(CostPoint, point))
    except UserError as error:
      raise UserError(f'{path}: points[{i}]: {one_line(error)}') from None
  return CostTable(str(path), key, tuple(found))


def write_costs(table: CostTable, path: StrPath) -> None:
  """Writes a table, whole or not at all."""
  write_atomically(path, [table.to_json().encode()])


def shipped_costs() -> dict[str, pathlib.Path]:
  """The tables in the package by their names."""
  folder = pathlib.Path(__file__).parent / 'data'
  return {
    path.name.removesuffix('.costs.json'): path
    for path in sorted(folder.glob('*.costs.json'))
  }


def cached_path(key: Mapping[str, Any], batch: int) -> pathlib.Path | None:
  """The file of a table beside compiled programs; None without such a folder.

  A batch has its own file, because only its own program is measured.
  """
  folder = jax.config.jax_compilation_cache_dir
  if folder is None:
    return None
  name = f'costs-{sha256({"key": key, "batch": batch})[:16]}.json'
  return pathlib.Path(folder) / name
