"""The experts on a Hopper GPU, in Pallas Mosaic GPU.

Two products, `h = silu(x gate^T) * (x up^T)` and `y = w * (h down^T)`, each one
persistent kernel over the multiprocessors: one warpgroup keeps tiles in flight
by TMA, one or two multiply. Weights are the left operand of wgmma (two tiles of
64 of their rows at once: gate and up, or neighbours) and rows of x its columns,
so that a tile costs the same for one row as for sixteen, and the weights of
every active expert are read once.

The columns of a tile are chosen in one of two ways:

* *dense*, for a few tokens: the columns are all the tokens, also those that did
  not choose the expert. Columns do not affect each other, so results that are
  not needed are just ignored, and no row has to be gathered.
* *grouped*: the (token, expert) pairs are sorted by expert, each expert's rows
  start at a multiple of 16, and a tile takes the next `width` of them. Another
  kernel sorts them, see `mosaic_dispatch`; for thousands of tokens XLA does.

A shared SwiGLU of S times an expert's width is S experts that every row has,
with weight 1: the grouped form computes them as S more experts, whose columns
are all rows, where that is faster than XLA's products beside the kernels.

An output element is the sum over a whole row of weights, 16 at a time from the
first to the last, in a float32 accumulator, whatever the number of columns: its
bits do not depend on the other rows in the tile. XLA then adds the weighted
results of a token's experts, the shared ones first, then in order of expert.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dense
from pallas_kernels._hopper import BARRIER_BYTES, SHARED_BYTES
from pallas_kernels.expert_mlp import (
  dispatch,
  mosaic_dispatch,
  projections,
  reference,
  tiles,
)
from pallas_kernels.quantized import QuantizedArray

__all__ = ('expert_mlp', 'run', 'why_not')

_TILE = tiles.TILE
_MAX_EXPERTS = 384
_MAX_CHOICES = 8


def why_not(
  x: jax.Array,
  gate_up: jax.Array | QuantizedArray,
  down: jax.Array | QuantizedArray,
  expert_ids: jax.Array,
  *others: jax.Array | dense.Weights | None,
) -> str | None:
  """Why the kernels cannot take these arguments; None if they can."""
  del others
  if isinstance(gate_up, QuantizedArray) or isinstance(down, QuantizedArray):
    return 'quantised weights'
  experts, hidden, inner = down.shape
  choices = expert_ids.shape[1]
  if x.dtype != jnp.bfloat16:
    return f'x: {x.dtype}; tensor cores take bfloat16 (float32 would be tf32)'
  if hidden % _TILE or inner % _TILE:
    return f'down: {down.shape}; both sizes must be multiples of {_TILE}'
  if not 1 <= experts <= _MAX_EXPERTS:
    return f'down: {experts} experts; 1 to {_MAX_EXPERTS}'
  if not 1 <= choices <= _MAX_CHOICES:
    return f'expert_ids: {choices} a token; 1 to {_MAX_CHOICES}'
  if not (x.shape[0] and hidden and inner):
    return f'x: {x.shape}, down: {down.shape}; nothing to multiply'
  return None


@jax.custom_vjp
def expert_mlp(
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  expert_ids: jax.Array,
  expert_weights: jax.Array,
  shared: dense.Weights | None = None,
) -> jax.Array:
  """See `pallas_kernels.expert_mlp.api.expert_mlp`; bfloat16 only."""
  return run(x, gate_up, down, expert_ids, expert_weights, shared)


def _forward(*inputs):
  return run(*inputs), inputs


def _backward(inputs, cotangent):
  """The reference's derivative; the kernel is for decoding, not training."""
  x, gate_up, down, ids, weights, shared = inputs

  def primal(x, gate_up, down, weights, shared):
    return reference.expert_mlp(x, gate_up, down, ids, weights, shared)

  _, vjp = jax.vjp(primal, x, gate_up, down, weights, shared)
  dx, dgate_up, ddown, dweights, dshared = vjp(cotangent)
  return dx, dgate_up, ddown, None, dweights, dshared


expert_mlp.defvjp(_forward, _backward)


