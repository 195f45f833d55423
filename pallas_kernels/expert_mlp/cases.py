"""Inputs of the experts, for the tests and the bench."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dense
from pallas_kernels.case import INTERPRET, Case, accuracy, random_generator
from pallas_kernels.expert_mlp import api, mosaic_gpu, tiles

_MOONLIGHT = (64, 2048, 1408)  # Experts, hidden, inner.
_DEEPSEEK = (64, 7168, 2048)  # A quarter of DeepSeek-V3's, which fits.
# Small ones have 3 tiles of 64 along one axis and 1 along the other.
HIDDEN, INNER, EXPERTS, CHOICES = 192, 64, 5, 2
_tile_config = functools.partial(
  tiles.TileConfig, blocks=2, stages=3, groups=2, takes_shared=True
)
DENSE = _tile_config(dense=True, columns=16, consumers=1)
GROUPED = _tile_config(dense=False, columns=16, consumers=1)
WIDE = _tile_config(dense=False, columns=16, consumers=2)
CLUSTER = dataclasses.replace(WIDE, cluster=2)


def cases() -> list[Case]:
  """The shapes of the project's targets, tree sizes between, small ones."""
  return [
    _case('moonlight, 1 token x 6', 1, 6, _MOONLIGHT),
    _case('moonlight, 16 tokens x 6, all experts', 16, 6, _MOONLIGHT),
    _case('moonlight, 17 tokens x 6', 17, 6, _MOONLIGHT),
    _case('moonlight, 65 tokens x 6', 65, 6, _MOONLIGHT),
    _case('moonlight, 257 tokens x 6', 257, 6, _MOONLIGHT),
    _case('moonlight, 1025 tokens x 6', 1025, 6, _MOONLIGHT),
    _case('moonlight, 257 tokens x 6, shared 2', 257, 6, _MOONLIGHT, 2),
    _case('deepseek, 16 tokens x 8, all experts', 16, 8, _DEEPSEEK),
    _case('deepseek, 2048 tokens x 6', 2048, 6, _DEEPSEEK),
    *small_cases(),
  ]


def small_cases() -> list[Case]:
  """All forms and splits of rows over experts, for the interpreter.

  Unless a case has ids, they are random: repeats, experts without rows, ids of
  no expert. Names of cases that only the slow suite runs begin with "slow".
  """
  same = np.tile([3, EXPERTS], (40, 1))
  each = np.stack([np.arange(40) % EXPERTS, np.full(40, -1)], 1)
  none = np.full((4, CHOICES), EXPERTS)
  return [
    _small('slow: dense, 1 row', DENSE, 1),
    _small('dense, 11 rows', DENSE, 11),
    _small('grouped, 21 rows', GROUPED, 21),
    _small('slow: wide, 45 rows', WIDE, 45),
    _small('cluster, 45 rows', CLUSTER, 45),
    _small('all rows on one expert', WIDE, 40, same),
    _small('one row each', WIDE, 40, each),
    _small('slow: the same expert twice', WIDE, 40, np.full((40, 2), 2)),
    _small('dense, rows of no expert', DENSE, 4, none),
    _small('slow: grouped, rows of no expert', GROUPED, 4, none),
    _small('grouped, 21 rows, shared 2', GROUPED, 21, shared=2),
    _small('slow: wide, 45 rows, shared 1', WIDE, 45, shared=1),
    _small('cluster, 45 rows, shared 2', CLUSTER, 45, shared=2),
    _small('rows of no expert, shared 2', GROUPED, 4, none, shared=2),
  ]


# Experts, hidden size and inner size.
_Model = tuple[int, int, int]


def _case(
  name: str,
  tokens: int,
  choices: int,
  model: tuple[int, int, int],
  shared: int = 0,
) -> Case:
  experts, hidden, inner = model
  pairs = tokens * choices
  # Up to 16 tokens take the experts in turn, so that the number of active ones
  # is known; more tokens choose at random, and all experts are active.
  active = min(pairs, experts)
  return Case(
    op='expert_mlp',
    name=name,
    make_inputs=functools.partial(_inputs, tokens, choices, model, shared),
    kernel=functools.partial(_run, 'mosaic_gpu'),
    reference=functools.partial(_run, 'reference'),
    check=functools.partial(_check, few=tiles.SHARED_TOKENS if shared else 1),
    bytes=2.0 * (3 * (active + shared) * hidden * inner + 2 * tokens * hidden),
    flops=2.0 * 3 * (pairs + shared * tokens) * hidden * inner,
  )


def _small(
  name: str,
  config: tiles.TileConfig,
  rows: int,
  ids: np.ndarray | None = None,
  shared: int = 0,
) -> Case:
  kernel = functools.partial(run_small, config=config)
  return Case(
    op='expert_mlp',
    name=name,
    make_inputs=functools.partial(small_inputs, rows, ids, shared),
    kernel=kernel,
    reference=functools.partial(_run, 'reference'),
    check=functools.partial(_check, few=1),
    interpreted=functools.partial(kernel, interpret=INTERPRET),
  )


