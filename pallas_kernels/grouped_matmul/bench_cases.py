"""Shapes of the routed experts for `python -m pallas_kernels.bench`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bench_case import BenchCase
from pallas_kernels.grouped_matmul import api

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
    _case('deepseek, 16 tokens x 8, all experts', 16, 8, _DEEPSEEK),
    _case('deepseek, 2048 tokens x 6', 2048, 6, _DEEPSEEK),
  ]


def _case(name: str, tokens: int, choices: int, model: tuple) -> BenchCase:
  experts, hidden, inner = model
  pairs = tokens * choices
  # Up to 128 pairs go round, so that how many experts they touch is known; a
  # larger number, drawn at random, touches them all.
  touched = min(pairs, experts)
  return BenchCase(
    op='grouped_matmul',
    name=name,
    make_inputs=functools.partial(_inputs, tokens, choices, model),
    kernel=functools.partial(api.expert_mlp, implementation='mosaic_gpu'),
    reference=functools.partial(api.expert_mlp, implementation='reference'),
    check=_check,
    bytes=2.0 * (3 * touched * hidden * inner + 2 * tokens * hidden),
    flops=2.0 * 3 * pairs * hidden * inner,
  )


def _inputs(tokens: int, choices: int, model: tuple, key: jax.Array) -> tuple:
  """Random values of unit variance, so that no product is special."""
  experts, hidden, inner = model
  keys = jax.random.split(key, 5)
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
  return x, gate_up, down, ids, jax.nn.softmax(logits, axis=-1)


def _check(inputs: tuple[Any, ...]) -> dict[str, Any]:
  """Accuracy, that a row does not depend on others, and that it repeats."""
  x, gate_up, down, ids, weights = inputs
  kernel = jax.jit(
    functools.partial(api.expert_mlp, implementation='mosaic_gpu')
  )
  plain = functools.partial(api.expert_mlp, implementation='reference')
  result = kernel(*inputs)
  truth = jax.jit(_in_float32)(*inputs)
  error = _error(result, truth)
  plain_error = _error(jax.jit(plain)(*inputs), truth)
  alone = kernel(x[-1:], gate_up, down, ids[-1:], weights[-1:])
  repeats = bool(jnp.array_equal(result, kernel(*inputs)))
  independent = bool(jnp.array_equal(result[-1:], alone))
  return {
    'ok': error <= 2 * plain_error and repeats and independent,
    'error': error,
    'reference_error': plain_error,
    'repeats': repeats,
    'rows_independent': independent,
  }


def _error(value: jax.Array, truth: jax.Array) -> float:
  difference = value.astype(jnp.float32) - truth
  return float(jnp.linalg.norm(difference) / jnp.linalg.norm(truth))


def _in_float32(x, gate_up, down, ids, weights):
  """The op in float32 throughout, an expert at a time.

  It stands in for float64: its own error is a thousandth of bfloat16's.
  """
  project = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
  x = x.astype(jnp.float32)

  def step(total, expert):
    gate, up = jnp.split(
      project(x, gate_up[expert].astype(jnp.float32).T), 2, axis=1
    )
    y = project(jax.nn.silu(gate) * up, down[expert].astype(jnp.float32).T)
    weight = jnp.sum(jnp.where(ids == expert, weights, 0.0), axis=1)
    return total + weight[:, None] * y, None

  experts = jnp.arange(gate_up.shape[0], dtype=jnp.int32)
  return lax.scan(step, jnp.zeros(x.shape, jnp.float32), experts)[0]
