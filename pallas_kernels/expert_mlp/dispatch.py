"""Dispatch of rows to experts and combination of their results, in XLA.

Every function becomes one or a few small fusions, since launches cost more than
arithmetic here: it takes sums of one-hot comparisons, no sorts and no scans.
From a few tokens to about a thousand, a kernel does the work of `dispatch`, see
`mosaic_dispatch`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _bits
from pallas_kernels._padding import round_up

# Experts' rows start at multiples of it, and so many are stored together.
ALIGN = 16
_CHUNK = 128  # Pairs that are ranked by comparing each with each.

# Where a token's partial results are, in order of expert: for every choice, the
# rows `[T]` (or the first of T, if it is static), and whether there is one
# `[T]`.
CombineIndices = list[tuple[jax.Array | int, jax.Array]]


def sum_duplicates(
  ids: jax.Array, weights: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array]:
  """Makes the experts of a token distinct and adds up their weights.

  Args:
    ids: `[T, K]` int32, any values.
    weights: `[T, K]` float32.
    experts: E.

  Returns:
    Both again: ids outside 0..E-1 and repeats are E, and the first of equal
    ids has the sum of their weights.
  """
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


def active_experts(ids: jax.Array, experts: int) -> jax.Array:
  """The set of experts that occur in `ids`, as bits of int32 words.

  Args:
    ids: `[T, K]` int32 in 0..E.
    experts: E.

  Returns:
    `[ceil(E / 32)]` int32; bit e % 32 of word e // 32 is set iff e occurs.
  """
  flat = ids.reshape(-1)
  words = jnp.arange(-(-experts // 32), dtype=jnp.int32)
  bits = jnp.where(flat < experts, lax.shift_left(jnp.int32(1), flat & 31), 0)
  mine = (flat >> 5)[:, None] == words[None, :]
  return lax.reduce(
    jnp.where(mine, bits[:, None], 0), jnp.int32(0), lax.bitwise_or, (0,)
  )


def dense_combine_indices(
  ids: jax.Array, mask: jax.Array | None, experts: int, width: int
) -> CombineIndices:
  """The indices if token t's row of the n-th active expert is n width + t.

  Args:
    ids: `[T, K]` int32 of `sum_duplicates`.
    mask: `active_experts(ids)`; None if T is 1, when a token's n-th expert is
      the n-th active one.
    experts: E.
    width: rows that each expert has.
  """
  if mask is None:
    number = jnp.sum(ids < experts, axis=1)
    return [(k * width, number > k) for k in range(ids.shape[1])]
  slot = jnp.zeros(ids.shape, jnp.int32)
  for w in range(mask.shape[0]):
    slot += _bits.count_bits(
      mask[w] & _bits.low_bits(jnp.clip(ids - 32 * w, 0, 32))
    )
  token = lax.broadcasted_iota(jnp.int32, ids.shape, 0)
  return _in_expert_order(ids, slot * width + token, experts)


def shared_combine_indices(
  number: int, rows: int, tokens: int
) -> CombineIndices:
  """The indices if token t's row of the n-th shared expert is n rows + t."""
  return [(n * rows, jnp.ones((tokens,), bool)) for n in range(number)]


def _in_expert_order(ids, rows, experts) -> CombineIndices:
  """`rows [T, K]` as indices, every token's in the order of its experts."""
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
  return [(jnp.maximum(row, 0), row >= 0) for row in ordered]


def capacities(pairs: int, experts: int, width: int) -> tuple[int, int]:
  """R and Q of `dispatch`: how many rows and table entries it has at most."""
  busy = min(experts, pairs)
  rows = round_up(pairs + busy * (ALIGN - 1), ALIGN)
  return rows, busy + pairs // width