@functools.partial(jax.jit, static_argnames=('config', 'interpret'))
def run_small(
  *inputs: Any, config: tiles.TileConfig, interpret: Any = None
) -> jax.Array:
  """The kernels with the given sizes of tiles."""
  return mosaic_gpu.run(*inputs, config=config, interpret=interpret)


def _run(implementation: str, *inputs: Any) -> jax.Array:
  x, gate_up, down, ids, weights, shared = inputs
  return api.expert_mlp(
    x,
    gate_up,
    down,
    ids,
    weights,
    shared=shared,
    implementation=implementation,
  )


def small_inputs(
  rows: int, ids: np.ndarray | None, shared: int, key: jax.Array
) -> tuple[Any, ...]:
  """Random values; see `small_cases` for the ids."""
  rng = random_generator(key)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  x = draw(rows, HIDDEN)
  gate_up = draw(EXPERTS, 2 * INNER, HIDDEN)
  down = draw(EXPERTS, HIDDEN, INNER)
  if ids is None:
    ids = rng.integers(-1, EXPERTS + 2, (rows, CHOICES))
  weights = jnp.asarray(rng.uniform(0.5, 1.5, (rows, CHOICES)), jnp.float32)
  inputs = x, gate_up, down, jnp.asarray(ids, jnp.int32), weights
  if not shared:
    return *inputs, None
  width = shared * INNER
  weights = draw(width, HIDDEN), draw(width, HIDDEN), draw(HIDDEN, width)
  return *inputs, weights


def _inputs(
  tokens: int,
  choices: int,
  model: tuple[int, int, int],
  shared: int,
  key: jax.Array,
) -> tuple[Any, ...]:
  """Random values of unit variance, so that no product is special."""
  experts, hidden, inner = model
  keys = jax.random.split(key, 8)
  draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  x = draw(keys[0], (tokens, hidden))
  gate_up = draw(keys[1], (experts, 2 * inner, hidden))
  gate_up *= jnp.bfloat16(hidden**-0.5)
  down = draw(keys[2], (experts, hidden, inner)) * jnp.bfloat16(inner**-0.5)
  if tokens <= 16:
    ids = jnp.arange(tokens * choices, dtype=jnp.int32) % experts
    ids = ids.reshape(tokens, choices)
  else:
    order = jax.random.uniform(keys[3], (tokens, experts))
    ids = lax.top_k(order, choices)[1].astype(jnp.int32)
  logits = jax.random.normal(keys[4], (tokens, choices), jnp.float32)
  weights = jax.nn.softmax(logits, axis=-1)
  if not shared:
    return x, gate_up, down, ids, weights, None
  width = shared * inner
  gate, up = (draw(k, (width, hidden)) for k in keys[5:7])
  back = draw(keys[7], (hidden, width)) * jnp.bfloat16(inner**-0.5)
  scale = jnp.bfloat16(hidden**-0.5)
  return x, gate_up, down, ids, weights, (gate * scale, up * scale, back)


def _check(kernel, inputs: tuple[Any, ...], *, few: int) -> dict[str, Any]:
  """Accuracy, that a row does not depend on others, and that it repeats.

  Args:
    kernel: the op by the kernel.
    inputs: its inputs.
    few: rows that are computed by themselves, the last ones. With shared
      experts there is a least number: fewer rows would leave these to XLA,
      which rounds elsewhere.
  """
  x, gate_up, down, ids, weights, shared = inputs
  kernel = jax.jit(kernel)
  plain = functools.partial(_run, 'reference')
  result = kernel(*inputs)
  x, ids, weights = (a[-few:] for a in (x, ids, weights))
  alone = kernel(x, gate_up, down, ids, weights, shared)
  return accuracy(
    result,
    jax.jit(plain)(*inputs),
    jax.jit(_in_float32)(*inputs),
    bool(jnp.array_equal(result, kernel(*inputs))),
    bool(jnp.array_equal(result[-1:], alone[-1:])),
  )


def _in_float32(x, gate_up, down, ids, weights, shared):
  """The op in float32 throughout, one expert after the other.

  It stands in for float64: its own error is a thousandth of bfloat16's.
  """
  x, shared = jax.tree.map(lambda a: a.astype(jnp.float32), (x, shared))

  def step(total, expert):
    gate, up = jnp.split(gate_up[expert].astype(jnp.float32), 2)
    y = dense.swiglu(x, gate, up, down[expert].astype(jnp.float32))
    weight = jnp.sum(jnp.where(ids == expert, weights, 0.0), axis=1)
    return total + weight[:, None] * y, None

  experts = jnp.arange(gate_up.shape[0], dtype=jnp.int32)
  zeros = jnp.zeros(x.shape, jnp.float32)
  first = dense.swiglu(x, *shared) if shared else zeros
  return lax.scan(step, first, experts)[0]
