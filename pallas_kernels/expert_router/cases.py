"""Inputs of the router, for the tests and the bench."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import INTERPRET, Case
from pallas_kernels.expert_router import api, mosaic_gpu, reference

_Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

_MOONLIGHT = (64, 2048)  # Experts, hidden.
_KIMI = (384, 7168)
_DEEPSEEK_V3 = (256, 7168)
_DEEPSEEK_V2 = (160, 5120)

_SIGMOID = api.RouterConfig(
  num_experts_per_tok=6,
  scoring_func='sigmoid',
  norm_topk_prob=True,
  routed_scaling_factor=2.5,
)
_OF_8 = dataclasses.replace(_SIGMOID, num_experts_per_tok=8)
_NOAUX_TC = dataclasses.replace(
  _OF_8,
  n_group=8,
  topk_group=4,
  group_score_experts=2,
  masked_score=-math.inf,
)
_GROUP_LIMITED_GREEDY = api.RouterConfig(
  num_experts_per_tok=6,
  scoring_func='softmax',
  norm_topk_prob=False,
  routed_scaling_factor=16.0,
  n_group=8,
  topk_group=3,
)


def cases() -> list[Case]:
  """A token, and trees of 16 to 1024 nodes; small ones."""
  moonlight = [
    _case(f'moonlight, {rows} tokens', rows, _MOONLIGHT, _SIGMOID)
    for rows in (1, 17, 65, 257, 1025)
  ]
  kimi = _case('kimi, 257 tokens', 257, _KIMI, _OF_8)
  deepseek_v3 = [
    _case(f'deepseek v3, {rows} tokens', rows, _DEEPSEEK_V3, _NOAUX_TC)
    for rows in (1, 17, 257)
  ]
  deepseek_v2 = _case(
    'deepseek v2, 257 tokens', 257, _DEEPSEEK_V2, _GROUP_LIMITED_GREEDY
  )
  return [*moonlight, kimi, *deepseek_v3, deepseek_v2, *small_cases()]


def small_cases() -> list[Case]:
  """Cases for the interpreter, which are not timed."""
  v3, v2 = _NOAUX_TC, _GROUP_LIMITED_GREEDY
  listed = [
    _case('small, 6 tokens', 6, (64, 64), _SIGMOID),
    _case('small, noaux_tc', 3, (256, 64), v3),
    _case('small, group_limited_greedy', 3, (160, 64), v2),
    _case('small, ties', 5, (64, 64), v3, _tie),
    _case('small, negative', 5, (64, 64), v3, _negative),
    _case('small, closed groups', 5, (64, 64), v3, _close_groups),
  ]
  return [dataclasses.replace(case, bytes=0.0, flops=0.0) for case in listed]


def _case(
  name: str,
  rows: int,
  model: tuple[int, int],
  config: api.RouterConfig,
  change: Callable[..., _Inputs] | None = None,
) -> Case:
  experts, hidden = model
  choices = config.num_experts_per_tok
  make = functools.partial(_inputs, rows, experts, hidden)
  return Case(
    op='expert_router',
    name=name,
    make_inputs=(lambda key: change(*make(key))) if change else make,
    kernel=functools.partial(_run, 'mosaic_gpu', config),
    reference=functools.partial(_run, 'reference', config),
    check=functools.partial(_check, config),
    bytes=4.0 * experts * hidden + 2.0 * rows * hidden + 8.0 * rows * choices,
    flops=2.0 * rows * experts * hidden,
    interpreted=functools.partial(interpret, config),
  )


def _tie(
  x: jax.Array, gate: jax.Array, bias: jax.Array, valid: jax.Array
) -> _Inputs:
  """All experts tie in the first row, and the groups in all rows."""
  size = gate.shape[0] // _NOAUX_TC.n_group
  gate = jnp.tile(gate[:size], (_NOAUX_TC.n_group, 1))
  return x.at[0].set(0), gate, jnp.zeros_like(bias), valid


def _negative(
  x: jax.Array, gate: jax.Array, bias: jax.Array, valid: jax.Array
) -> _Inputs:
  """All biased scores are negative."""
  return x, gate, bias - 3, valid


def _close_groups(
  x: jax.Array, gate: jax.Array, bias: jax.Array, valid: jax.Array
) -> _Inputs:
  """Five of eight groups have scores of -inf; one of them is kept."""
  size = gate.shape[0] // _NOAUX_TC.n_group
  return x, gate, bias.at[: 5 * size].set(-jnp.inf), valid


def _inputs(rows: int, experts: int, hidden: int, key: jax.Array) -> _Inputs:
  keys = jax.random.split(key, 4)
  x = jax.random.normal(keys[0], (rows, hidden), jnp.bfloat16)
  gate = jax.random.normal(keys[1], (experts, hidden)) * hidden**-0.5
  bias = 0.1 * jax.random.normal(keys[2], (experts,))
  return x, gate, bias, jax.random.uniform(keys[3], (rows,)) < 0.9


def _run(
  implementation: str,
  config: api.RouterConfig,
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array,
  valid: jax.Array,
) -> tuple[jax.Array, ...]:
  """The op without the choice, which a decoding step does not use."""
  (ids, weights, _), dispatch_ids = api.expert_router(
    x, gate, bias, valid, config, implementation=implementation
  )
  return ids, weights, dispatch_ids


def interpret(
  config: api.RouterConfig,
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array,
  valid: jax.Array,
) -> tuple[jax.Array, ...]:
  """The kernels in the interpreter: the results of `_run`, and the choice."""
  (ids, weights, choice), dispatch_ids = mosaic_gpu.run(
    x, gate, bias, valid, config, INTERPRET
  )
  return ids, weights, dispatch_ids, choice


def _differ(high: jax.Array, low: jax.Array) -> jax.Array:
  """Whether rounding keeps the order: scores that are equal tie on purpose."""
  return (high - low > 1e-5) | (high == low)


def _check(
  config: api.RouterConfig, kernel: Any, inputs: tuple[Any, ...]
) -> dict[str, Any]:
  """Compares weights and choice with the reference, wherever that is clear."""
  x, gate, bias, valid = inputs
  kernel = jax.jit(kernel)
  ids, weights, dispatch_ids, *_ = kernel(*inputs)
  again = kernel(*inputs)[:3]
  repeats = all(
    bool(jnp.array_equal(a, b))
    for a, b in zip((ids, weights, dispatch_ids), again, strict=True)
  )
  plain = jax.jit(functools.partial(_run, 'reference', config))(*inputs)
  choice, plain_choice = (
    api.expert_router(x, gate, bias, valid, config, implementation=name)[
      0
    ].choice
    for name in (None, 'reference')
  )
  equal = choice == plain_choice  # Infinities too.
  error = float(jnp.max(jnp.where(equal, 0, jnp.abs(choice - plain_choice))))
  # Where two scores are as close as rounding errors, either may come first.
  masked = reference.mask_groups(plain_choice, config)
  ranked = jax.lax.top_k(masked, config.num_experts_per_tok + 1)[0]
  clear = jnp.all(_differ(ranked[:, :-1], ranked[:, 1:]), axis=1)
  if config.topk_group < config.n_group:
    groups = reference.group_scores(plain_choice, config)
    ranked = jax.lax.top_k(groups, config.topk_group + 1)[0]
    clear &= _differ(ranked[:, -2], ranked[:, -1])
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
