"""The experts on a Hopper GPU, in Pallas Mosaic GPU.

Two products, `h = silu(x gate^T) * (x up^T)` and `y = w * (h down^T)`, each one
persistent kernel over the multiprocessors: one warpgroup keeps tiles in flight
by TMA, one or two multiply. Weights are the left operand of wgmma (two tiles of
64 of their rows at once: gate and up, or neighbours) and rows of x its columns,
so that a tile costs the same for one row as for sixteen, and every touched
weight is read once.

Two ways to give a tile its columns:

* *dense*, for a few tokens: the columns are all the tokens, whoever chose the
  expert. Columns do not see each other, so what nobody asked for is not looked
  at again, and nothing has to be gathered.
* *grouped*: the (token, expert) pairs are sorted by expert, each expert's rows
  start at a multiple of 16, and a tile takes the next `width` of them. A
  kernel of its own sorts them, see `grouping`; thousands of tokens XLA's ops.

A shared SwiGLU of S times an expert's width is S experts that every row goes
to, with weight 1: the grouped form takes them as S more, whose columns are all
rows, where that is faster than XLA's products beside the kernels.

An output element is the sum over a whole row of weights, 16 at a time from the
first to the last, in a float32 accumulator, whatever the number of columns: its
bits do not depend on who else is in the tile. The weighted results of a token's
experts are then added by XLA, the shared ones first, then in order of expert.
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
from pallas_kernels.grouped_matmul import (
  grouping,
  products,
  reference,
  routing,
  tiles,
)
from pallas_kernels.quantized import QuantizedArray

__all__ = ('expert_mlp', 'run', 'supported')

_TILE = tiles.TILE
_SHARED_BYTES = 232448 - 2048  # Of one block; the rest is for barriers.
_MAX_EXPERTS = 384
_MAX_CHOICES = 8


def supported(
  x: jax.Array,
  gate_up: jax.Array | QuantizedArray,
  down: jax.Array | QuantizedArray,
  expert_ids: jax.Array,
) -> str | None:
  """Why these shapes and dtypes cannot run here, or None if they can."""
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
  """See `pallas_kernels.grouped_matmul.api.expert_mlp`; bfloat16 only."""
  return run(x, gate_up, down, expert_ids, expert_weights, shared)


def _forward(*inputs):
  return run(*inputs), inputs


def _backward(inputs, cotangent):
  """The reference's derivative: training is not what the kernel is for."""
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
  cut: tiles.Plan | None = None,
  interpret: Any = None,
) -> jax.Array:
  """`expert_mlp` with a given cut, or in the interpreter.

  Raises:
    ValueError: shapes or dtypes that are not supported.
  """
  if reason := supported(x, gate_up, down, expert_ids):
    raise ValueError(reason)
  cut = cut or tiles.plan(*expert_ids.shape, down.shape[0])
  inputs = x, gate_up, down, expert_ids, expert_weights
  if shared is None or _takes(shared, cut, x.shape[0], *down.shape):
    return _run(cut, interpret, *inputs, shared)
  return _run(cut, interpret, *inputs, None) + dense.swiglu(x, *shared)


def _takes(shared, cut, tokens, experts, hidden, inner):
  """Whether the kernels do the shared experts too; if not, XLA does."""
  if any(isinstance(w, QuantizedArray) for w in shared):
    return False
  width = shared[0].shape[0]
  # For thousands of rows XLA is fast, and L2 traffic, not memory, the limit.
  few = grouping.supported(tokens, hidden, experts, cut)
  whole = width >= inner and width % inner == 0
  return cut.takes_shared and not cut.dense and few and whole


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
  cut: tiles.Plan,
  interpret: Any,
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  expert_ids: jax.Array,
  expert_weights: jax.Array,
  shared: dense.Weights | None,
) -> jax.Array:
  """See `run`; a function of its own, so that layers are lowered once."""
  experts, hidden, inner = down.shape
  number = shared[0].shape[0] // inner if shared else 0
  shape = tiles.Shape(experts, hidden, inner, *expert_ids.shape, number)
  arrange = _arrange_dense if cut.dense else _arrange_grouped
  tables, columns, places, rows = arrange(
    shape, cut, interpret, x, expert_ids, expert_weights
  )
  # Free views: 64 rows of weights are within one of the first axis.
  across = hidden // _TILE
  up_weights = [gate_up.reshape(experts * 2, inner, hidden)]
  down_weights = [down.reshape(experts * across, _TILE, inner)]
  if shared:
    up_weights += shared[:2]
    down_weights += [shared[2].reshape(across, _TILE, -1)]
  call = functools.partial(_call, shape, cut, interpret, tables)
  activation = call(
    products.up, (1, rows, inner), jnp.bfloat16, columns, *up_weights
  )
  partial_results = call(
    products.down, (2, rows, hidden), jnp.int16, activation[0], *down_weights
  )
  return routing.combine(partial_results, places).astype(jnp.bfloat16)


