"""Inputs of the router, for the tests and the bench."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import INTERPRET, Case
from pallas_kernels.expert_router import api, mosaic_gpu

_MOONLIGHT = (64, 2048, 6)  # Experts, hidden, choices.
_KIMI = (384, 7168, 8)


def cases() -> list[Case]:
  """A token, and trees of 16 to 1024 nodes; a small one."""
  moonlight = [
    _case(f'moonlight, {rows} tokens', rows, _MOONLIGHT)
    for rows in (1, 17, 65, 257, 1025)
  ]
  kimi = _case('kimi, 257 tokens', 257, _KIMI)
  return [*moonlight, kimi, *small_cases()]


def small_cases() -> list[Case]:
  """One case for the interpreter."""
  case = _case('small, 6 tokens', 6, (64, 64, 6))
  return [dataclasses.replace(case, bytes=0.0, flops=0.0)]


def _case(name: str, rows: int, model: tuple[int, int, int]) -> Case:
  experts, hidden, choices = model
  config = api.RouterConfig(
    num_experts_per_tok=choices,
    scoring_func='sigmoid',
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
  )
  return Case(
    op='expert_router',
    name=name,
    make_inputs=functools.partial(_inputs, rows, experts, hidden),
    kernel=functools.partial(_run, 'mosaic_gpu', config),
    reference=functools.partial(_run, 'reference', config),
    check=functools.partial(_check, config),
    bytes=4.0 * experts * hidden + 2.0 * rows * hidden + 8.0 * rows * choices,
    flops=2.0 * rows * experts * hidden,
    interpreted=functools.partial(interpret, config),
  )


def _inputs(rows: int, experts: int, hidden: int, key: jax.Array) -> tuple:
  keys = jax.random.split(key, 4)
  x = jax.random.normal(keys[0], (rows, hidden), jnp.bfloat16)
  gate = jax.random.normal(keys[1], (experts, hidden)) * hidden**-0.5
  bias = 0.1 * jax.random.normal(keys[2], (experts,))
  return x, gate, bias, jax.random.uniform(keys[3], (rows,)) < 0.9


def _run(implementation: str, config: api.RouterConfig, *inputs: Any) -> tuple:
  """The op without the choice, which a decoding step does not use."""
  (ids, weights, _), dispatch_ids = api.expert_router(
    *inputs, config, implementation=implementation
  )
  return ids, weights, dispatch_ids


def interpret(config: api.RouterConfig, *inputs: Any) -> tuple:
  """The kernels in the interpreter: the results of `_run`, and the choice."""
  (ids, weights, choice), dispatch_ids = mosaic_gpu.run(
    *inputs, config, INTERPRET
  )
  return ids, weights, dispatch_ids, choice


def _check(
  config: api.RouterConfig, kernel: Any, inputs: tuple[Any, ...]
) -> dict[str, Any]:
  """Compares weights and choice with the reference, wherever that is clear."""
  _, gate, _, valid = inputs
  kernel = jax.jit(kernel)
  ids, weights, dispatch_ids, *_ = kernel(*inputs)
  again = kernel(*inputs)[:3]
  repeats = all(
    bool(jnp.array_equal(a, b))
    for a, b in zip((ids, weights, dispatch_ids), again, strict=True)
  )
  plain = jax.jit(functools.partial(_run, 'reference', config))(*inputs)
  choice, plain_choice = (
    api.expert_router(*inputs, config, implementation=name)[0].choice
    for name in (None, 'reference')
  )
  error = float(jnp.max(jnp.abs(choice - plain_choice)))
  # Where two scores are as close as rounding errors, either may come first.
  ranked = jax.lax.top_k(plain_choice, config.num_experts_per_tok + 1)[0]
  clear = jnp.min(ranked[:, :-1] - ranked[:, 1:], axis=1) > 1e-5
  same = jnp.all(ids == plain[0], axis=1)
  close = jnp.max(jnp.abs(weights - plain[1]), axis=1) < 1e-4
  asked = dispatch_ids == jnp.where(valid[:, None], ids, gate.shape[0])
  right = jnp.all(~clear | (same & close)) & jnp.all(asked)
  return {
    'ok': bool(right) and repeats and error < 1e-5,
    'error': error,
    'repeats': repeats,
    'rows_compared': float(jnp.mean(clear)),
  }
