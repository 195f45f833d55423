"""The router on a Hopper GPU: two launches instead of five.

XLA takes one launch each for the product, the sum of its parts, the sort of all
scores, the look-up of the chosen ones and their normalisation. A launch costs
more than the work in it, and no other part of a layer can run meanwhile.

Here a warp has one row, with the scores of all its experts in its registers, so
that an expert is chosen by two reductions over the warp: the highest score, and
the first expert that has it. Warps wait for each other only to store.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _float_order, dense
from pallas_kernels._float_order import LOWEST
from pallas_kernels._hopper import WARPGROUP
from pallas_kernels._padding import pad_to
from pallas_kernels.expert_router import logits as product
from pallas_kernels.expert_router import reference

__all__ = ('choose', 'expert_router', 'run', 'why_not')

_MAX_EXPERTS = 512  # 16 scores a lane.
_MAX_CHOICES = 8
_MAX_ROWS = 4096  # For more, launches are short beside the products.
_WARPS = 4  # Rows of a block.
_LANES = 64  # Scores of a row that the 32 lanes of a warp hold at once.
# A warp has a row, and a lane has pairs of neighbours in it.
_LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((_WARPS, _LANES), (2,))),
  warp_dims=(-3,),
  lane_dims=(-2,),
  vector_dim=-1,
)


def why_not(
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  config: reference.RouterConfig,
) -> str | None:
  """Why the kernels cannot take these arguments; None if they can."""
  del bias, valid
  experts, choices = gate.shape[0], config.num_experts_per_tok
  if x.dtype != jnp.bfloat16:
    return f'x: {x.dtype}, not bfloat16'
  if not 1 <= experts <= _MAX_EXPERTS:
    return f'gate: {experts} experts; 1 to {_MAX_EXPERTS}'
  if config.n_group < 1 or experts % config.n_group:
    return f'{experts} experts in {config.n_group} groups: not of equal size'
  if not 1 <= config.topk_group <= config.n_group:
    return f'topk_group: {config.topk_group} of {config.n_group} groups'
  if not 1 <= config.group_score_experts <= experts // config.n_group:
    return f'group_score_experts: {config.group_score_experts} of a group'
  if not 1 <= choices <= min(_MAX_CHOICES, experts):
    return f'{choices} choices of {experts}; at most {_MAX_CHOICES}'
  if not 1 <= x.shape[0] <= _MAX_ROWS:
    return f'x: {x.shape[0]} rows; 1 to {_MAX_ROWS}'
  return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def expert_router(
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  config: reference.RouterConfig,
) -> tuple[reference.Routing, jax.Array]:
  """See `pallas_kernels.expert_router.api.expert_router`; bfloat16 only."""
  return run(x, gate, bias, valid, config)


def _forward(x, gate, bias, valid, config):
  return run(x, gate, bias, valid, config), (x, gate, bias, valid)


def _backward(config, inputs, cotangents):
  """The reference's derivative; the kernel is for decoding, not training."""
  x, gate, bias, valid = inputs

  def primal(x, gate, bias):
    routing, _ = reference.expert_router(x, gate, bias, valid, config)
    return routing.weights, routing.choice

  _, vjp = jax.vjp(primal, x, gate, bias)
  return *vjp((cotangents[0].weights, cotangents[0].choice)), None


expert_router.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(4, 5))
def run(
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  config: reference.RouterConfig,
  interpret: Any = None,
) -> tuple[reference.Routing, jax.Array]:
  """`expert_router`; jitted by itself, so that layers are lowered once."""
  rows, experts = x.shape[0], gate.shape[0]
  if product.why_not(rows, x.shape[1], experts):
    parts = dense.matmul(x.astype(jnp.float32), gate)[None]
  else:
    parts = product.logits(x, gate, interpret)
  ids, dispatch_ids, weights = choose(
    parts, bias, valid, rows, config, interpret
  )
  # XLA drops this where a program does not use the choice.
  total = jnp.sum(parts, axis=0)[:rows]
  _, choice = reference.choice_scores(total, bias, config)
  return reference.Routing(ids, weights, choice), dispatch_ids


def choose(
  parts: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  rows: int,
  config: reference.RouterConfig,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chooses experts and computes their weights from the parts of the logits.

  Args:
    parts: `[S, P, E]` float32, P at least T; they add up to the logits, in
      this order.
    bias: `[E]` float32, or None.
    valid: `[T]` bool, or None.
    rows: T.
    config: how experts are chosen.
    interpret: parameters of the interpreter, or None.

  Returns:
    Ids `[T, K]` int32; the same, but E where a row is not valid; weights
    `[T, K]` float32. Ids are `[K, T]` in memory, because a lane of the kernel
    that dispatches rows to experts takes a token.
  """
  experts = parts.shape[2]
  blocks = pl.cdiv(rows, _WARPS)
  lanes = pl.cdiv(experts, _LANES) * _LANES
  whole = rows if rows == 1 else blocks * _WARPS
  parts = pad_to(parts, whole, lanes)
  vectors = []
  if bias is not None:
    vectors.append(pad_to(bias, lanes))
  if valid is not None:
    vectors.append(pad_to(valid.astype(jnp.int32), blocks * _WARPS))
  ids = jax.ShapeDtypeStruct((config.num_experts_per_tok, rows), jnp.int32)
  weights = jax.ShapeDtypeStruct(
    (rows, config.num_experts_per_tok), jnp.float32
  )

  def kernel_body(parts, *refs, **scratch):
    refs = list(refs)
    bias_ref = refs.pop(0) if bias is not None else None
    valid_ref = refs.pop(0) if valid is not None else None
    _kernel(parts, bias_ref, valid_ref, *refs, **scratch,
            experts=experts, rows=rows, config=config)  # fmt: skip

  ids, dispatch_ids, weights = plgpu.kernel(
    kernel_body,
    out_type=(ids, ids, weights),
    scratch_types=dict(
      found=plgpu.SMEM((_WARPS, _LANES), jnp.int32),
      gained=plgpu.SMEM((_WARPS, _LANES), jnp.float32),
    ),
    grid=(blocks,),
    grid_names=('block',),
    compiler_params=WARPGROUP,
    interpret=interpret,
    kernel_name='expert_router',
  )(parts, *vectors)
  return ids.T, dispatch_ids.T, weights


def _kernel(
  parts, bias, valid, ids, dispatch_ids, weights, *, found, gained, experts,
  rows, config,
):  # fmt: skip
  """Routes four rows, or a single row that all warps have."""
  first = lax.axis_index('block') * _WARPS
  shape = (_WARPS, parts.shape[2])

  def across(row):
    return lax.broadcast_in_dim(row, shape, (1,))

  def load(part):
    if rows == 1:
      return across(_load(parts.at[part, 0], 0))
    here = parts.at[part, pl.ds(first, _WARPS)]
    return plgpu.load(here, layout=_LAYOUT, optimized=False)

  loaded = [load(part) for part in range(parts.shape[0])]
  asked = None
  if valid is not None:
    asked = _load(valid.at[pl.ds(first, _WARPS)], 1) != 0
  scores = choice = _scores(sum(loaded[1:], loaded[0]), experts, config)
  if bias is not None:
    choice += across(_load(bias, 0))
  choices = config.num_experts_per_tok
  chosen, gains = _choose(scores, choice, experts, config)
  if config.norm_topk_prob:
    total = sum(gains[1:], gains[0]) + 1e-20
    gains = [gain / total for gain in gains]
  gains = [gain * config.routed_scaling_factor for gain in gains]

  to_dispatch = chosen
  if asked is not None:
    to_dispatch = [jnp.where(asked, expert, experts) for expert in chosen]
  _write_columns(found, chosen + to_dispatch)
  _write_columns(gained, gains)
  for row in range(_WARPS if rows > 1 else 1):

    @pl.when(first + row < rows)
    def _(row=row):
      for k in range(choices):
        ids[k, first + row] = found[row, k]
        dispatch_ids[k, first + row] = found[row, choices + k]
        weights[first + row, k] = gained[row, k]


def _write_columns(ref, columns):
  """Writes vectors `[4]` as columns, in one store, as each has two barriers."""
  place = _column(ref.shape)
  # Columns that are not read hold the first vector.
  table = lax.broadcast_in_dim(columns[0], ref.shape, (0,))
  for i, column in enumerate(columns[1:], 1):
    column = lax.broadcast_in_dim(column, ref.shape, (0,))
    table = jnp.where(place == i, column, table)
  ref[...] = table


def _scores(logits, experts, config):
  """The scores that make weights, `[4, E]`; anything in columns past E."""
  if config.scoring_func == 'sigmoid':
    return 1.0 / (1.0 + jnp.exp(-logits))
  logits = jnp.where(_column(logits.shape) < experts, logits, -jnp.inf)
  highest = jnp.max(logits, axis=1)
  powers = jnp.exp(logits - lax.broadcast_in_dim(highest, logits.shape, (0,)))
  total = jnp.sum(powers, axis=1)
  return powers / lax.broadcast_in_dim(total, logits.shape, (0,))


def _choose(scores, choice, experts, config):
  """The experts `[4]` of the highest `choice`, and their `scores` `[4]`."""
  expert = _column(scores.shape)
  bits, key = _float_order.bits_of(scores), _float_order.bits_of(choice)
  # The lowest key is kept for columns of no expert.
  key = _float_order.flip_negative(key)
  key = jnp.maximum(key, LOWEST + 1)
  if config.topk_group < config.n_group:
    key = _mask_groups(key, experts, config)
  key = jnp.where(expert < experts, key, LOWEST)
  chosen, gains = [], []
  for _ in range(config.num_experts_per_tok):
    first, here, key = _take_best(key, expert)
    gain = jnp.sum(jnp.where(here, bits, 0), axis=1)
    chosen.append(first)
    gains.append(_float_order.float_of(gain))
  return chosen, gains


def _mask_groups(key, experts, config):
  """Masks the keys `[4, E]` of experts in all but the best groups.

  Loops, not unrolled: lowering takes as long as there are operations.
  """
  expert = _column(key.shape)
  group = lax.div(expert, jnp.full_like(expert, experts // config.n_group))
  lowest = jnp.full_like(key, LOWEST)

  def score(g, scores):
    """Writes the key of group `g`'s score to the columns of its experts."""
    here = group == g
    rest = jnp.where(here, key, LOWEST)
    best = [jnp.max(rest, axis=1)]
    for _ in range(config.group_score_experts - 1):
      *_, rest = _take_best(rest, expert)
      best.append(jnp.max(rest, axis=1))
    best = [_float_order.flip_negative(key) for key in best]
    best = [_float_order.float_of(bits) for bits in best]
    total = sum(best[1:], best[0])
    total = _float_order.flip_negative(_float_order.bits_of(total))
    total = jnp.maximum(total, LOWEST + 1)
    return jnp.where(here, lax.broadcast_in_dim(total, key.shape, (0,)), scores)

  def keep(_, carry):
    scores, kept = carry
    _, here, scores = _take_best(scores, group)
    return scores, jnp.where(here, key, kept)

  # Columns of no expert are in no group, and are never kept.
  scores = lax.fori_loop(0, config.n_group, score, lowest)
  masked = _float_order.bits_of(
    jnp.full_like(key, config.masked_score, jnp.float32)
  )
  kept = jnp.maximum(_float_order.flip_negative(masked), LOWEST + 1)
  return lax.fori_loop(0, config.topk_group, keep, (scores, kept))[1]


def _take_best(key, place):
  """The lowest `place` `[4]` of the highest `key`; where it is; keys without.

  Args:
    key: `[4, E]` int32; those that are taken become the lowest.
    place: `[4, E]` int32: columns, or the groups that they are in.
  """
  best = lax.broadcast_in_dim(jnp.max(key, axis=1), key.shape, (0,))
  # The first place, by a maximum: a warp has an instruction for that.
  first = -jnp.max(jnp.where(key == best, -place, LOWEST), axis=1)
  here = place == lax.broadcast_in_dim(first, key.shape, (0,))
  return first, here, jnp.where(here, LOWEST, key)


def _column(shape):
  return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)


def _load(ref, axis):
  """A vector, laid out for rows (0) or columns (1) of a tile."""
  return plgpu.load(ref, layout=_LAYOUT.reduce(axis), optimized=False)