def run(
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  expert_ids: jax.Array,
  expert_weights: jax.Array,
  shared: dense.Weights | None = None,
  config: tiles.TileConfig | None = None,
  interpret: Any = None,
) -> jax.Array:
  """`expert_mlp` with a given configuration, or in the interpreter.

  Raises:
    ValueError: shapes or dtypes that are not supported.
  """
  if reason := why_not(x, gate_up, down, expert_ids):
    raise ValueError(reason)
  tokens, choices = expert_ids.shape
  config = config or tiles.tile_config(tokens, choices, down.shape[0])
  inputs = x, gate_up, down, expert_ids, expert_weights
  if shared is None or not _why_not_shared(
    shared, config, x.shape[0], *down.shape
  ):
    return _run(config, interpret, *inputs, shared)
  return _run(config, interpret, *inputs, None) + dense.swiglu(x, *shared)


def _why_not_shared(shared, config, tokens, experts, hidden, inner):
  """Why the kernels leave shared experts to XLA; None if they do not."""
  if any(isinstance(w, QuantizedArray) for w in shared):
    return 'quantised shared experts'
  width = shared[0].shape[0]
  if width < inner or width % inner:
    return f'shared experts of width {width}, not a multiple of {inner}'
  if config.dense or not config.takes_shared:
    return f'{tokens} tokens are too few'
  # For thousands of rows XLA is fast, and L2 traffic, not memory, the limit.
  return mosaic_dispatch.why_not(tokens, hidden, experts, config)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
  config: tiles.TileConfig,
  interpret: Any,
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  expert_ids: jax.Array,
  expert_weights: jax.Array,
  shared: dense.Weights | None,
) -> jax.Array:
  """See `run`; jitted by itself, so that equal layers are lowered once."""
  experts, hidden, inner = down.shape
  number = shared[0].shape[0] // inner if shared else 0
  tokens, choices = expert_ids.shape
  shape = tiles.Shape(experts, hidden, inner, tokens, choices, number)
  dispatch_rows = _dispatch_dense if config.dense else _dispatch_grouped
  tables, columns, indices, rows = dispatch_rows(
    shape, config, interpret, x, expert_ids, expert_weights
  )
  # Views that cost nothing, in which tiles of 64 rows do not cross the first
  # axis.
  across = hidden // _TILE
  up_weights: list[Any] = [gate_up.reshape(experts * 2, inner, hidden)]
  down_weights: list[Any] = [down.reshape(experts * across, _TILE, inner)]
  if shared:
    gate, up, last = shared
    assert isinstance(last, jax.Array)  # `_why_not_shared`
    up_weights += [gate, up]
    down_weights += [last.reshape(across, _TILE, -1)]
  call = functools.partial(_call, shape, config, interpret, tables)
  activation = call(
    projections.up, (1, rows, inner), jnp.bfloat16, columns, *up_weights
  )
  partial_results = call(
    projections.down, (2, rows, hidden), jnp.int16, activation[0], *down_weights
  )
  return dispatch.combine(partial_results, indices).astype(jnp.bfloat16)


def _dispatch_dense(shape, config, interpret, x, ids, weights):
  """Prepares the dense form.

  Returns:
    The kernels' tables; their right operand; the indices of the results that
    are to be combined; the number of results.
  """
  del interpret
  tables = (ids, weights)
  ids, _ = dispatch.sum_duplicates(ids, weights, shape.experts)
  mask = None
  # For a single token the kernels find its experts themselves: a launch before
  # them would cost a twentieth of their time.
  if shape.tokens > 1:
    mask = dispatch.active_experts(ids, shape.experts)
    tables = (*tables, mask)
  indices = dispatch.dense_combine_indices(
    ids, mask, shape.experts, config.width
  )
  if 8 < shape.tokens < config.width:  # More than 8 rows must be whole tiles.
    x = jnp.pad(x, ((0, config.width - shape.tokens), (0, 0)))
  return tables, x, indices, min(shape.experts, ids.size) * config.width


