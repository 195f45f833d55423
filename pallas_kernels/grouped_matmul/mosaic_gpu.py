"""The routed experts on a Hopper GPU, in Pallas Mosaic GPU.

Two products, `h = silu(x gate^T) * (x up^T)` and `y = w * (h down^T)`, each one
persistent kernel over the multiprocessors. Weights are the left operand of
wgmma (128 of their rows a tile) and rows of x its columns, so that a tile costs
the same for one row as for sixteen, and every touched weight is read once.

Two ways to give a tile its columns:

* *dense*, for a few tokens: the columns are all the tokens, whoever chose the
  expert. Columns do not see each other, so what nobody asked for is never read
  again, and nothing needs to be gathered.
* *grouped*: the (token, expert) pairs are sorted by expert, each expert's rows
  start at a multiple of `_ALIGN`, and a tile takes the next `columns` of them.

An output element is the sum over its whole row of weights in steps of 16, from
the first to the last, in the tensor core's float32 accumulator, whatever the
number of columns: its bits do not depend on who else is in the tile. The
weighted partial results of a token are then added by XLA in order of expert.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.quantized import QuantizedArray

__all__ = ('expert_mlp', 'supported')

_TILE = 64  # Rows of weights, and steps along the sum, of one swizzled tile.
_ALIGN = 16  # Columns that are stored together, or not at all.
_DENSE_TOKENS = 16
_MAX_COLUMNS = 128  # Two float32 accumulators of it fill 128 registers.
_SHARED_BYTES = 232448 - 2048  # Of one block; the rest is for barriers.
_MAX_EXPERTS = 384
_MAX_CHOICES = 8


@dataclasses.dataclass(frozen=True)
class Plan:
  """How an op of one static shape is cut.

  Attributes:
    dense: whether the columns are all the tokens.
    columns: how many columns one consuming warpgroup takes.
    consumers: how many consuming warpgroups a block has.
    fused: whether both products are one kernel, which then waits for single
      experts' activations instead of the end of a launch.
    blocks: blocks of the grid, normally one a multiprocessor.
    stages: tiles of weights in flight, at most.
    cluster: blocks that take neighbouring tiles of weights at the same time and
      load the columns they share only once, by multicast.
    planes: halves of float32 results that are stored at once, 1 or 2. One needs
      half the shared memory.
  """

  dense: bool
  columns: int
  consumers: int
  fused: bool
  blocks: int
  stages: int = 16
  cluster: int = 1
  planes: int = 2

  @property
  def width(self) -> int:
    """Columns of a tile."""
    return self.columns * self.consumers


def supported(
  x: jax.Array,
  gate_up: jax.Array | QuantizedArray,
  down: jax.Array | QuantizedArray,
  expert_ids: jax.Array,
) -> str | None:
  """Why these shapes and dtypes cannot run here, or None if they can."""
  if isinstance(gate_up, QuantizedArray) or isinstance(down, QuantizedArray):
    return 'quantised weights'
  experts, inner2, hidden = gate_up.shape
  choices = expert_ids.shape[1]
  if x.dtype != jnp.bfloat16:
    return f'x: {x.dtype}; tensor cores take bfloat16 (float32 would be tf32)'
  if hidden % _TILE or (inner2 // 2) % _TILE:
    return f'gate_up: {gate_up.shape}; both sizes must be multiples of {_TILE}'
  if experts > _MAX_EXPERTS:
    return f'gate_up: {experts} experts; at most {_MAX_EXPERTS}'
  if not 1 <= choices <= _MAX_CHOICES:
    return f'expert_ids: {choices} a token; 1 to {_MAX_CHOICES}'
  if x.shape[0] == 0:
    return 'x: no rows'
  return None


def plan(
  tokens: int, choices: int, experts: int, blocks: int | None = None
) -> Plan:
  """The default cut for this many tokens.

  A tile should hold an expert's rows at once (the weights would otherwise come
  a second time, though from the L2) without many empty columns: the mean of a
  uniform routing and two standard deviations.
  """
  blocks = blocks or _multiprocessors()
  if tokens <= _DENSE_TOKENS:
    return Plan(True, _DENSE_TOKENS, 1, fused=True, blocks=blocks)
  mean = tokens * choices / experts
  wanted = mean + 2 * math.sqrt(mean)
  consumers = 1 if wanted <= 64 else 2
  columns = min(_MAX_COLUMNS, _round_up(math.ceil(wanted / consumers), 16))
  return Plan(False, columns, consumers, fused=False, blocks=blocks)


def expert_mlp(
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  expert_ids: jax.Array,
  expert_weights: jax.Array,
) -> jax.Array:
  """See `pallas_kernels.grouped_matmul.api.expert_mlp`; bfloat16 only."""
  return _differentiable(x, gate_up, down, expert_ids, expert_weights)


@jax.custom_vjp
def _differentiable(x, gate_up, down, expert_ids, expert_weights):
  return run(x, gate_up, down, expert_ids, expert_weights)


def _forward(*inputs):
  return run(*inputs), inputs


def _backward(inputs, cotangent):
  """The reference's derivative: training is not what the kernel is for."""
  x, gate_up, down, expert_ids, expert_weights = inputs

  def primal(x, gate_up, down, expert_weights):
    return reference.expert_mlp(x, gate_up, down, expert_ids, expert_weights)

  _, vjp = jax.vjp(primal, x, gate_up, down, expert_weights)
  dx, dgate_up, ddown, dweights = vjp(cotangent)
  return dx, dgate_up, ddown, None, dweights


