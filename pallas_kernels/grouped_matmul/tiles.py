"""The work of the Mosaic kernels in tiles, and which block's turn it is.

`Dense` and `Grouped` are the two ways to give a tile its columns, see
`mosaic_gpu`. Both number an op's tiles without holes, so that the blocks can
share them evenly: `number` experts (or tiles of rows) times the tiles of their
weights. They run inside the kernels, on scalars.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import routing

TILE = 64  # Rows of weights, and steps along the sum, of a swizzled tile.
_DENSE_TOKENS = 16
# From so many on a shared SwiGLU is cut into experts: 65 rows lost by it and
# 257 gained, in a whole step; in between nothing was measured.
SHARED_TOKENS = 128
_MAX_COLUMNS = 128  # Two float32 accumulators of it fill 128 registers.


@dataclasses.dataclass(frozen=True)
class Plan:
  """How an op of one static shape is cut.

  Attributes:
    dense: whether the columns are all the tokens.
    columns: how many columns one multiplying warpgroup takes.
    consumers: how many multiplying warpgroups a block has, 1 or 2.
    blocks: blocks of the grid, one a multiprocessor.
    stages: tiles of weights in flight, at most.
    cluster: blocks that take neighbouring tiles of weights at the same time and
      load the columns, which they share, once, by multicast.
    takes_shared: whether a shared SwiGLU is cut into experts as well.
    groups: warpgroups of a block that groups rows by expert, see `grouping`.
  """

  dense: bool
  columns: int
  consumers: int
  blocks: int
  stages: int = 16
  cluster: int = 1
  takes_shared: bool = False
  groups: int = 4

  @property
  def width(self) -> int:
    """Columns of a tile."""
    return self.columns * self.consumers

  @property
  def planes(self) -> int:
    """Halves of float32 results that are stored at once.

    One of two takes half the shared memory: with wide tiles, a fourth stage.
    """
    return 2 if self.consumers == 1 else 1


def plan(tokens: int, choices: int, experts: int) -> Plan:
  """The default cut for this many tokens.

  A shared SwiGLU of few rows costs nothing beside the routed experts, as XLA
  launches it while the rows are routed; from some hundred on its own products
  take longer than its share of the kernels.

  A tile should hold an expert's rows at once (the weights would otherwise come
  a second time, though from the L2) without many empty columns: the mean of a
  uniform routing and two standard deviations.
  """
  blocks = _multiprocessors()
  if tokens <= _DENSE_TOKENS:
    return Plan(True, _DENSE_TOKENS, 1, blocks)
  mean = tokens * choices / experts
  wanted = mean + 2 * math.sqrt(mean)
  consumers = 1 if wanted <= TILE else 2
  columns = routing.round_up(math.ceil(wanted / consumers), routing.ALIGN)
  columns = min(_MAX_COLUMNS, columns)
  # Only wide tiles ask the L2 for so much that sharing pays.
  cluster = 2 if columns > TILE and blocks % 2 == 0 else 1
  return Plan(
    dense=False,
    columns=columns,
    consumers=consumers,
    blocks=blocks,
    cluster=cluster,
    takes_shared=tokens >= SHARED_TOKENS,
  )


def _multiprocessors() -> int:
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.num_cores if device else jax.devices()[0].core_count


@dataclasses.dataclass(frozen=True)
class Shape:
  """The op's sizes."""

  experts: int
  hidden: int
  inner: int
  tokens: int
  choices: int
  shared: int  # Experts that every token goes to.

  @property
  def front(self) -> int:
    """Rows for the tokens themselves, before those of routed experts."""
    return routing.round_up(self.tokens, routing.ALIGN) if self.shared else 0


@dataclasses.dataclass(frozen=True)
class Item:
  """One tile of work: 128 rows of weights, `width` columns."""

  expert: jax.Array  # The shared ones are -S..-1.
  tile: jax.Array  # Which 128 rows of weights.
  source: jax.Array | int  # First row of x.
  row: jax.Array  # First row of the activation and of the partial results.
  left: jax.Array  # Rows from there on that somebody asked for.


