"""The work of the Mosaic kernels, cut into numbered tiles.

`Dense` and `Grouped` are the two ways to choose the columns of a tile, see
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

from pallas_kernels import _bits
from pallas_kernels._padding import round_up
from pallas_kernels.expert_mlp.dispatch import ALIGN

TILE = 64  # Rows of weights, and steps along the sum, of a swizzled tile.
_DENSE_TOKENS = 16
# The least number of tokens at which the kernels compute a shared SwiGLU. In a
# whole step that was slower at 65 rows and faster at 257; in between nothing
# was measured.
SHARED_TOKENS = 128
_MAX_COLUMNS = 128  # Two float32 accumulators of it fill 128 registers.


@dataclasses.dataclass(frozen=True)
class TileConfig:
  """How the work of an op of one static shape is cut into tiles.

  Attributes:
    dense: whether the columns of every tile are all the tokens.
    columns: number of columns that one multiplying warpgroup has.
    consumers: number of multiplying warpgroups of a block, 1 or 2.
    blocks: number of blocks of the grid, one a multiprocessor.
    stages: largest number of tiles of weights in flight.
    cluster: number of blocks that take neighbouring tiles of weights at the
      same time and load the columns, which they share, once, by multicast.
    takes_shared: whether the kernels compute a shared SwiGLU, as more experts.
    groups: number of warpgroups of a block of `mosaic_dispatch`.
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
    """Number of columns of a tile."""
    return self.columns * self.consumers

  @property
  def planes(self) -> int:
    """How many of the two halves of float32 results are stored at once.

    One at a time takes half the shared memory, which leaves wide tiles a fourth
    stage.
    """
    return 2 if self.consumers == 1 else 1


def tile_config(tokens: int, choices: int, experts: int) -> TileConfig:
  """The default sizes for this many tokens.

  A shared SwiGLU of few rows costs no time, as XLA runs it while the rows are
  routed; from some hundred rows on its own products take longer than its share
  of the kernels.

  A tile should hold all rows of an expert (or the weights are loaded twice,
  though the second time from the L2) with few empty columns. So it has the mean
  number under uniform routing, plus two standard deviations.
  """
  blocks = _multiprocessors()
  if tokens <= _DENSE_TOKENS:
    return TileConfig(True, _DENSE_TOKENS, 1, blocks)
  mean = tokens * choices / experts
  wanted = mean + 2 * math.sqrt(mean)
  consumers = 1 if wanted <= TILE else 2
  columns = round_up(math.ceil(wanted / consumers), ALIGN)
  columns = min(_MAX_COLUMNS, columns)
  # Only wide tiles ask the L2 for so much that sharing pays.
  cluster = 2 if columns > TILE and blocks % 2 == 0 else 1
  return TileConfig(
    dense=False,
    columns=columns,
    consumers=consumers,
    blocks=blocks,
    cluster=cluster,
    takes_shared=tokens >= SHARED_TOKENS,
  )


def _multiprocessors() -> int:
  """Number of multiprocessors of the device that is compiled for."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.num_cores if device else jax.devices()[0].core_count


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of the op's arguments."""

  experts: int
  hidden: int
  inner: int
  tokens: int
  choices: int
  shared: int  # Number of shared experts, which every token has.

  @property
  def front(self) -> int:
    """Rows of all tokens for shared experts, before those of routed ones."""
    return round_up(self.tokens, ALIGN) if self.shared else 0


@dataclasses.dataclass(frozen=True)
class Item:
  """One tile of work: 128 rows of weights, `width` columns."""

  expert: jax.Array  # Shared experts are -S..-1.
  tile: jax.Array  # Which 128 rows of the expert's weights.
  source: jax.Array | int  # First row of x.
  row: jax.Array  # First row of the activation and of the partial results.
  left: jax.Array  # Number of rows from there on that are results.


class Dense:
  """Items of the dense form: the n-th active expert is the n-th bit set."""

  shared = 0

  def __init__(self, tables, shape, config):
    self._ids, self._weights, *mask = tables
    self._shape, self._cut = shape, config
    numbers = range(pl.cdiv(shape.experts, 32))
    self._words = [mask[0][w] if mask else self._word(w) for w in numbers]
    self._ends = []
    for word in self._words:
      end = self._ends[-1] if self._ends else jnp.int32(0)
      self._ends.append(end + _bits.count_bits(word))
    self.number = self._ends[-1]

  def _word(self, number):
    """One word of the set of a single token's experts."""
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
    for half in (16, 8, 4, 2, 1):  # Finds the bit with `skip` others below it.
      below = _bits.count_bits(bits & ((1 << half) - 1))
      upper = skip >= below
      skip = jnp.where(upper, skip - below, skip)
      shifted = lax.shift_right_logical(bits, jnp.int32(half))
      bits = jnp.where(upper, shifted, bits)
      expert = jnp.where(upper, expert + half, expert)
    columns = jnp.int32(self._cut.width)
    return Item(expert, tile, 0, slot * columns, columns)

  def column_weights(self, item, offset):
    """The weights of the item's columns from `offset` on, `[64, columns]`."""
    del offset  # It is 0: one warpgroup has all the columns.
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
  """Items of the grouped form: rows of the table of `dispatch.dispatch`.

  A shared expert's tiles of rows are known without a table. All but the first
  find its weights in the L2 and leave the memory idle, so they are spread among
  the tiles of the routed experts.
  """

  def __init__(self, tables, shape, config):
    self._table, number, self._weights = tables
    self._shape, self._cut = shape, config
    self._routed = number[0]
    self._parts = pl.cdiv(shape.tokens, config.width)
    self.shared = shape.shared
    self.number = self.shared * self._parts + self._routed

  def locate(self, work, tiles):
    """The item number `work` of `number` times `tiles`."""
    if not self.shared:
      return self._item(*self._locate_routed(work, tiles))
    # Items come in turns: one tile of a shared expert's weights for all rows,
    # then a share of the routed experts' items.
    length = self._parts + lax.div(self._routed, jnp.int32(self.shared))
    turn, part = lax.div(work, length), lax.rem(work, length)
    turns = self.shared * tiles
    before = jnp.minimum(turn + 1, turns) * self._parts
    number, tile = lax.div(turn, tiles), lax.rem(turn, tiles)
    front = self._shape.front // ALIGN
    tokens = self._shape.tokens
    mine = number - self.shared, tile, part, 0, number * front, tokens
    theirs = self._locate_routed(jnp.maximum(work - before, 0), tiles)
    is_mine = (turn < turns) & (part < self._parts)
    return self._item(
      *(jnp.where(is_mine, a, b) for a, b in zip(mine, theirs, strict=True))
    )

  def _locate_routed(self, work, tiles):
    """The arguments of `_item` for one of the routed experts' items."""
    entry = lax.div(work, tiles)
    expert, first, number, start, count = (
      self._table[entry, field] for field in range(5)
    )
    # An expert's tiles of rows come next to each other for every tile of its
    # weights, so that these are in the L2 from the second on.
    within = work - first * tiles
    part, tile = lax.rem(within, number), lax.div(within, number)
    front = self._shape.front // ALIGN
    return expert, tile, part, front + start, self.shared * front + start, count

  def _item(self, expert, tile, part, source, row, count):
    """The item of tile `part` of rows; first rows are in units of `ALIGN`."""
    width = self._cut.width
    # As a multiple, so that Mosaic sees that rows start where its tiles do.
    source, row = (
      (first + part * (width // ALIGN)) * ALIGN for first in (source, row)
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