def _dispatch_grouped(shape, config, interpret, x, ids, weights):
  """Prepares the grouped form; see `_dispatch_dense`."""
  routed = x, ids, weights, shape.experts
  if mosaic_dispatch.why_not(shape.tokens, shape.hidden, shape.experts, config):
    tables, x, indices = dispatch.dispatch(*routed, config.width)
  else:
    tables, x, indices = mosaic_dispatch.dispatch(
      *routed, config, interpret, shape.front
    )
  first = shape.shared * shape.front
  indices = [(row + first, here) for row, here in indices]
  shared = dispatch.shared_combine_indices(
    shape.shared, shape.front, shape.tokens
  )
  return tables, x, shared + indices, first + x.shape[0] - shape.front


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The tiles in flight, in a ring of stages.

  The copies into a stage complete its barrier `full`, the consumers its `free`.
  Steps number the uses of stages through all items of a block.
  """

  config: tiles.TileConfig
  items: tiles.Dense | tiles.Grouped
  projection: projections.Projection
  weights: Any  # [stages, 2, 64, 64]
  rows: Any  # [stages, width, 64]
  full: Any
  free: Any

  @property
  def _stages(self) -> int:
    return self.weights.shape[0]

  def _stage(self, step):
    return lax.rem(step, jnp.int32(self._stages))

  def _each(self, body):
    """Calls `body(first step, item)` for every item of this block."""
    cluster, steps = self.config.cluster, self.projection.steps
    block, blocks = lax.axis_index('block'), self.config.blocks // cluster
    groups = jnp.int32(pl.cdiv(self.projection.tiles, cluster))
    work = self.items.number * groups
    number = lax.div(work - block + blocks - 1, jnp.int32(blocks))

    def one(i, _):
      item = self.items.locate(block + i * blocks, groups)
      if cluster > 1:
        tile = item.tile * cluster + lax.axis_index('member')
        item = dataclasses.replace(item, tile=tile)
      body(i * steps, item)

    lax.fori_loop(0, number, one, None)

  def load(self):
    """Runs the loading warpgroup."""
    projection = self.projection

    def item_body(start, item):
      # A cluster's last block may have no tile left: it loads, because the
      # other one needs its half of the columns, but stores nothing.
      inside = jnp.minimum(item.tile, projection.tiles - 1)
      item = dataclasses.replace(item, tile=inside)
      load = functools.partial(self._load_item, start, item)
      if self.items.shared:
        pl.when(item.expert < 0)(lambda: load(projection.shared))
        pl.when(item.expert >= 0)(lambda: load(projection.routed))
      else:
        load(projection.routed)

    self._each(item_body)
    # No copy to or from this block may be under way when it ends.
    lax.fori_loop(
      0,
      self._stages,
      lambda stage, _: plgpu.barrier_wait(self.free.at[stage]),
      None,
    )

  def _load_item(self, start, item, weights):
    """Loads an item's tiles; `weights` gives its weights, see `Projection`."""
    row = self.projection.row(item)

    def one(k, _):
      stage, along = self._stage(start + k), pl.ds(k * _TILE, _TILE)
      full = self.full.at[stage]
      plgpu.barrier_wait(self.free.at[stage])
      for half in range(2):
        plgpu.copy_gmem_to_smem(
          weights(item, half, k), self.weights.at[stage, half], full
        )
      plgpu.copy_gmem_to_smem(
        self.projection.rows.at[pl.ds(row, self.config.width), along],
        self.rows.at[stage],
        full,
        collective_axes='member' if self.config.cluster > 1 else None,
      )

    lax.fori_loop(0, self.projection.steps, one, None)

  def consume(self, me):
    """Runs the multiplying warpgroup `me`."""
    projection, columns = self.projection, self.config.columns
    offset = me * columns

    def multiply(start, item):
      def scope(*accs):
        def one(k, _):
          stage = self._stage(start + k)
          plgpu.barrier_wait(self.full.at[stage])
          right = self.rows.at[stage, pl.ds(offset, columns)]
          for half, acc in enumerate(accs):
            left = self.weights.at[stage, half]
            plgpu.wgmma(acc, left, right.transpose((1, 0)))
          plgpu.wgmma_wait(2)  # All but these two are done.
          pl.when(k > 0)(lambda: self._release(start + k - 1))

        lax.fori_loop(0, projection.steps, one, None)
        return [acc[...] for acc in accs]

      acc = plgpu.ACC((_TILE, columns), jnp.float32)
      sums = pl.run_scoped(scope, acc, acc)
      self._release(start + projection.steps - 1)

      @pl.when(item.tile < projection.tiles)
      def _():
        projection.finish(item, me, offset, *sums)

    def skip(start, item):
      del item

      def one(k, _):
        plgpu.barrier_wait(self.full.at[self._stage(start + k)])
        self._release(start + k)

      lax.fori_loop(0, projection.steps, one, None)

    def item_body(start, item):
      if self.config.consumers == 1:
        multiply(start, item)
      else:
        asked = item.left > offset
        pl.when(asked)(lambda: multiply(start, item))
        pl.when(jnp.logical_not(asked))(lambda: skip(start, item))

    lax.fori_loop(0, self._stages, lambda step, _: self._release(step), None)
    self._each(item_body)
    plgpu.wait_smem_to_gmem(0)

  def _release(self, step):
    plgpu.barrier_arrive(self.free.at[self._stage(step)])