def _arrange_dense(shape, cut, interpret, x, ids, weights):
  """The kernels' tables and right operand, the places and number of results."""
  del interpret
  tables = (ids, weights)
  ids, _ = routing.merge_repeats(ids, weights, shape.experts)
  mask = None
  # A single token's kernels find its experts themselves: a launch before them
  # would cost a twentieth of their time.
  if shape.tokens > 1:
    mask = routing.touched(ids, shape.experts)
    tables = (*tables, mask)
  places = routing.dense_places(ids, mask, shape.experts, cut.width)
  if 8 < shape.tokens < cut.width:  # More than one tile of 8 must be whole.
    x = jnp.pad(x, ((0, cut.width - shape.tokens), (0, 0)))
  return tables, x, places, min(shape.experts, ids.size) * cut.width


def _arrange_grouped(shape, cut, interpret, x, ids, weights):
  """See `_arrange_dense`."""
  routed = x, ids, weights, shape.experts
  if grouping.supported(shape.tokens, shape.hidden, shape.experts, cut):
    tables, x, places = grouping.group(*routed, cut, interpret, shape.front)
  else:
    tables, x, places = routing.group(*routed, cut.width)
  first = shape.shared * shape.front
  places = [(row + first, here) for row, here in places]
  shared = routing.shared_places(shape.shared, shape.front, shape.tokens)
  return tables, x, shared + places, first + x.shape[0] - shape.front


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The tiles in flight.

  The copies into a stage complete its `full`, the consumers its `free`; steps
  number the uses of stages through all items of a block.
  """

  cut: tiles.Plan
  items: tiles.Dense | tiles.Grouped
  product: products.Product
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
    """`body(first step, item)` on every item of this block."""
    cluster, steps = self.cut.cluster, self.product.steps
    block, blocks = lax.axis_index('block'), self.cut.blocks // cluster
    groups = jnp.int32(pl.cdiv(self.product.tiles, cluster))
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
    """The loading warpgroup's part."""
    product = self.product

    def item_body(start, item):
      # A cluster's last block may be one too many: it loads, for the other's
      # sake, but stores nothing.
      inside = jnp.minimum(item.tile, product.tiles - 1)
      item = dataclasses.replace(item, tile=inside)
      load = functools.partial(self._load_item, start, item)
      if self.items.shared:
        pl.when(item.expert < 0)(lambda: load(product.shared))
        pl.when(item.expert >= 0)(lambda: load(product.routed))
      else:
        load(product.routed)

    self._each(item_body)
    # Nothing may be on its way to or from this block when it ends.
    lax.fori_loop(
      0,
      self._stages,
      lambda stage, _: plgpu.barrier_wait(self.free.at[stage]),
      None,
    )

  def _load_item(self, start, item, weights):
    """Loads an item's tiles, its weights by `weights`, see `Product`."""
    row = self.product.row(item)

    def one(k, _):
      stage, along = self._stage(start + k), pl.ds(k * _TILE, _TILE)
      full = self.full.at[stage]
      plgpu.barrier_wait(self.free.at[stage])
      for half in range(2):
        plgpu.copy_gmem_to_smem(
          weights(item, half, k), self.weights.at[stage, half], full
        )
      plgpu.copy_gmem_to_smem(
        self.product.rows.at[pl.ds(row, self.cut.width), along],
        self.rows.at[stage],
        full,
        collective_axes='member' if self.cut.cluster > 1 else None,
      )

    lax.fori_loop(0, self.product.steps, one, None)

  def consume(self, me):
    """Multiplying warpgroup `me`'s part."""
    product, columns = self.product, self.cut.columns
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
          plgpu.wgmma_wait(2)  # These two run on; those before are done.
          pl.when(k > 0)(lambda: self._release(start + k - 1))

        lax.fori_loop(0, product.steps, one, None)
        return [acc[...] for acc in accs]

      acc = plgpu.ACC((_TILE, columns), jnp.float32)
      sums = pl.run_scoped(scope, acc, acc)
      self._release(start + product.steps - 1)

      @pl.when(item.tile < product.tiles)
      def _():
        product.finish(item, me, offset, *sums)

    def skip(start, item):
      del item

      def one(k, _):
        plgpu.barrier_wait(self.full.at[self._stage(start + k)])
        self._release(start + k)

      lax.fori_loop(0, product.steps, one, None)

    def item_body(start, item):
      if self.cut.consumers == 1:
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


