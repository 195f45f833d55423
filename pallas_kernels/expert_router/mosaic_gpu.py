"""The router on a Hopper GPU: two launches instead of five.

XLA needs a launch each for the product and to add up its parts, sort all
scores, look the chosen ones up and normalise them. Each costs more than what it
does, and nothing else of a layer can run meanwhile.

Here a warp has a row, with the scores of all its experts in its registers, so
that an expert is chosen by two reductions over the warp: the highest score, and
the first expert that has it. Warps never wait for each other until they store.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dense
from pallas_kernels.expert_router import logits as product
from pallas_kernels.expert_router import reference

__all__ = ('choose', 'expert_router', 'run', 'unsupported')

_MAX_EXPERTS = 512  # 16 scores a lane.
_MAX_CHOICES = 8
_MAX_ROWS = 4096  # Beyond, launches are short beside the products.
_WARPS = 4  # Rows of a block.
_LANES = 64  # Pairs of scores that lie side by side for the lanes of a warp.
# A warp has a row, a lane pairs of neighbours in it.
_LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((_WARPS, _LANES), (2,))),
  warp_dims=(-3,),
  lane_dims=(-2,),
  vector_dim=-1,
)
_LOWEST = -(2**31)


def unsupported(
  x: jax.Array, experts: int, rules: reference.Rules
) -> str | None:
  """Why the kernels do not take these; None if they do."""
  if x.dtype != jnp.bfloat16:
    return f'x: {x.dtype}, not bfloat16'
  if rules.groups != 1:
    return f'{rules.groups} groups of experts'
  if not 1 <= experts <= _MAX_EXPERTS:
    return f'gate: {experts} experts; 1 to {_MAX_EXPERTS}'
  if not 1 <= rules.choices <= min(_MAX_CHOICES, experts):
    return f'{rules.choices} choices of {experts}; at most {_MAX_CHOICES}'
  if not 1 <= x.shape[0] <= _MAX_ROWS:
    return f'x: {x.shape[0]} rows; 1 to {_MAX_ROWS}'
  return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def expert_router(
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  rules: reference.Rules,
) -> tuple[reference.Routing, jax.Array]:
  """See `pallas_kernels.expert_router.api.expert_router`; bfloat16 only."""
  return run(x, gate, bias, valid, rules)


def _forward(x, gate, bias, valid, rules):
  return run(x, gate, bias, valid, rules), (x, gate, bias, valid)


def _backward(rules, inputs, cotangents):
  """The reference's derivative: training is not what the kernel is for."""
  x, gate, bias, valid = inputs

  def primal(x, gate, bias):
    routing, _ = reference.expert_router(x, gate, bias, valid, rules)
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
  rules: reference.Rules,
  interpret: Any = None,
) -> tuple[reference.Routing, jax.Array]:
  """`expert_router`; a function of its own, so that layers are lowered once."""
  rows, experts = x.shape[0], gate.shape[0]
  if product.supported(*x.shape, experts):
    parts = product.logits(x, gate, interpret)
  else:
    parts = dense.matmul(x.astype(jnp.float32), gate)[None]
  ids, sent, weights = choose(parts, bias, valid, rows, rules, interpret)
  # Of the same logits; dead code where nobody looks at it.
  total = jnp.sum(parts, axis=0)[:rows]
  _, choice = reference.choice_scores(total, bias, rules)
  return reference.Routing(ids, weights, choice), sent


