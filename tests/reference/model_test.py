"""The reference's model against transformers, and its own contracts."""

import ast
import math
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import reference
from kdtree_jax.reference import layers as ops
from kdtree_jax.reference.model import is_sparse, route
from tests.reference import fixtures

TOLERANCE = 5e-5
PACKAGE = pathlib.Path(reference.__file__).parent


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
  return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize('name', fixtures.TARGETS)
def test_logits_and_greedy_ids_match_transformers(name):
  model, expected = fixtures.load_model(name), fixtures.load_expected(name)
  prompt = expected['input_ids']
  out = model.forward(prompt, range(len(prompt)))
  assert relative_error(out.logits, expected['logits']) < TOLERANCE
  generated = expected['greedy_ids'][len(prompt) :]
  tokens = reference.greedy(model, prompt, len(generated))
  np.testing.assert_array_equal(tokens, generated)


@pytest.mark.parametrize('name', fixtures.TARGETS)
def test_latent_eps_shows(name):
  expected = fixtures.load_expected(name)
  model = fixtures.load_model(name)
  other = reference.ReferenceModel(
    model.config | {'latent_norm_eps': 1e-5}, model.tensors
  )
  prompt = expected['input_ids']
  out = other.forward(prompt, range(len(prompt)))
  assert relative_error(out.logits, expected['logits']) > 10 * TOLERANCE


def random_model(seed: int = 0, **changes) -> reference.ReferenceModel:
  config = fixtures.tiny_config(**changes)
  tensors = reference.random_tensors(config, seed)
  return reference.ReferenceModel(config, tensors)


def test_chunks_equal_one_forward_and_leave_the_cache_alone():
  model = random_model()
  tokens = np.random.default_rng(1).integers(64, size=13)
  whole = model.forward(tokens, range(13))
  cache = reference.ListCache(model.config)
  for start, end in ((0, 1), (1, 6), (6, 13)):
    out = model.forward(tokens[start:end], range(start, end), cache)
    assert len(cache) == start
    assert relative_error(out.logits, whole.logits[start:end]) < 1e-5
    for mine, theirs in zip(out.layers, whole.layers, strict=True):
      assert relative_error(mine, theirs[start:end]) < 1e-5
    cache.append(out.rows, range(end - start))


def test_tree_nodes_equal_their_own_paths():
  model = random_model()
  rng = np.random.default_rng(2)
  prompt = rng.integers(64, size=7)
  cache = reference.ListCache(model.config)
  cache.append(model.forward(prompt, range(7)).rows, range(7))
  parents = [-1, 0, 0, 1, 1, 4, 2]
  tree = reference.make_tree(rng.integers(64, size=7), parents, range(7))
  out = model.forward(
    tree.tokens, len(cache) + tree.depths, cache, tree.visibility
  )
  for node in range(7):
    path = np.flatnonzero(tree.visibility[node])
    alone = np.concatenate([prompt, tree.tokens[path]])
    expected = model.forward(alone, range(len(alone))).logits[-1]
    assert relative_error(out.logits[node], expected) < 1e-5

  accepted = [0, 1, 4, 5]
  cache.append(out.rows, accepted)
  text = np.concatenate([prompt, tree.tokens[accepted]])
  rows = model.forward(text, range(len(text))).rows
  for layer, (latent, k_rope) in enumerate(rows):
    assert relative_error(cache[layer][0], latent) < 1e-5
    assert relative_error(cache[layer][1], k_rope) < 1e-5


@pytest.mark.filterwarnings('ignore:invalid value')
def test_a_node_that_is_not_finite_stays_alone():
  model = fixtures.load_model('deepseek_v3')
  name = 'model.embed_tokens.weight'
  table = model.tensors[name].copy()
  table[7] = np.nan
  spoilt = reference.ReferenceModel(
    model.config, {**model.tensors, name: table}
  )
  tokens, visible = [3, 7, 9, 4], np.eye(4, dtype=bool)
  visible[:, 0] = visible[3, 2] = True
  clean, out = (
    m.forward(tokens, [0, 1, 1, 2], visible=visible) for m in (model, spoilt)
  )
  others = [0, 2, 3]
  # Rows that share an expert share a product, whose rounding shifts with them.
  assert relative_error(out.logits[others], clean.logits[others]) < 1e-5
  assert np.isnan(out.logits[1]).all()


