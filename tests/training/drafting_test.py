"""The parallel forward over many anchors is the engine's drafting, and its
loss teaches.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api
from kdtree_jax.config import SLIDING
from kdtree_jax.drafters.dflash import DFlashDrafter
from kdtree_jax.model import Transformer
from kdtree_jax.training import drafting
from kdtree_jax.training.packing import pack, packed_forward
from tests import support

NAME = 'deepseek_v3_trained_drafter'
END = 5
SLIDES = {'layer_types': (SLIDING, 'full_attention'), 'sliding_window': 4}
VARIANTS = {
  'plain': {},
  'causal': {'causal': True},
  'sliding': SLIDES,
  'sliding, from the root': {
    **SLIDES,
    'causal': False,
    'window_from_root': True,
  },
}


def trained():
  """Target, drafter and its parameters."""
  target = support.fixture(NAME)
  loaded = api.load_drafter(support.DATA / NAME / 'dflash', target)
  return target, loaded.drafter, loaded.params


def sequences():
  """`[2, 29]`: documents of 11, 7 and 11, and of 29 tokens."""
  rng = np.random.default_rng(3)
  tokens = rng.integers(6, 60, (2, 29)).astype(np.int32)
  tokens[0, [10, 17]] = END
  return tokens


def engine_draft(target, drafter, params, document, root):
  """Draft logits `[D, V]` at a root by way of commit and draft."""
  model = Transformer(target.config, drafter.tap_layers)
  packed = pack(jnp.asarray(document[None, :root]), -1)
  features = packed_forward(model, target.params, packed).features
  state = drafter.init_state(1, 48, jnp.float32)
  # Rows behind the committed ones are never read.
  state = state.replace(context=state.context.at[:, :, root:].set(jnp.nan))
  zero = jnp.zeros((1,), jnp.int32)
  state = drafter.commit(params, state, features, zero)
  tokens = jnp.asarray(np.pad(document, (0, 16)))[None]
  head = drafting.target_head(model, target.params)
  return drafter.draft(params, state, tokens, zero + root, head)[0]


def parallel_draft(target, drafter, params, tokens, anchors):
  model = Transformer(target.config, drafter.tap_layers)
  packed = pack(jnp.asarray(tokens), END)
  features = packed_forward(model, target.params, packed).features
  head = drafting.target_head(model, target.params)
  index = jnp.asarray(anchors, jnp.int32)
  anchors = drafting.Anchors(index, jnp.ones_like(index, jnp.bool_))
  return drafting.draft_logits(drafter, params, head, features, packed, anchors)


@pytest.mark.parametrize('variant', VARIANTS)
def test_every_anchor_drafts_as_the_engine_does(variant):
  target, drafter, params = trained()
  config = dataclasses.replace(drafter.config, **VARIANTS[variant])
  drafter = DFlashDrafter(config, 6)
  tokens = sequences()
  # The first of a document and the last of the sequence are anchors, too.
  anchors = [[3, 9, 10, 12, 15, 20, 28], [1, 2, 7, 13, 17, 27, 28]]
  logits = parallel_draft(target, drafter, params, tokens, anchors)
  assert logits.shape == (2, 7, 5, 64)
  begins = [[0] * 3 + [11] * 2 + [18] * 2, [0] * 7]
  for row in range(2):
    for i, (begin, at) in enumerate(
      zip(begins[row], anchors[row], strict=True)
    ):
      wanted = engine_draft(
        target, drafter, params, tokens[row, begin:], at - begin
      )
      assert support.relative_error(logits[row, i], wanted) < 1e-5