class Dense:
  """Items of the dense form: the n-th touched expert is the n-th bit set."""

  shared = 0

  def __init__(self, tables, shape, cut):
    self._ids, self._weights, *mask = tables
    self._shape, self._cut = shape, cut
    numbers = range(pl.cdiv(shape.experts, 32))
    self._words = [mask[0][w] if mask else self._word(w) for w in numbers]
    self._ends = []
    for word in self._words:
      end = self._ends[-1] if self._ends else jnp.int32(0)
      self._ends.append(end + routing.count_bits(word))
    self.number = self._ends[-1]

  def _word(self, number):
    """A word of the mask of a single token."""
    word = jnp.int32(0)
    for k in range(self._shape.choices):
      expert = self._ids[0, k]
      mine = (expert >> 5 == number) & (expert < self._shape.experts)
      bit = lax.shift_left(jnp.int32(1), expert & 31)
      word |= jnp.where(mine, bit, 0)
    return word

  def locate(self, work, tiles):
    """The item number `work` of `number` times `tiles`."""
    slot, tile = lax.div(work, tiles), lax.rem(work, tiles)
    bits, skip, expert = self._words[0], slot, jnp.int32(0)
    for w in range(1, len(self._words)):
      beyond = slot >= self._ends[w - 1]
      bits = jnp.where(beyond, self._words[w], bits)
      skip = jnp.where(beyond, slot - self._ends[w - 1], skip)
      expert = jnp.where(beyond, 32 * w, expert)
    for half in (16, 8, 4, 2, 1):  # The bit with `skip` others below it.
      below = routing.count_bits(bits & ((1 << half) - 1))
      upper = skip >= below
      skip = jnp.where(upper, skip - below, skip)
      shifted = lax.shift_right_logical(bits, jnp.int32(half))
      bits = jnp.where(upper, shifted, bits)
      expert = jnp.where(upper, expert + half, expert)
    columns = jnp.int32(self._cut.width)
    return Item(expert, tile, 0, slot * columns, columns)

  def column_weights(self, item, offset):
    """The weights of the item's columns from `offset` on, `[64, columns]`."""
    del offset  # One warpgroup has all the columns.
    shape = (TILE, self._cut.columns)
    column = plgpu.broadcasted_iota(
      jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA
    )
    weights = jnp.where(column < 0, 1.0, 0.0)
    for token in range(self._shape.tokens):
      weight = jnp.float32(0.0)
      for k in range(self._shape.choices):
        chosen = self._ids[token, k] == item.expert
        weight += jnp.where(chosen, self._weights[token, k], 0.0)
      weights = jnp.where(column == token, weight, weights)
    return weights


class Grouped:
  """Items of the grouped form: rows of the table of `routing.group`.

  A shared expert's tiles of rows are known without a table. Once its weights
  are in the L2 they ask the memory for nothing, so they are spread among those
  of the routed experts.
  """

  def __init__(self, tables, shape, cut):
    self._table, number, self._weights = tables
    self._shape, self._cut = shape, cut
    self._routed = number[0]
    self._parts = pl.cdiv(shape.tokens, cut.width)
    self.shared = shape.shared
    self.number = self.shared * self._parts + self._routed

  def locate(self, work, tiles):
    """The item number `work` of `number` times `tiles`."""
    if not self.shared:
      return self._item(*self._locate_routed(work, tiles))
    # A turn is one tile of a shared expert's weights for all rows, and then its
    # share of the routed experts' items.
    length = self._parts + lax.div(self._routed, jnp.int32(self.shared))
    turn, part = lax.div(work, length), lax.rem(work, length)
    turns = self.shared * tiles
    before = jnp.minimum(turn + 1, turns) * self._parts
    number, tile = lax.div(turn, tiles), lax.rem(turn, tiles)
    front = self._shape.front // routing.ALIGN
    tokens = self._shape.tokens
    mine = number - self.shared, tile, part, 0, number * front, tokens
    theirs = self._locate_routed(jnp.maximum(work - before, 0), tiles)
    is_mine = (turn < turns) & (part < self._parts)
    return self._item(
      *(jnp.where(is_mine, a, b) for a, b in zip(mine, theirs, strict=True))
    )

  def _locate_routed(self, work, tiles):
    """The arguments of `_item`."""
    entry = lax.div(work, tiles)
    expert, first, number, start, count = (
      self._table[entry, field] for field in range(5)
    )
    # An expert's tiles of rows come next to each other for every tile of its
    # weights, so that these are in the L2 from the second on.
    within = work - first * tiles
    part, tile = lax.rem(within, number), lax.div(within, number)
    front = self._shape.front // routing.ALIGN
    return expert, tile, part, front + start, self.shared * front + start, count

  def _item(self, expert, tile, part, source, row, count):
    """Of tile `part` of rows; their first ones in units of `ALIGN`."""
    width = self._cut.width
    # As a multiple, so that Mosaic sees that rows start where its tiles do.
    source, row = (
      (first + part * (width // routing.ALIGN)) * routing.ALIGN
      for first in (source, row)
    )
    return Item(expert, tile, source, row, count - part * width)

  def column_weights(self, item, offset):
    """The weights of the item's columns from `offset` on, `[64, columns]`."""
    columns = self._cut.columns
    weights = plgpu.load(
      self._weights.at[pl.ds(item.source + offset, columns)],
      layout=plgpu.Layout.WGMMA.reduce(0),
      optimized=False,
    )
    return lax.broadcast_in_dim(weights, (TILE, columns), (1,))
