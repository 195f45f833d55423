"""Every variant's bundle: the engine against its golden answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.api import bundled
from kdtree_jax.io.kdtr import read_bundle, write_bundle
from kdtree_jax.model import Transformer, init_cache
from kdtree_jax.modes.make_bundle import make_bundle
from tests import support

GOLDEN_TOKENS = 40


@functools.cache
def bundle_of(name):
  return make_bundle(name)


# Reduced, they go through the losslessness matrix; their layers are like those
# of the other variants.
LARGE = ('half_split', 'many_heads', 'softmax_yarn')


@pytest.fixture(
  scope='module',
  params=[
    pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE))
    for name in support.SMALL
  ],
)
def target(request, tmp_path_factory):
  path = tmp_path_factory.mktemp('bundle') / 'variant.kdtr'
  write_bundle(path, bundle_of(request.param))
  return api.load_target(path)


def test_layers_are_golden(target):
  config, golden = target.config, target.golden
  taps = tuple(range(config.num_hidden_layers))
  model = Transformer(config, tap_layers=taps)

  @jax.jit
  def forward(params, tokens):
    cache = init_cache(config, 1, 1, jnp.float32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    valid = jnp.ones(tokens.shape, jnp.bool_)
    out = model.apply({'params': params}, tokens, positions, cache, valid)
    return out.features[0]

  features = forward(target.params, jnp.asarray(golden['prompt'])[None])
  layers = np.split(np.asarray(features), len(taps), axis=-1)
  for i, layer in enumerate(layers):
    wanted = golden['layers'][i]
    assert support.relative_error(layer, wanted) < 5e-5, f'layer {i}'


def check_tokens(target, drafter):
  golden = target.golden
  result = generation.generate(
    target,
    drafter,
    golden['prompt'],
    max_new_tokens=GOLDEN_TOKENS,
    tree_budget=11,
    golden_ids=[*golden['prompt'], *golden['ar_tokens']],
  )
  assert result.output_ids == golden['ar_tokens'][:GOLDEN_TOKENS].tolist()
  return result


def test_tokens_are_golden(target):
  """The target's own choices: an oracle that erred would be refused."""
  result = check_tokens(target, api.load_drafter('oracle', target, 7))
  assert result.acceptance_lengths == [7] * 6


@pytest.mark.slow
def test_autoregressive_tokens_are_golden(target):
  """Nearly covered: by the test above, and AR by `lossless_test`."""
  check_tokens(target, None)


def test_autoregressive_tokens_of_the_shipped_bundle():
  check_tokens(api.load_target(bundled('tiny')), None)


def test_the_shipped_bundle_is_what_the_generator_makes(tmp_path):
  path = tmp_path / 'tiny.kdtr'
  write_bundle(path, bundle_of('tiny'))
  shipped = bundled('tiny')
  assert shipped.stat().st_size <= 8 * 2**20
  ours, theirs = read_bundle(path), read_bundle(shipped)
  assert ours.config == theirs.config and ours.recipe == theirs.recipe
  for name, tensor in theirs.target.items():
    assert np.array_equal(ours.target[name], tensor), name
  tokens = [bundle.golden['ar_tokens'] for bundle in (ours, theirs)]
  assert np.array_equal(*tokens)


def test_variants_differ_in_every_dimension():
  """Nothing can be hard-coded: no two variants share a size."""
  configs = [read_config(name) for name in support.SMALL]
  assert len(configs) >= 8
  for field in (
    'vocab_size',
    'hidden_size',
    'kv_lora_rank',
    'qk_nope_head_dim',
    'qk_rope_head_dim',
    'v_head_dim',
    'num_attention_heads',
    'intermediate_size',
    'max_position_embeddings',
  ):
    values = [getattr(config, field) for config in configs]
    assert len(set(values)) >= len(values) - 2, field


def read_config(name):
  from kdtree_jax.named_configs import load_config

  return load_config(name)
