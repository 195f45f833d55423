"""Shapes of the experts for `python -m pallas_kernels.bench`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dense
from pallas_kernels.bench_case import BenchCase, accuracy
from pallas_kernels.expert_mlp import api, tiles

_MOONLIGHT = (64, 2048, 1408)  # Experts, hidden, inner.
_DEEPSEEK = (64, 7168, 2048)  # A quarter of DeepSeek-V3's, as they fit.


def cases() -> list[BenchCase]:
  """The shapes of the project's targets, and tree sizes between them."""
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
  ]


def _case(
  name: str, tokens: int, choices: int, model: tuple, shared: int = 0
) -> BenchCase:
  experts, hidden, inner = model
  pairs = tokens * choices
  # Up to 128 pairs go round, so that how many experts they touch is known; a
  # larger number, drawn at random, touches them all.
  touched = min(pairs, experts)
  return BenchCase(
    op='expert_mlp',
    name=name,
    make_inputs=functools.partial(_inputs, tokens, choices, model, shared),
    kernel=functools.partial(_run, 'mosaic_gpu'),
    reference=functools.partial(_run, 'reference'),
    check=_check,
    bytes=2.0 * (3 * (touched + shared) * hidden * inner + 2 * tokens * hidden),
    flops=2.0 * 3 * (pairs + shared * tokens) * hidden * inner,
  )


def _run(implementation: str, *inputs: Any) -> jax.Array:
  *inputs, shared = inputs
  return api.expert_mlp(*inputs, shared=shared, implementation=implementation)


def _inputs(
  tokens: int, choices: int, model: tuple, shared: int, key: jax.Array
) -> tuple:
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


def _check(inputs: tuple[Any, ...]) -> dict[str, Any]:
  """Accuracy, that a row does not depend on others, and that it repeats."""
  x, gate_up, down, ids, weights, shared = inputs
  kernel = jax.jit(functools.partial(_run, 'mosaic_gpu'))
  plain = functools.partial(_run, 'reference')
  result = kernel(*inputs)
  # Fewer rows would leave shared experts to XLA, which rounds them elsewhere.
  few = tiles.SHARED_TOKENS if shared else 1
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
  """The op in float32 throughout, an expert at a time.

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