def _kernel_body(
  make_projection, shape, config, tables, ops, out, *, buffer, **ring
):
  """Runs one warpgroup, which loads or multiplies."""
  rows, *weights = ops
  items = (tiles.Dense if config.dense else tiles.Grouped)(
    tables, shape, config
  )
  projection = make_projection(config, shape, items, rows, weights, out, buffer)
  ring = _Ring(config, items, projection, **ring)
  me = lax.axis_index('warpgroup')

  @pl.when(me < config.consumers)
  def _():
    if config.consumers > 1:
      plgpu.set_max_registers(232, action='increase')
    ring.consume(me)

  @pl.when(me == config.consumers)
  def _():
    if config.consumers > 1:
      plgpu.set_max_registers(40, action='decrease')
    ring.load()


def _call(
  shape, config, interpret, tables, make_projection, out_shape, dtype, *ops
):
  """Launches one product.

  Args:
    shape: sizes of the op.
    config: sizes of its tiles.
    interpret: parameters of the interpreter, or None.
    tables: the dispatch, for `tiles.Dense` or `tiles.Grouped`.
    make_projection: `projections.up` or `projections.down`.
    out_shape: `[planes, rows, columns]`.
    dtype: dtype of the output, of 16 bits.
    *ops: the right operand `[rows, sum]` and the weights, as the product takes
      them.
  """
  planes = min(out_shape[0], config.planes)
  buffer = plgpu.SMEM((config.consumers, planes, config.columns, _TILE), dtype)
  stage = (2 * _TILE + config.width) * _TILE * 2
  room = SHARED_BYTES - BARRIER_BYTES - math.prod(buffer.shape) * 2
  stages = min(config.stages, room // stage)
  free = {'num_arrivals': config.consumers, 'num_barriers': stages}
  if config.cluster > 1:
    free = plgpu.ClusterBarrier(collective_axes=('member',), **free)
  else:
    free = plgpu.Barrier(**free)

  def kernel_body(*refs, **scratch):
    *inputs, out = refs
    inputs = inputs[: len(tables)], inputs[len(tables) :]
    _kernel_body(make_projection, shape, config, *inputs, out, **scratch)

  kernel = plgpu.kernel(
    kernel_body,
    out_type=jax.ShapeDtypeStruct(out_shape, dtype),
    scratch_types=dict(
      weights=plgpu.SMEM((stages, 2, _TILE, _TILE), jnp.bfloat16),
      rows=plgpu.SMEM((stages, config.width, _TILE), jnp.bfloat16),
      full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
      free=free,
      buffer=buffer,
    ),
    grid=(config.blocks // config.cluster,),
    grid_names=('block',),
    cluster=(config.cluster,) if config.cluster > 1 else (),
    cluster_names=('member',) if config.cluster > 1 else (),
    num_threads=config.consumers + 1,
    thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
    ),
    interpret=interpret,
    kernel_name=f'expert_{make_projection.__name__.lower()}',
  )
  return kernel(*tables, *ops)