def _kernel_body(make_product, shape, cut, tables, ops, out, *, buffer, **ring):
  """Gives every warpgroup its part."""
  rows, *weights = ops
  items = (tiles.Dense if cut.dense else tiles.Grouped)(tables, shape, cut)
  product = make_product(cut, shape, items, rows, weights, out, buffer)
  ring = _Ring(cut, items, product, **ring)
  me = lax.axis_index('warpgroup')

  @pl.when(me < cut.consumers)
  def _():
    if cut.consumers > 1:
      plgpu.set_max_registers(232, action='increase')
    ring.consume(me)

  @pl.when(me == cut.consumers)
  def _():
    if cut.consumers > 1:
      plgpu.set_max_registers(40, action='decrease')
    ring.load()


def _call(shape, cut, interpret, tables, make_product, out_shape, dtype, *ops):
  """Launches one product.

  Args:
    shape: the op's.
    cut: its plan.
    interpret: parameters of the interpreter, or None.
    tables: the routing, for `tiles.Dense` or `tiles.Grouped`.
    make_product: `products.up` or `products.down`.
    out_shape: `[planes, rows, columns]`.
    dtype: of the output, of 16 bits.
    *ops: the right operand `[rows, sum]` and the weights, as the product takes
      them.
  """
  planes = min(out_shape[0], cut.planes)
  buffer = plgpu.SMEM((cut.consumers, planes, cut.columns, _TILE), dtype)
  stage = (2 * _TILE + cut.width) * _TILE * 2
  room = _SHARED_BYTES - math.prod(buffer.shape) * 2
  stages = min(cut.stages, room // stage)
  free = {'num_arrivals': cut.consumers, 'num_barriers': stages}
  if cut.cluster > 1:
    free = plgpu.ClusterBarrier(collective_axes=('member',), **free)
  else:
    free = plgpu.Barrier(**free)

  def kernel_body(*refs, **scratch):
    *inputs, out = refs
    inputs = inputs[: len(tables)], inputs[len(tables) :]
    _kernel_body(make_product, shape, cut, *inputs, out, **scratch)

  kernel = plgpu.kernel(
    kernel_body,
    out_type=jax.ShapeDtypeStruct(out_shape, dtype),
    scratch_types=dict(
      weights=plgpu.SMEM((stages, 2, _TILE, _TILE), jnp.bfloat16),
      rows=plgpu.SMEM((stages, cut.width, _TILE), jnp.bfloat16),
      full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
      free=free,
      buffer=buffer,
    ),
    grid=(cut.blocks // cut.cluster,),
    grid_names=('block',),
    cluster=(cut.cluster,) if cut.cluster > 1 else (),
    cluster_names=('member',) if cut.cluster > 1 else (),
    num_threads=cut.consumers + 1,
    thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
    ),
    interpret=interpret,
    kernel_name=f'expert_{make_product.__name__.lower()}',
  )
  return kernel(*tables, *ops)