def choose(
  parts: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  rows: int,
  rules: reference.Rules,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """All that comes after the product.

  Args:
    parts: `[S, P, E]` float32, P at least T; they add up to the logits, in
      this order.
    bias: `[E]` float32, or None.
    valid: `[T]` bool, or None.
    rows: T.
    rules: of one group.
    interpret: parameters of the interpreter, or None.

  Returns:
    Ids `[T, K]` int32; the same, but E where a row is not valid; weights
    `[T, K]` float32. In memory the choices of ids come first: a lane of the
    kernel that sorts rows by expert takes a token.
  """
  experts = parts.shape[2]
  blocks = pl.cdiv(rows, _WARPS)
  lanes = pl.cdiv(experts, _LANES) * _LANES
  whole = rows if rows == 1 else blocks * _WARPS
  parts = _padded(parts, whole, lanes)
  vectors = []
  if bias is not None:
    vectors.append(_padded(bias, lanes))
  if valid is not None:
    vectors.append(_padded(valid.astype(jnp.int32), blocks * _WARPS))
  ids = jax.ShapeDtypeStruct((rules.choices, rows), jnp.int32)
  weights = jax.ShapeDtypeStruct((rows, rules.choices), jnp.float32)

  def kernel_body(parts, *refs, **scratch):
    refs = list(refs)
    bias_ref = refs.pop(0) if bias is not None else None
    valid_ref = refs.pop(0) if valid is not None else None
    _kernel(parts, bias_ref, valid_ref, *refs, **scratch,
            experts=experts, rows=rows, rules=rules)  # fmt: skip

  ids, sent, weights = plgpu.kernel(
    kernel_body,
    out_type=(ids, ids, weights),
    scratch_types=dict(
      found=plgpu.SMEM((_WARPS, _LANES), jnp.int32),
      gained=plgpu.SMEM((_WARPS, _LANES), jnp.float32),
    ),
    grid=(blocks,),
    grid_names=('block',),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    interpret=interpret,
    kernel_name='expert_router',
  )(parts, *vectors)
  return ids.T, sent.T, weights


def _padded(x: jax.Array, *sizes: int) -> jax.Array:
  """`x` whose last dimensions have at least these sizes."""
  have = x.shape[-len(sizes) :]
  missing = [max(0, size - h) for size, h in zip(sizes, have, strict=True)]
  if not any(missing):
    return x
  before = [(0, 0)] * (x.ndim - len(sizes))
  return jnp.pad(x, before + [(0, number) for number in missing])


def _kernel(
  parts, bias, valid, ids, sent, weights, *, found, gained, experts, rows,
  rules,
):  # fmt: skip
  """Four rows, or one that all warps have."""
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
  scores = choice = _scores(sum(loaded[1:], loaded[0]), experts, rules)
  if bias is not None:
    choice += across(_load(bias, 0))
  chosen, gains = _choose(scores, choice, experts, rules.choices)
  if rules.normalize:
    total = sum(gains[1:], gains[0]) + 1e-20
    gains = [gain / total for gain in gains]
  gains = [gain * rules.scale for gain in gains]

  sent_ids = chosen
  if asked is not None:
    sent_ids = [jnp.where(asked, expert, experts) for expert in chosen]
  _write_columns(found, chosen + sent_ids)
  _write_columns(gained, gains)
  for row in range(_WARPS if rows > 1 else 1):

    @pl.when(first + row < rows)
    def _(row=row):
      for k in range(rules.choices):
        ids[k, first + row] = found[row, k]
        sent[k, first + row] = found[row, rules.choices + k]
        weights[first + row, k] = gained[row, k]


def _write_columns(ref, columns):
  """Writes vectors `[4]`, in one store: each stands between two barriers."""
  place = _column(ref.shape)
  # What nobody reads is the first one's.
  table = lax.broadcast_in_dim(columns[0], ref.shape, (0,))
  for i, column in enumerate(columns[1:], 1):
    column = lax.broadcast_in_dim(column, ref.shape, (0,))
    table = jnp.where(place == i, column, table)
  ref[...] = table


def _scores(logits, experts, rules):
  """What the rows are mixed by, `[4, E]`; anything where no expert is."""
  if rules.sigmoid:
    return 1.0 / (1.0 + jnp.exp(-logits))
  logits = jnp.where(_column(logits.shape) < experts, logits, -jnp.inf)
  highest = jnp.max(logits, axis=1)
  powers = jnp.exp(logits - lax.broadcast_in_dim(highest, logits.shape, (0,)))
  total = jnp.sum(powers, axis=1)
  return powers / lax.broadcast_in_dim(total, logits.shape, (0,))


def _choose(scores, choice, experts, choices):
  """The experts `[4]` of the highest `choice`, and their `scores` `[4]`."""
  expert = _column(scores.shape)
  bits, key = _bits(scores), _bits(choice)
  # Integers in the total order of floats; the lowest is left for no expert.
  key ^= (key >> 31) & 0x7FFFFFFF
  key = jnp.maximum(key, _LOWEST + 1)
  key = jnp.where(expert < experts, key, _LOWEST)
  chosen, gains = [], []
  for _ in range(choices):
    best = lax.broadcast_in_dim(jnp.max(key, axis=1), key.shape, (0,))
    # The least by a maximum: a warp has an instruction for that.
    first = -jnp.max(jnp.where(key == best, -expert, _LOWEST), axis=1)
    here = expert == lax.broadcast_in_dim(first, key.shape, (0,))
    key = jnp.where(here, _LOWEST, key)
    gain = jnp.sum(jnp.where(here, bits, 0), axis=1)
    chosen.append(first)
    gains.append(lax.bitcast_convert_type(gain, jnp.float32))
  return chosen, gains


def _bits(x):
  return lax.bitcast_convert_type(x, jnp.int32)


def _column(shape):
  return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)


def _load(ref, axis):
  """A vector, laid out for rows (0) or columns (1) of a tile."""
  return plgpu.load(ref, layout=_LAYOUT.reduce(axis), optimized=False)