def dispatch(
  x: jax.Array, ids: jax.Array, weights: jax.Array, experts: int, width: int
) -> tuple[tuple[jax.Array, ...], jax.Array, CombineIndices]:
  """Copies every token's row once for each of its experts, sorted by expert.

  Counting replaces the sort: a (token, expert) pair comes at its expert's first
  row plus the number of pairs before it, in its chunk of 128 and in earlier
  chunks, that have this expert too.

  Args:
    x: `[T, H]`.
    ids: `[T, K]` int32, any values.
    weights: `[T, K]` float32.
    experts: E.
    width: rows of a tile.

  Returns:
    The kernels' tables: tiles of rows, `[Q, 5]` int32 (expert, first tile of
    the expert, its number of tiles, its first row in units of `ALIGN`, its
    number of rows); how many there are, `[1]` int32; the rows' weights,
    `[R + width]` float32.
    The rows of x in that order, `[R, H]`.
    The indices by which `combine` finds a token's results.
  """
  ids, weights = sum_duplicates(ids, weights, experts)
  pairs, choices = ids.size, ids.shape[1]
  flat = ids.reshape(-1)
  every = jnp.arange(experts, dtype=jnp.int32)
  count, offset = _rank(flat, experts)
  start = _sums_before(-(-count // ALIGN))
  tiles = -(-count // width)
  first = _sums_before(tiles)
  capacity, entries = capacities(pairs, experts, width)
  place = start[jnp.minimum(flat, experts - 1)] * ALIGN + offset
  place = jnp.where(flat < experts, place, capacity)
  pair = jnp.zeros((capacity,), jnp.int32)
  pair = pair.at[place].set(
    jnp.arange(pairs, dtype=jnp.int32), mode='drop', unique_indices=True
  )
  items = jnp.arange(entries, dtype=jnp.int32)
  passed = (first + tiles)[None] <= items[:, None]
  owner = jnp.minimum(jnp.sum(passed, 1, dtype=jnp.int32), experts - 1)
  table = jnp.stack([every, first, tiles, start, count], axis=1)[owner]
  row_weights = jnp.pad(weights.reshape(-1)[pair], (0, width))
  tables = (table, jnp.sum(tiles, keepdims=True), row_weights)
  indices = _in_expert_order(ids, place.reshape(ids.shape), experts)
  # Without the barrier XLA fuses the indices into `combine`, which would then
  # compute them again for every element.
  return tables, x[pair // choices], lax.optimization_barrier(indices)


def _rank(flat, experts):
  """Counts pairs by expert.

  Args:
    flat: `[P]` int32, the experts of the pairs, 0..E.
    experts: E.

  Returns:
    How many pairs each expert has, `[E]` int32; how many pairs before each one
    have the same expert, `[P]` int32.
  """
  pairs = flat.size
  keys = jnp.pad(flat, (0, -pairs % _CHUNK), constant_values=experts)
  keys = keys.reshape(-1, _CHUNK)
  before = jnp.tri(_CHUNK, k=-1, dtype=bool)[None]
  same = (keys[:, :, None] == keys[:, None, :]) & before
  rank = jnp.sum(same, axis=2, dtype=jnp.int32).reshape(-1)[:pairs]
  every = jnp.arange(experts, dtype=jnp.int32)[None, None]
  counts = jnp.sum(keys[:, :, None] == every, axis=1, dtype=jnp.int32)
  earlier = jnp.tri(keys.shape[0], k=-1, dtype=bool)[:, :, None]
  base = jnp.sum(jnp.where(earlier, counts[None], 0), axis=1)
  chunk = jnp.arange(pairs, dtype=jnp.int32) // _CHUNK
  base = base[chunk, jnp.minimum(flat, experts - 1)]
  return jnp.sum(counts, axis=0), base + rank


def _sums_before(x: jax.Array) -> jax.Array:
  """Exclusive prefix sums of a short int32 vector, in one fusion."""
  before = jnp.tri(x.shape[0], k=-1, dtype=bool)
  return jnp.sum(jnp.where(before, x[None], 0), axis=1, dtype=jnp.int32)


def combine(partial_results: jax.Array, indices: CombineIndices) -> jax.Array:
  """Adds a token's rows, in the order given.

  Args:
    partial_results: `[2, R, H]` int16, upper and lower halves of float32.
    indices: see `CombineIndices`.

  Returns:
    `[T, H]` float32.
  """
  upper, lower = partial_results.astype(jnp.int32)
  tokens = indices[0][1].shape[0]
  total = jnp.zeros((tokens, partial_results.shape[2]), jnp.float32)
  for row, counts in indices:
    index = slice(row, row + tokens) if isinstance(row, int) else row
    bits = (upper[index] << 16) | (lower[index] & 0xFFFF)
    value = lax.bitcast_convert_type(bits, jnp.float32)
    total += jnp.where(counts[:, None], value, 0.0)
  return total
