"""docs/SCALE_UP.md says what the configs say."""

import dataclasses
import pathlib

import jax.numpy as jnp
import pytest

from kdtree_jax.benchmark import scale_up, traffic
from kdtree_jax.model import abstract_params
from kdtree_jax.named_configs import load_config
from tests import support

ROOT = pathlib.Path(__file__).parents[2]


def test_the_tables_of_the_page():
  lines = (ROOT / 'docs' / 'SCALE_UP.md').read_text().splitlines()
  for line in scale_up.tables():
    assert line in lines


def test_the_size_of_a_repository():
  """Kimi-K2.6 without its vision part: tests/io/configs_test.py."""
  config = load_config('kimi_k2_6')
  weights = scale_up.weights_of(config, scale_up.INT4)
  assert weights.on_device(config, 1) / 2**30 == pytest.approx(553.4, rel=2e-3)


def test_bfloat16_is_what_lies_in_memory():
  config = load_config('group_limited')
  weights = scale_up.weights_of(config, scale_up.Storage('bfloat16', 2, 2))
  shapes = abstract_params(config, jnp.bfloat16)
  assert weights.on_device(config, 1) == support.tree_bytes(shapes)
  found = traffic.weight_bytes(config, shapes)
  assert weights.replicated + weights.split == found.dense
  assert (weights.expert,) * weights.moe_layers == found.expert
  # Halving leaves what is whole on each device.
  halves = 2 * weights.on_device(config, 2) - weights.on_device(config, 1)
  assert halves == weights.replicated > 0


def test_active_experts_of_independent_rows():
  config = load_config('kimi_k2_6')
  e, k = config.n_routed_experts, config.num_experts_per_tok
  for rows in (1, 17, 65):
    wanted = e * (1 - (1 - k / e) ** rows)
    found = scale_up.active_experts(config, rows, 1)
    assert found == pytest.approx(wanted, rel=0.01)
    busiest = scale_up.active_experts(config, rows, 8)
    assert wanted / 8 < busiest < wanted


def test_a_step_by_hand():
  config = load_config('single_head')
  weights = scale_up.Weights(
    replicated=100.0,
    split=80.0,
    head=40.0,
    embedding=1e9,
    expert=10.0,
    moe_layers=1,
  )
  cache = 28 * 2 * scale_up.CONTEXT
  moved = 100 + (80 + 40) / 4 + 10 + cache
  ms = moved / scale_up.BYTES_PER_SECOND * 1e3
  config = dataclasses.replace(config, n_routed_experts=8)
  assert scale_up.step_milliseconds(config, weights, 4, 1) == ms
  drafts = scale_up.step_milliseconds(config, weights, 4, 1, drafter=20.0)
  more = (40 + 20) / 4 / scale_up.BYTES_PER_SECOND * 1e3
  assert drafts == pytest.approx(ms + more)
