"""The target against transformers' answers and the NumPy reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import generation
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decode import Engine, init_state
from kdtree_jax.decode.prefill import prefill
from kdtree_jax.model import Transformer, init_cache
from kdtree_jax.named_configs import config_names, load_config
from tests import support

TOLERANCE = 5e-5
NODE_TOLERANCE = 1e-5
# Chunks do not know the model: as loaded, and with quantised weights.
ALL_CHUNKS = ('deepseek_v3', 'kimi_k25_int4')
# AR of the others is tested against their traces, see `published_test`.
UNTRACED = tuple(n for n in support.FIXTURES if n not in support.TRACED)


def marked(names, usual):
  """Parameters of which all but the usual ones are slow."""
  return [
    name if name in usual else pytest.param(name, marks=pytest.mark.slow)
    for name in names
  ]


@pytest.mark.parametrize('name', support.FIXTURES)
def test_logits_are_those_of_transformers(name):
  """In several chunks, the last of them not full."""
  check_logits(name, 3)


@pytest.mark.parametrize('chunk', (1, 16))
@pytest.mark.parametrize('name', marked(support.FIXTURES, ALL_CHUNKS))
def test_logits_do_not_depend_on_the_chunk(name, chunk):
  check_logits(name, chunk)


def check_logits(name, chunk):
  target, wanted = support.fixture(name), support.expected(name)
  logits = generation.forward_logits(
    target, wanted['input_ids'], prefill_chunk=chunk
  )
  assert logits.dtype == np.float32
  assert support.relative_error(logits, wanted['logits']) < TOLERANCE


@pytest.mark.parametrize('name', marked(support.FIXTURES, UNTRACED))
def test_greedy_is_that_of_transformers(name):
  target, wanted = support.fixture(name), support.expected(name)
  prompt = wanted['input_ids']
  result = generation.generate(
    target, None, prompt, max_new_tokens=24, stop_ids=()
  )
  ids = [*result.prompt_ids, *result.output_ids]
  assert ids == wanted['greedy_ids'].tolist()


@pytest.mark.parametrize('name', config_names())
def test_every_layer_is_that_of_the_reference(name):
  """All layers as taps, then the logits, on the reduced variant."""
  config = load_config(name).reduced()
  target = support.target_of(config, seed=3)
  tokens = np.array(support.prompt_of(config, 11))
  wanted = support.reference_of(config, 3).forward(tokens, np.arange(11))
  model = Transformer(config, tap_layers=tuple(range(config.num_hidden_layers)))
  hidden, features = chain_forward(model, target.params, tokens)
  layers = np.split(np.asarray(features), config.num_hidden_layers, axis=-1)
  for i, (ours, theirs) in enumerate(zip(layers, wanted.layers, strict=True)):
    assert support.relative_error(ours, theirs) < TOLERANCE, f'layer {i}'
  variables = {'params': target.params}
  logits = model.apply(variables, hidden, method='logits')
  assert support.relative_error(np.asarray(logits), wanted.logits) < TOLERANCE


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens, ancestors, valid, positions):
  cache = init_cache(model.config, 1, 1, jnp.float32)
  out = model.apply(
    {'params': params}, tokens, positions, cache, valid, ancestors
  )
  return out.hidden[0], out.features[0]


def chain_forward(model, params, tokens, ancestors=None, valid=None):
  tokens = jnp.asarray(tokens, jnp.int32)[None]
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  if valid is None:
    valid = jnp.ones(tokens.shape, jnp.bool_)
  return _forward(model, params, tokens, ancestors, valid, positions)


@pytest.mark.parametrize(
  'name', marked(('tiny', 'half_split', 'softmax_yarn'), ('half_split',))
)
def test_taps_keep_order_and_repeats(name):
  config = load_config(name).reduced()
  target = support.target_of(config)
  tokens = support.prompt_of(config, 5)
  last = config.num_hidden_layers - 1
  _, every = chain_forward(
    Transformer(config, tap_layers=tuple(range(last + 1))),
    target.params,
    tokens,
  )
  layers = np.split(np.asarray(every), last + 1, axis=-1)
  _, taps = chain_forward(
    Transformer(config, tap_layers=(last, 0, last)), target.params, tokens
  )
  wanted = np.concatenate([layers[last], layers[0], layers[last]], axis=-1)
  assert np.array_equal(taps, wanted)


def triangular_bits(n):
  words = (n + 31) // 32
  bits = np.zeros((1, n, words), np.uint32)
  for i in range(n):
    for j in range(i + 1):
      bits[0, i, j // 32] |= np.uint32(1 << (j % 32))
  return jnp.asarray(bits)


def test_chain_tree_is_causal_decoding_bitwise():
  """n = 33 needs two words of bits."""
  config = load_config('grouped_yarn').reduced()
  target = support.target_of(config)
  tokens = support.prompt_of(config, 33)
  model = Transformer(config, tap_layers=(0,))
  causal = chain_forward(model, target.params, tokens)
  tree = chain_forward(model, target.params, tokens, triangular_bits(33))
  for a, b in zip(causal, tree, strict=True):
    assert np.array_equal(a, b)


def test_first_visible_key_matters():
  """The mask is read: hiding node 0 from the last row must change it."""
  config = load_config('tiny').reduced()
  target = support.target_of(config)
  tokens = support.prompt_of(config, 6)
  model = Transformer(config)
  full = triangular_bits(6)
  hidden, _ = chain_forward(model, target.params, tokens, full)
  blind = full.at[0, 5, 0].set(full[0, 5, 0] & ~jnp.uint32(1))
  other, _ = chain_forward(model, target.params, tokens, blind)
  assert np.array_equal(hidden[:5], other[:5])
  assert not np.allclose(hidden[5], other[5], rtol=1e-3)


@pytest.mark.parametrize('name', ('tiny', 'group_limited', 'many_heads'))
def test_padding_changes_no_bit(name):
  """Rows marked invalid may hold NaN: no row that is real may notice."""
  config = load_config(name).reduced()
  target = support.target_of(config)
  poisoned = jax.tree.map(lambda x: x, target.params)
  table = np.asarray(poisoned['embed_tokens']['weight']).copy()
  poison = config.vocab_size - 1
  table[poison] = np.nan
  poisoned['embed_tokens']['weight'] = jnp.asarray(table)
  tokens = [t % poison for t in support.prompt_of(config, 9)]
  model = Transformer(config)
  bits = triangular_bits(9).at[:, 6:].set(jnp.uint32(0))
  valid = jnp.asarray(np.arange(9) < 6)[None]
  clean, _ = chain_forward(model, target.params, tokens, bits, valid)
  tokens[6:] = [poison] * 3
  dirty, _ = chain_forward(model, poisoned, tokens, bits, valid)
  assert np.array_equal(clean[:6], dirty[:6])
  assert np.isnan(dirty[6:]).any()


def test_batch_rows_equal_their_single_runs():
  """Prompts of 1, 7 and 17 tokens in one prefill of chunks of 4."""
  target = support.variant('grouped_yarn')
  prompts = [support.prompt_of(target.config, n, seed=n) for n in (1, 7, 17)]
  params = {'target': target.params, 'drafter': {}}
  decode = DecodeConfig(
    tree_budget=0, draft_depth=0, capacity=20, prefill_chunk=4
  )
  engine = Engine(target.config, None, decode)
  fill = jax.jit(prefill, static_argnums=0)

  def filled(rows):
    state = init_state(engine, rows, [2] * len(rows), (), jnp.float32)
    return fill(engine, params, state)

  together = filled(prompts)
  for b, prompt in enumerate(prompts):
    alone = filled([prompt])
    n = len(prompt)
    assert int(together.length[b]) == n
    assert np.array_equal(together.tokens[b, : n + 1], alone.tokens[0, : n + 1])
    rows = np.asarray(together.cache.latent[:, b, :n])
    wanted = np.asarray(alone.cache.latent[:, 0, :n])
    assert support.relative_error(rows, wanted) < NODE_TOLERANCE