def test_half_split_equals_pairs_after_permuting_the_weights():
  pairs = random_model()
  rope, nope, rank = 8, 12, 16
  order = np.r_[0:rope:2, 1:rope:2]
  tensors = dict(pairs.tensors)
  for name, value in pairs.tensors.items():
    if 'kv_a_proj' in name:
      tensors[name] = value[np.r_[:rank, rank + order]]
    elif 'q_b_proj' in name:
      heads = value.reshape(2, nope + rope, -1)
      permuted = heads[:, np.r_[:nope, nope + order]]
      tensors[name] = permuted.reshape(value.shape)
  config = pairs.config | {'rope_interleave': False}
  halves = reference.ReferenceModel(config, tensors)
  tokens = np.arange(20)
  assert (
    relative_error(
      halves.forward(tokens, tokens).logits,
      pairs.forward(tokens, tokens).logits,
    )
    < 1e-5
  )


def test_fused_experts_equal_single_ones():
  single = random_model()
  tensors = dict(single.tensors)
  prefix = 'model.layers.1.mlp.experts.'
  stacks = {
    kind: np.stack(
      [tensors.pop(f'{prefix}{j}.{kind}.weight') for j in range(8)]
    )
    for kind in ('gate_proj', 'up_proj', 'down_proj')
  }
  tensors[prefix + 'gate_up_proj'] = np.concatenate(
    [stacks['gate_proj'], stacks['up_proj']], axis=1
  )
  tensors[prefix + 'down_proj'] = stacks['down_proj']
  fused = reference.ReferenceModel(single.config, tensors)
  tokens = np.arange(9)
  np.testing.assert_array_equal(
    fused.forward(tokens, tokens).logits,
    single.forward(tokens, tokens).logits,
  )


@pytest.mark.parametrize(
  'scaling, dim, theta, low, high',
  [
    # Published settings: DeepSeek-V3, Kimi-K2, Kimi-K2.5, its drafter.
    (dict(factor=40, beta_fast=32, beta_slow=1), 64, 1e4, 10, 23),
    (dict(factor=32, beta_fast=1, beta_slow=1), 64, 5e4, 19, 20),
    (dict(factor=64, beta_fast=32, beta_slow=1), 64, 5e4, 8, 20),
    (dict(factor=64, beta_fast=32, beta_slow=1), 128, 5e4, 17, 39),
  ],
)
def test_yarn_ramp(scaling, dim, theta, low, high):
  scaling = scaling | {'original_max_position_embeddings': 4096}
  plain = ops.inverse_frequencies(dim, theta, None)
  ratio = ops.inverse_frequencies(dim, theta, scaling) / plain
  np.testing.assert_allclose(ratio[: low + 1], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[high:], 1 / scaling['factor'], rtol=1e-6)
  between = ratio[low : high + 1]
  assert (np.diff(between) < 0).all()


def test_yarn_amplitude():
  assert ops.rope_amplitude(None) == 1
  base = {'factor': 64.0, 'mscale': 1.0, 'mscale_all_dim': 1.0}
  assert ops.rope_amplitude(base) == 1
  alone = 0.1 * math.log(64) + 1
  assert ops.rope_amplitude(base | {'mscale': None}) == pytest.approx(alone)
  assert ops.rope_amplitude(base | {'attention_factor': 1.3}) == 1.3


def router_config(**changes) -> dict:
  return fixtures.tiny_config(n_group=4, topk_group=2, **changes)


def test_selection_bias_chooses_but_does_not_weigh():
  config = router_config(norm_topk_prob=False, routed_scaling_factor=1.0)
  logits = np.zeros((1, 8), np.float32)
  bias = np.float32([0, 0, 3, 0, 0, 0, 0, 2])
  indices, weights = route(config, logits, bias)
  np.testing.assert_array_equal(indices, [[2, 7]])
  np.testing.assert_allclose(weights, 0.5)


def test_masked_groups_stay_out_when_every_biased_score_is_negative():
  logits = np.zeros((1, 8), np.float32)
  bias = np.float32([-9, -9, -8, -8, -7, -9, -9, -9])
  indices, _ = route(router_config(num_experts_per_tok=4), logits, bias)
  assert sorted(indices[0]) == [2, 3, 4, 5]