_differentiable.defvjp(_forward, _backward)


def run(
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  expert_ids: jax.Array,
  expert_weights: jax.Array,
  cut: Plan | None = None,
  interpret: Any = None,
) -> jax.Array:
  """`expert_mlp` with a given cut, or in the interpreter.

  Raises:
    ValueError: shapes or dtypes that are not supported.
  """
  if reason := supported(x, gate_up, down, expert_ids):
    raise ValueError(reason)
  experts, inner2, hidden = gate_up.shape
  inner = inner2 // 2
  cut = cut or plan(*expert_ids.shape, experts)
  # Free views under which both products take two tiles of 64 weights rows as
  # two neighbours along the first axis: gate and up, or rows 0.. and 64..
  gate_up = gate_up.reshape(experts * 2, inner, hidden)
  down = down.reshape(experts * (hidden // _TILE), _TILE, inner)
  expert_ids, expert_weights = _merge_repeats(
    expert_ids, expert_weights, experts
  )
  if cut.dense:
    routing = _dense_routing(expert_ids, expert_weights, experts)
    if 8 < x.shape[0] < cut.width:  # More than one tile of 8 must be whole.
      x = jnp.pad(x, ((0, cut.width - x.shape[0]), (0, 0)))
    slots = min(experts, expert_ids.size)
    rows = slots * cut.width
    positions = _dense_positions(expert_ids, routing[0], experts, cut)
  else:
    routing, x, positions = _group(x, expert_ids, expert_weights, experts, cut)
    rows = x.shape[0]
  shape = _Shape(experts, hidden, inner, rows, *expert_ids.shape)
  calls = functools.partial(_call, shape, cut, interpret)
  if cut.fused:
    _, partial_sums = calls(_fused_body, routing, (x, gate_up, down))
  else:
    activation = calls(_up_body, routing, (x, gate_up))
    partial_sums = calls(_down_body, routing, (activation, down))
  return _combine(partial_sums, positions).astype(jnp.bfloat16)


# --- Routing: which columns, which experts -----------------------------------


def _merge_repeats(ids, weights, experts):
  """Ids outside 0..E-1 become E, as do repeats, whose weights move forward."""
  ids = jnp.where((ids >= 0) & (ids < experts), ids, experts)
  choices = ids.shape[1]
  columns = [ids[:, k] for k in range(choices)]
  merged_ids, merged_weights = [], []
  # Unrolled, as XLA then needs no reductions and fuses it with what follows.
  for k in range(choices):
    weight = weights[:, k]
    repeated = jnp.zeros(weight.shape, bool)
    for other in range(choices):
      same = columns[other] == columns[k]
      if other < k:
        repeated |= same
      elif other > k:
        weight += jnp.where(same, weights[:, other], 0.0)
    merged_ids.append(jnp.where(repeated, experts, columns[k]))
    merged_weights.append(weight)
  return jnp.stack(merged_ids, 1), jnp.stack(merged_weights, 1)


def _dense_routing(ids, weights, experts):
  """The set of touched experts as bits, and the choices themselves."""
  flat = ids.reshape(-1)
  words = jnp.arange(pl.cdiv(experts, 32), dtype=jnp.int32)
  bits = jnp.where(flat < experts, jnp.left_shift(jnp.int32(1), flat & 31), 0)
  mine = (flat >> 5)[:, None] == words[None, :]
  mask = lax.reduce(
    jnp.where(mine, bits[:, None], 0), jnp.int32(0), lax.bitwise_or, (0,)
  )
  return mask, ids, weights


def _dense_positions(ids, mask, experts, cut):
  """Rows of the partial results that a token adds, in order of expert."""
  slot = jnp.zeros(ids.shape, jnp.int32)
  for w in range(mask.shape[0]):
    below = jnp.clip(ids - 32 * w, 0, 32)
    slot += _count_bits(mask[w] & _low_bits(below))
  token = lax.broadcasted_iota(jnp.int32, ids.shape, 0)
  rows = slot * cut.width + token
  return _in_expert_order(ids, rows, experts)


def _low_bits(count):
  """An int32 with the lowest `count` (0..32) bits set."""
  half = count >> 1  # In two shifts, as one by 32 is undefined.
  return ~lax.shift_left(
    lax.shift_left(jnp.full_like(count, -1), half), count - half
  )


def _count_bits(x):
  """Bits set in an int32; Mosaic has no population count."""
  shift = lambda v, n: lax.shift_right_logical(v, jnp.int32(n))
  x = x - (shift(x, 1) & 0x55555555)
  x = (x & 0x33333333) + (shift(x, 2) & 0x33333333)
  x = (x + shift(x, 4)) & 0x0F0F0F0F
  return shift(x * 0x01010101, 24)


def _in_expert_order(ids, rows, experts):
  """`rows` `[T, K]` ordered by the expert; -1 behind the last."""
  choices = ids.shape[1]
  columns = [ids[:, k] for k in range(choices)]
  ordered = [jnp.full_like(columns[0], -1) for _ in range(choices)]
  for k in range(choices):
    before = sum(
      (columns[other] < columns[k]).astype(jnp.int32)
      for other in range(choices)
    )
    for place in range(choices):
      here = (before == place) & (columns[k] < experts)
      ordered[place] = jnp.where(here, rows[:, k], ordered[place])
  return ordered


def _group(x, ids, weights, experts, cut):
  """Sorts the pairs by expert.

  Counting needs no sort: a pair's place is its expert's start, and how many
  pairs before it, in its chunk of 128 and in earlier chunks, go there too.

  Returns:
    The kernels' tables: items `[Q, 5]` int32 (expert, first item of the expert,
    its number of items, its first row in units of 16, its rows), their number `[1]` int32,
    the weights of the rows, `[R + width]` float32.
    Then the rows of x in that order, `[R, H]`; and every token's rows of it.
  """
  tokens, choices = ids.shape
  pairs, chunk = ids.size, 128
  flat = ids.reshape(-1)
  keys = jnp.pad(flat, (0, -pairs % chunk), constant_values=experts)
  keys = keys.reshape(-1, chunk)
  chunks = keys.shape[0]
  every = jnp.arange(experts, dtype=jnp.int32)
  before = jnp.tri(chunk, k=-1, dtype=bool)
  same = keys[:, :, None] == keys[:, None, :]
  rank = jnp.sum(same & before[None], axis=2, dtype=jnp.int32)
  rank = rank.reshape(-1)[:pairs]
  counts = keys[:, :, None] == every[None, None]
  counts = jnp.sum(counts, axis=1, dtype=jnp.int32)
  earlier = jnp.tri(chunks, k=-1, dtype=bool)
  base = jnp.sum(jnp.where(earlier[:, :, None], counts[None], 0), axis=1)
  count = jnp.sum(counts, axis=0)
  start = _sums_before(-(-count // _ALIGN))
  tiles = -(-count // cut.width)
  first = _sums_before(tiles)
  capacity = pairs + min(experts, pairs) * (_ALIGN - 1)
  capacity = _round_up(capacity, _ALIGN)
  key = jnp.minimum(flat, experts - 1)
  base += (start * _ALIGN)[None]
  place = base[jnp.arange(pairs, dtype=jnp.int32) // chunk, key] + rank
  place = jnp.where(flat < experts, place, capacity)
  pair = jnp.zeros((capacity,), jnp.int32)
  pair = pair.at[place].set(
    jnp.arange(pairs, dtype=jnp.int32), mode='drop', unique_indices=True
  )
  items = jnp.arange(min(experts, pairs) + pairs // cut.width, dtype=jnp.int32)
  passed = (first + tiles)[None] <= items[:, None]
  owner = jnp.sum(passed, axis=1, dtype=jnp.int32)
  owner = jnp.minimum(owner, experts - 1)
  table = jnp.stack([every, first, tiles, start, count], axis=1)[owner]
  row_weights = jnp.pad(weights.reshape(-1)[pair], (0, cut.width))
  routing = (table, jnp.sum(tiles, keepdims=True), row_weights)
  places = _in_expert_order(ids, place.reshape(ids.shape), experts)
  return routing, x[pair // choices], lax.optimization_barrier(places)


def _sums_before(x):
  """Exclusive sums of a short int32 vector, in one XLA fusion."""
  before = jnp.tri(x.shape[0], k=-1, dtype=bool)
  return jnp.sum(jnp.where(before, x[None], 0), axis=1, dtype=jnp.int32)


def _combine(partial_sums, positions):
  """Adds a token's rows, in the order given, in float32.

  Args:
    partial_sums: `[2, R, H]` int16, the upper and lower halves of float32.
    positions: for every choice, `[T]` int32 rows, or -1 for none.

  Returns:
    `[T, H]` float32.
  """
  total = jnp.zeros((positions[0].shape[0], partial_sums.shape[2]), jnp.float32)
  for position in positions:
    row = jnp.maximum(position, 0)
    upper = partial_sums[0][row].astype(jnp.int32) << 16
    lower = partial_sums[1][row].astype(jnp.int32) & 0xFFFF
    value = lax.bitcast_convert_type(upper | lower, jnp.float32)
    total += jnp.where((position >= 0)[:, None], value, 0.0)
  return total


# --- Inside the kernels ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shape:
  experts: int
  hidden: int
  inner: int
  rows: int  # Of the activation and the partial results.
  tokens: int
  choices: int


@dataclasses.dataclass(frozen=True)
class _Item:
  """One tile of work: 128 rows of weights, `width` columns."""

  expert: jax.Array
  tile: jax.Array  # Which 128 rows of weights.
  source: jax.Array | int  # First row of x.
  row: jax.Array  # First row of the activation and of the partial results.
  left: jax.Array  # Rows from there on that somebody asked for.


class _Dense:
  """Items of the dense form: an expert is a bit of the mask."""

  def __init__(self, refs, shape, cut):
    mask, self._ids, self._weights = refs
    self._shape, self._cut = shape, cut
    self._words = [mask[w] for w in range(mask.shape[0])]
    self._ends = []
    for word in self._words:
      end = self._ends[-1] if self._ends else jnp.int32(0)
      self._ends.append(end + _count_bits(word))
    self.number = self._ends[-1]

  def locate(self, work, tiles):
    slot, tile = lax.div(work, tiles), lax.rem(work, tiles)
    bits, skip, expert = self._words[0], slot, jnp.int32(0)
    for w in range(1, len(self._words)):
      beyond = slot >= self._ends[w - 1]
      bits = jnp.where(beyond, self._words[w], bits)
      skip = jnp.where(beyond, slot - self._ends[w - 1], skip)
      expert = jnp.where(beyond, 32 * w, expert)
    for half in (16, 8, 4, 2, 1):  # The bit with `skip` others below it.
      below = _count_bits(bits & ((1 << half) - 1))
      upper = skip >= below
      skip = jnp.where(upper, skip - below, skip)
      bits = jnp.where(
        upper, lax.shift_right_logical(bits, jnp.int32(half)), bits
      )
      expert = jnp.where(upper, expert + half, expert)
    columns = jnp.int32(self._cut.width)
    return _Item(expert, tile, 0, slot * columns, columns)

  def column_weights(self, item, offset):
    del offset
    shape = (_TILE, self._cut.columns)
    column = plgpu.broadcasted_iota(
      jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA
    )
    weights = jnp.where(column < 0, 1.0, 0.0)
    for token in range(self._shape.tokens):
      weight = jnp.float32(0.0)
      for k in range(self._shape.choices):
        chosen = self._ids[token, k] == item.expert
        weight = jnp.where(chosen, self._weights[token, k], weight)
      weights = jnp.where(column == token, weight, weights)
    return weights


class _Grouped:
  """Items of the grouped form: rows of the table."""

  def __init__(self, refs, shape, cut):
    del shape
    self._table, number, self._weights = refs
    self._cut = cut
    self.number = number[0]

  def locate(self, work, tiles):
    entry = lax.div(work, tiles)
    expert, first, number, start, count = (
      self._table[entry, field] for field in range(5)
    )
    # An expert's tiles of rows come next to each other for every tile of its
    # weights, so that these are in the L2 from the second on.
    within = work - first * tiles
    part, tile = lax.rem(within, number), lax.div(within, number)
    # As a multiple, so that Mosaic sees that rows start where its tiles do.
    row = (start + part * (self._cut.width // _ALIGN)) * _ALIGN
    return _Item(expert, tile, row, row, count - part * self._cut.width)

  def column_weights(self, item, offset):
    columns = self._cut.columns
    weights = plgpu.load(
      self._weights.at[pl.ds(item.row + offset, columns)],
      layout=plgpu.Layout.WGMMA.reduce(0),
      optimized=False,
    )
    return lax.broadcast_in_dim(weights, (_TILE, columns), (1,))


@dataclasses.dataclass(frozen=True)
class _Product:
  """One of the two products, as the loops below need it."""

  tiles: int  # Of 128 rows of weights, for one expert.
  steps: int  # Of 64 along the sum.
  weights: Any
  rows: Any
  first: Callable[[_Item], Any]  # Where a tile is: first of two in weights,
  within: Callable[[_Item], Any]  # row in each of them,
  row: Callable[[_Item], Any]  # and row of the right operand.
  finish: Callable[..., None]


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The tiles in flight and who waits for whom.

  `full` is completed by the copies into a stage; `free[..., role]` by the
  consumers, for each loading warpgroup separately.
  """

  cut: Plan
  items: Any
  weights: Any  # [stages, 2, 64, 64]
  rows: Any  # [stages, width, 64]
  full: Any
  free: Any

  def each(self, product, body, step):
    """`body(step, item)` on this block's items; returns the next step."""
    cluster = self.cut.cluster
    block, blocks = lax.axis_index('block'), self.cut.blocks // cluster
    tiles = jnp.int32(pl.cdiv(product.tiles, cluster))
    number = self.items.number * tiles
    number = lax.div(number - block + blocks - 1, jnp.int32(blocks))

    def one(i, step):
      item = self.items.locate(block + i * blocks, tiles)
      if cluster > 1:
        tile = item.tile * cluster + lax.axis_index('member')
        item = dataclasses.replace(item, tile=tile)
      body(step, item)
      return step + product.steps

    return lax.fori_loop(0, number, one, step)

  def stage(self, step):
    return lax.rem(step, jnp.int32(self.weights.shape[0]))

  def load(self, product, step, *, role, weights, rows):
    """One loading warpgroup's part of a product."""

    def item_body(step, item):
      row = product.row(item)
      # A cluster's last block may be one too many: it loads, for the others'
      # sake, but stores nothing.
      inside = jnp.minimum(item.tile, product.tiles - 1)
      item = dataclasses.replace(item, tile=inside)
      first, within = product.first(item), product.within(item)

      def one(k, _):
        stage = self.stage(step + k)
        plgpu.barrier_wait(self.free.at[self._free(stage, role)])
        along = pl.ds(k * _TILE, _TILE)
        if weights:
          plgpu.copy_gmem_to_smem(
            product.weights.at[pl.ds(first, 2), pl.ds(within, _TILE), along],
            self.weights.at[stage],
            self.full.at[stage],
          )
        if rows:
          plgpu.copy_gmem_to_smem(
            product.rows.at[pl.ds(row, self.cut.width), along],
            self.rows.at[stage],
            self.full.at[stage],
            collective_axes='member' if self.cut.cluster > 1 else None,
          )

      lax.fori_loop(0, product.steps, one, None)

    return self.each(product, item_body, step)

  def _free(self, stage, role):
    return stage + role * self.weights.shape[0]

  def release(self, step):
    stage = self.stage(step)
    for role in range(self.free.shape[0] // self.weights.shape[0]):
      plgpu.barrier_arrive(self.free.at[self._free(stage, role)])

  def drain(self, role):
    """Waits until every stage is free, and nothing is left in flight."""

    def one(stage, _):
      plgpu.barrier_wait(self.free.at[self._free(stage, role)])

    lax.fori_loop(0, self.weights.shape[0], one, None)

  def prime(self):
    """Declares every stage free; one consumer's part."""
    lax.fori_loop(
      0, self.weights.shape[0], lambda stage, _: self.release(stage), None
    )

  def consume(self, product, step, me):
    """One consuming warpgroup's part of a product."""
    columns = self.cut.columns
    offset = me * columns

    def multiply(step, item):
      def scope(low, high):
        def one(k, _):
          stage = self.stage(step + k)
          plgpu.barrier_wait(self.full.at[stage])
          right = self.rows.at[stage, pl.ds(offset, columns)]
          for half, acc in enumerate((low, high)):
            plgpu.wgmma(
              acc, self.weights.at[stage, half], right.transpose((1, 0))
            )
          plgpu.wgmma_wait(2)  # These two run on; those before are done.
          pl.when(k > 0)(lambda: self.release(step + k - 1))

        lax.fori_loop(0, product.steps, one, None)
        return low[...], high[...]

      acc = plgpu.ACC((_TILE, columns), jnp.float32)
      low, high = pl.run_scoped(scope, acc, acc)
      self.release(step + product.steps - 1)
      finish = lambda: product.finish(item, offset, low, high)
      if self.cut.cluster == 1:
        finish()
      else:
        pl.when(item.tile < product.tiles)(finish)

    def skip(step, item):
      del item

      def one(k, _):
        plgpu.barrier_wait(self.full.at[self.stage(step + k)])
        self.release(step + k)

      lax.fori_loop(0, product.steps, one, None)

    def item_body(step, item):
      if self.cut.consumers == 1:
        multiply(step, item)
      else:
        asked = item.left > offset
        pl.when(asked)(lambda: multiply(step, item))
        pl.when(jnp.logical_not(asked))(lambda: skip(step, item))

    return self.each(product, item_body, step)


def _store(cut, buffer, item, offset, out, column):
  """Copies the buffer's rows that somebody asked for to `out`, both [n, r, 64].

  The stores are not waited for: the next use of the buffer does that.
  """
  plgpu.commit_smem()
  for start in range(0, cut.columns, _ALIGN):

    @pl.when(offset + start < item.left)
    def _(start=start):
      rows = pl.ds(item.row + offset + start, _ALIGN)
      for plane in range(buffer.shape[0]):
        plgpu.copy_smem_to_gmem(
          buffer.at[plane, pl.ds(start, _ALIGN)],
          out.at[plane, rows, pl.ds(column, _TILE)],
        )


def _up_product(cut, shape, gate_up, x, h, buffer, after=None):
  """h = silu(x gate^T) * (x up^T), in bfloat16."""

  def finish(item, offset, gate, up):
    mine = buffer.at[lax.div(offset, cut.columns)]
    value = gate / (1.0 + jnp.exp(-gate)) * up
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mine.at[0].transpose((1, 0))[...] = value.astype(jnp.bfloat16)
    _store(cut, mine, item, offset, h, item.tile * _TILE)
    if after is not None:
      after(item)

  return _Product(
    tiles=shape.inner // _TILE,
    steps=shape.hidden // _TILE,
    weights=gate_up,
    rows=x,
    first=lambda item: item.expert * 2,
    within=lambda item: item.tile * _TILE,
    row=lambda item: item.source,
    finish=finish,
  )


def _down_product(cut, shape, down, h, out, buffer, items):
  """Partial results w * (h down^T), float32 in two halves of 16 bits.

  Registers hold them transposed, and only 16-bit values can be transposed on
  the way to shared memory.
  """
  across = shape.hidden // _TILE

  def finish(item, offset, low, high):
    mine = buffer.at[lax.div(offset, cut.columns)]
    weights = items.column_weights(item, offset)
    for half, value in enumerate((low, high)):
      column = item.tile * 2 + half

      def store(value=value, column=column):
        bits = lax.bitcast_convert_type(value * weights, jnp.int32)
        halves = ((bits >> 16).astype(jnp.int16), bits.astype(jnp.int16))
        for first in range(0, 2, cut.planes):
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          for plane in range(cut.planes):
            mine.at[plane].transpose((1, 0))[...] = halves[first + plane]
          planes = out.at[pl.ds(first, cut.planes)]
          _store(cut, mine, item, offset, planes, column * _TILE)

      # An odd number of tiles leaves the last item's upper half outside.
      pl.when(column < across)(store)

  return _Product(
    tiles=pl.cdiv(across, 2),
    steps=shape.inner // _TILE,
    weights=down,
    rows=h,
    first=lambda item: item.expert * across + item.tile * 2,
    within=lambda item: 0,
    row=lambda item: item.row,
    finish=finish,
  )


def _up_body(shape, cut, refs, h, scratch):
  *routing, x, gate_up = refs
  ring, buffer = _ring(shape, cut, routing, scratch)
  product = _up_product(cut, shape, gate_up, x, h, buffer)
  _run_ring(ring, [product])


def _down_body(shape, cut, refs, out, scratch):
  *routing, h, down = refs
  ring, buffer = _ring(shape, cut, routing, scratch)
  h = h.at[0]
  product = _down_product(cut, shape, down, h, out, buffer, ring.items)
  _run_ring(ring, [product])


def _fused_body(shape, cut, refs, outs, scratch):
  """Both products; the second waits for single experts' activations.

  All blocks are resident (there is one a multiprocessor), and none waits before
  its part of the first product is done.
  """
  *routing, x, gate_up, down = refs
  h, out = outs
  scratch, h_buffer = scratch[:-1], scratch[-1]
  ring, buffer = _ring(shape, cut, routing, scratch)
  slots = shape.rows // cut.width
  done = pl.get_global(plgpu.SemaphoreType.REGULAR((slots,)))
  slot = lambda item: lax.div(item.row, jnp.int32(cut.width))

  def announce(item):
    plgpu.wait_smem_to_gmem(0)
    plgpu.semaphore_signal(done.at[slot(item)], memory_scope='gpu')

  up = _up_product(cut, shape, gate_up, x, h, h_buffer, after=announce)
  down_product = _down_product(
    cut, shape, down, h.at[0], out, buffer, ring.items
  )

  def row(item):
    plgpu.semaphore_wait(
      done.at[slot(item)], up.tiles, decrement=False, memory_scope='gpu'
    )
    return item.row

  _run_ring(ring, [up, down_product], row)


def _run_ring(ring, products, awaited_row=None):
  """Gives every warpgroup its part of the products, one after the other."""
  me = lax.axis_index('warpgroup')
  cut = ring.cut

  @pl.when(me < cut.consumers)
  def _():
    if cut.consumers > 1:
      plgpu.set_max_registers(232, action='increase')
    ring.prime()
    step = jnp.int32(0)
    for product in products:
      step = ring.consume(product, step, me)
    plgpu.wait_smem_to_gmem(0)

  # The activations' loads may have to wait: they then have a warpgroup of their
  # own, and the weights behind them are on their way meanwhile.
  roles = (
    [(True, True)] if awaited_row is None else [(True, False), (False, True)]
  )
  for role, (weights, rows) in enumerate(roles):

    @pl.when(me == cut.consumers + role)
    def _(role=role, weights=weights, rows=rows):
      if cut.consumers > 1:
        plgpu.set_max_registers(40, action='decrease')
      step = jnp.int32(0)
      for number, product in enumerate(products):
        if rows and number == 1:
          product = dataclasses.replace(product, row=awaited_row)
        step = ring.load(product, step, role=role, weights=weights, rows=rows)
      ring.drain(role)


def _ring(shape, cut, routing, scratch):
  weights, rows, full, free, buffer = scratch
  items = (_Dense if cut.dense else _Grouped)(routing, shape, cut)
  return _Ring(cut, items, weights, rows, full, free), buffer


def _call(shape, cut, interpret, body, routing, operands):
  """Launches one of the bodies."""
  bfloat16, int16 = jnp.bfloat16, jnp.int16
  h = jax.ShapeDtypeStruct((1, shape.rows, shape.inner), bfloat16)
  out = jax.ShapeDtypeStruct((2, shape.rows, shape.hidden), int16)
  h_buffer = plgpu.SMEM((cut.consumers, 1, cut.columns, _TILE), bfloat16)
  buffer = plgpu.SMEM((cut.consumers, cut.planes, cut.columns, _TILE), int16)
  fused = body is _fused_body
  out_type = (h, out) if fused else h if body is _up_body else out
  buffers = [h_buffer if body is _up_body else buffer]
  buffers += [h_buffer] * fused
  used = sum(math.prod(b.shape) * 2 for b in buffers)
  stage = (2 * _TILE + cut.width) * _TILE * 2
  stages = min(cut.stages, (_SHARED_BYTES - used) // stage)
  loaders = 2 if fused else 1
  free = {'num_arrivals': cut.consumers, 'num_barriers': stages * loaders}
  if cut.cluster > 1:
    free = plgpu.ClusterBarrier(collective_axes=('member',), **free)
  else:
    free = plgpu.Barrier(**free)
  scratch = [
    plgpu.SMEM((stages, 2, _TILE, _TILE), bfloat16),
    plgpu.SMEM((stages, cut.width, _TILE), bfloat16),
    plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    free,
    *buffers,
  ]
  inputs = len(routing) + len(operands)

  def kernel_body(*refs):
    outs = refs[inputs : inputs + 1 + fused]
    body(
      shape,
      cut,
      refs[:inputs],
      outs if fused else outs[0],
      refs[inputs + 1 + fused :],
    )

  kernel = plgpu.kernel(
    kernel_body,
    out_type=out_type,
    scratch_types=scratch,
    grid=(cut.blocks // cut.cluster,),
    grid_names=('block',),
    cluster=(cut.cluster,) if cut.cluster > 1 else (),
    cluster_names=('member',) if cut.cluster > 1 else (),
    num_threads=cut.consumers + loaders,
    thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
    ),
    interpret=interpret,
  )
  return kernel(*routing, *operands)


def _multiprocessors() -> int:
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.num_cores if device else jax.devices()[0].core_count


def _round_up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple
