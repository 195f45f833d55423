"""The real models in configs/: sizes by abstract evaluation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.errors import UserError
from kdtree_jax.io.huggingface import (
  Extras,
  match_target,
  num_parameters,
  tensor_shapes,
)
from kdtree_jax.io.quantization import Quantization
from kdtree_jax.io.tensors import ITEM_BYTES
from kdtree_jax.model.rope import amplitude, inverse_frequencies
from kdtree_jax.model.transformer import abstract_params
from kdtree_jax.modes.make_bundle import make_bundle
from kdtree_jax.named_configs import config_names, load_config
from tests import support

# Billions of parameters, multi-token layers left out, as their authors count;
# and the softmax scale that the published code arrives at.
PUBLISHED = {
  'deepseek_v3': (671.0, 0.135234),
  'kimi_k2_6': (1026.4, 0.144680),
  'moonlight': (15.96, 0.072169),
  'deepseek_v2_lite': (15.71, 0.114721),
  'glm_4_7_flash': (29.94, 0.0625),
}


# Sixty layers take seconds to count; what they consist of, the others do too.
LARGE = ('kimi_k2_6', 'deepseek_v3')


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE))
    for name in PUBLISHED
  ],
)
def test_a_real_model_has_its_published_size(name):
  config = load_config(name)
  billions, scale = PUBLISHED[name]
  leaves = jax.tree.leaves(abstract_params(config, jnp.bfloat16))
  count = sum(math.prod(leaf.shape) for leaf in leaves)
  assert count == num_parameters(config)
  digits = len(str(billions).split('.')[1])
  assert round(count / 1e9, digits) == billions
  assert config.softmax_scale == pytest.approx(scale, abs=1e-6)
  assert amplitude(config.rope_scaling) == 1
  reduced = config.reduced()
  assert num_parameters(reduced) < 1e6
  assert (reduced.q_lora_rank is None) == (config.q_lora_rank is None)


@pytest.mark.parametrize(
  ('name', 'low', 'high'), [('deepseek_v3', 10, 23), ('kimi_k2_6', 8, 20)]
)
def test_where_yarn_begins_and_ends(name, low, high):
  config = load_config(name)
  yarn, dim = config.rope_scaling, config.qk_rope_head_dim
  scaled = inverse_frequencies(dim, config.rope_theta, yarn)
  plain = inverse_frequencies(dim, config.rope_theta, None)
  kept = np.flatnonzero(np.isclose(scaled, plain, rtol=1e-6))
  divided = np.flatnonzero(np.isclose(scaled * yarn.factor, plain, rtol=1e-6))
  assert kept.max() == low and divided.min() == high


def test_a_real_model_is_no_bundle():
  ours = {*support.SMALL, *support.TRAINED}
  assert set(PUBLISHED) == set(config_names()) - ours
  with pytest.raises(UserError, match='moonlight has 15,960,110,208 param'):
    make_bundle('moonlight')


class Headers:
  """A checkpoint of which there is nothing but names, shapes and dtypes."""

  def __init__(self, entries):
    self.entries = entries

  def names(self):
    return tuple(self.entries)

  def dtype(self, name):
    return self.entries[name][0]

  def shape(self, name):
    return self.entries[name][1]

  def bytes(self):
    return sum(
      math.prod(shape) * ITEM_BYTES[dtype]
      for dtype, shape in self.entries.values()
    )


def headers(config, quantization, prefix=''):
  """What the real repository holds, as FORMATS describes it."""
  entries = {}
  for name, shape in tensor_shapes(config).items():
    int4 = quantization.format == 'int4' and '.mlp.experts.' in name
    fp8 = quantization.format == 'fp8' and ('_proj.' in name or '_mqa.' in name)
    name = prefix + name
    if int4:
      rows, columns = shape
      entries[name + '_packed'] = ('I32', (rows, columns // 8))
      entries[name + '_scale'] = ('BF16', (rows, columns // 32))
      entries[name + '_shape'] = ('I32', (2,))
    elif fp8:
      scales = tuple(-(-size // 128) for size in shape)
      entries[name] = ('F8_E4M3', shape)
      entries[name + '_scale_inv'] = ('F32', scales)
    else:
      entries[name] = ('F32' if '.e_score' in name else 'BF16', shape)
  return Headers(entries)


@pytest.mark.parametrize(
  ('name', 'quantization', 'prefix', 'gib'),
  [
    # The repository, vision included, has 554.3 GiB.
    ('kimi_k2_6', Quantization('int4', (1, 32)), 'language_model.', 553.4),
    ('deepseek_v3', Quantization('fp8', (128, 128)), '', 626.8),
  ],
)
def test_the_tensors_of_a_real_repository(name, quantization, prefix, gib):
  config = load_config(name)
  source = headers(config, quantization, prefix)
  junk = {
    f'{prefix}model.layers.61.{part}.weight'
    for part in ('eh_proj', 'enorm', 'hnorm')
  }
  source.entries |= dict.fromkeys(junk, ('BF16', (config.hidden_size,)))
  match = match_target(
    config,
    source,
    source_name=name,
    quantization=quantization,
    extras=Extras(mtp_layers=1),
  )
  assert set(match.names.values()) == set(source.names()) - junk
  assert source.bytes() / 2**30 == pytest.approx(gib, rel=2e-3)