def test_group_limited_greedy_ranks_groups_by_their_maximum():
  config = router_config(
    topk_method='group_limited_greedy', scoring_func='softmax'
  )
  logits = np.float32([[5, 0, 4, 4, 3, 3, 6, 0]])
  indices, _ = route(config, logits, None)
  np.testing.assert_array_equal(indices, [[6, 0]])


def test_router_ties_go_to_the_lowest_index():
  logits = np.zeros((3, 8), np.float32)
  indices, _ = route(router_config(), logits, np.zeros(8, np.float32))
  np.testing.assert_array_equal(indices, [[0, 1]] * 3)


def test_layer_kinds():
  config = fixtures.tiny_config(moe_layer_freq=2)
  assert [is_sparse(config, i) for i in range(5)] == [0, 0, 1, 0, 1]
  config['mlp_layer_types'] = ['sparse', 'dense']
  assert [is_sparse(config, i) for i in range(2)] == [1, 0]
  config['n_routed_experts'] = 0
  assert not is_sparse(config, 0)


def test_a_row_that_sees_nothing_is_zero():
  probs = ops.masked_softmax(np.ones((2, 3)), np.zeros((2, 3), bool))
  np.testing.assert_array_equal(probs, np.zeros((2, 3)))


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'q_lora_rank': None, 'n_shared_experts': 0, 'rope_interleave': False},
    {'num_hidden_layers': 1, 'num_attention_heads': 1},
    {'n_routed_experts': 0, 'tie_word_embeddings': True},
    {'attention_bias': True, 'first_k_dense_replace': 0},
    {
      'topk_method': 'group_limited_greedy',
      'scoring_func': 'softmax',
      'norm_topk_prob': False,
      'n_group': 4,
      'topk_group': 2,
    },
  ],
)
def test_random_tensors_and_golden(changes):
  config = fixtures.tiny_config(**changes)
  tensors = reference.random_tensors(config, seed=3)
  again = reference.random_tensors(config, seed=3)
  for name, value in tensors.items():
    np.testing.assert_array_equal(value, again[name])
    single = name.endswith('e_score_correction_bias')
    assert value.dtype == (np.float32 if single else ml_dtypes.bfloat16)
  has_bias = any(n.endswith('e_score_correction_bias') for n in tensors)
  sparse = any(is_sparse(config, i) for i in range(config['num_hidden_layers']))
  assert has_bias == (sparse and config['topk_method'] == 'noaux_tc')

  golden = reference.make_golden(config, tensors, 5, 7, seed=4)
  layers = config['num_hidden_layers']
  assert golden['prompt'].shape == (5,)
  assert golden['ar_tokens'].shape == (7,)
  assert golden['layers'].shape == (layers, 5, 48)
  assert golden['logits'].shape == (5, 64)
  assert golden['ar_tokens'][0] == golden['logits'][-1].argmax()
  assert golden['prompt'].dtype == golden['ar_tokens'].dtype == np.int32
  assert golden['layers'].dtype == golden['logits'].dtype == np.float32


def test_random_text_varies_and_has_clear_gaps():
  config = fixtures.tiny_config(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=512,
    moe_intermediate_size=96,
  )
  model = reference.ReferenceModel(config, reference.random_tensors(config, 0))
  prompt = list(range(32))
  tokens = reference.greedy(model, prompt, 128)
  assert len(set(tokens)) >= 60
  out = model.forward(prompt + tokens, range(160))
  highest = np.sort(out.logits[31:-1], axis=-1)[:, -2:]
  assert (highest[:, 1] - highest[:, 0]).min() > 5e-4


@pytest.mark.parametrize(
  'path', sorted(PACKAGE.glob('*.py')), ids=lambda p: p.name
)
def test_imports_only_the_standard_library_numpy_and_ml_dtypes(path):
  allowed = set(sys.stdlib_module_names) | {'numpy', 'ml_dtypes'}
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0
      names = [node.module]
    else:
      continue
    for name in names:
      inside = f'{name}.'.startswith('kdtree_jax.reference.')
      assert inside or name.split('.')[0] in allowed, (path.name, name)
