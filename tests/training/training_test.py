"""The loop on a tiny model: it learns, and resumes bit for bit."""

import dataclasses
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api
from kdtree_jax.config import ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.kdtr import read_bundle
from kdtree_jax.model import Transformer, init_cache
from kdtree_jax.modes import train_target
from kdtree_jax.named_configs import load_config, load_recipe
from kdtree_jax.training.build import build_corpus
from kdtree_jax.training.checkpoints import METRICS, Run
from kdtree_jax.training.corpus import read_corpus
from kdtree_jax.training.loop import Data, fit
from kdtree_jax.training.packing import gather_windows, pack, window_starts
from kdtree_jax.training.recipe import TrainRecipe
from kdtree_jax.training.target import (
  BIAS,
  TargetTask,
  balanced,
  compute_params,
  expert_loads,
  packed_forward,
  packed_logits,
)
from tests import support

END = 5
MODEL = ModelConfig(
  vocab_size=300,
  hidden_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
  q_lora_rank=None,
  kv_lora_rank=12,
  qk_nope_head_dim=8,
  qk_rope_head_dim=4,
  v_head_dim=10,
  intermediate_size=32,
  moe_intermediate_size=12,
  n_routed_experts=5,
  num_experts_per_tok=2,
  n_shared_experts=1,
  first_k_dense_replace=1,
  tie_word_embeddings=True,
  max_position_embeddings=64,
  eos_token_id=(0,),
)
RECIPE = TrainRecipe(
  steps=30,
  batch_size=4,
  sequence_length=33,
  learning_rate=1e-2,
  final_learning_rate=1e-4,
  warmup_steps=3,
  log_every=5,
  validate_every=15,
  validation_sequences=7,
  checkpoint_every=12,
)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  """Two hundred little programs of one form."""
  sources = tmp_path_factory.mktemp('sources')
  (sources / 'LICENSE').write_text('Apache License Version 2.0')
  rng = np.random.default_rng(0)
  for i in range(200):
    a, b, c = rng.integers(0, 1000, 3)
    names = [f'value_{n}' for n in (a, b, c)]
    (sources / f'file_{i}.py').write_text(
      f'"""Program {a}."""\n\n\ndef function_{a}({names[0]}, {names[1]}):\n'
      f'  {names[2]} = {names[0]} + {names[1]} * {b}\n'
      f'  for index_{c} in range({a}):\n    print(index_{c}, {names[2]})\n'
      f'  return {names[2]} - {names[0]} + {a * b}\n'
    )
  folder = tmp_path_factory.mktemp('corpus')
  build_corpus([str(sources)], folder, MODEL.vocab_size)
  return read_corpus(folder)


def windows(batch, length, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(6, MODEL.vocab_size, (batch, length + 1))
  ends = rng.random(tokens.shape) < 0.15
  return jnp.asarray(np.where(ends, END, tokens).astype(np.int32))


@jax.jit
def forward(params, batch):
  out = packed_forward(MODEL, params, batch)
  logits = packed_logits(MODEL, params, out.hidden)
  return logits, expert_loads(MODEL, out.routing)


def test_packed_documents_are_alone():
  batch = pack(windows(2, 37), END)
  params = support.target_of(MODEL).params
  packed = np.asarray(forward(params, batch)[0])
  segments, tokens = np.asarray(batch.segments), np.asarray(batch.tokens)
  assert segments.max() > 2
  model, checked = Transformer(MODEL), 0
  apply = jax.jit(model.apply, static_argnames='method')
  for row in range(2):
    for segment in (0, 2):
      where = np.flatnonzero(segments[row] == segment)
      assert (
        np.asarray(batch.positions)[row, where] == range(len(where))
      ).all()
      # Padded behind its end, which no causal token sees: one program.
      alone = np.zeros((1, 37), np.int32)
      alone[0, : len(where)] = tokens[row, where]
      out = apply(
        {'params': params},
        jnp.asarray(alone),
        jnp.arange(37, dtype=jnp.int32)[None],
        init_cache(MODEL, 1, 1, jnp.float32),
        jnp.ones((1, 37), bool),
      )
      logits = apply({'params': params}, out.hidden, method='logits')
      np.testing.assert_allclose(
        packed[row, where], logits[0, : len(where)], atol=2e-5, rtol=1e-4
      )
      checked += len(where)
  assert checked > 8


def test_labels_do_not_cross_documents():
  row = jnp.array([[7, 8, END, 9, END, 10, 11, 12]], jnp.int32)
  batch = pack(row, END)
  assert batch.labels.tolist() == [[8, END, 9, END, 10, 11, 12]]
  assert batch.counted.tolist() == [[1, 1, 0, 1, 0, 1, 1]]
  assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
  assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
  assert batch.ancestors[0, :, 0].tolist() == [1, 3, 7, 8, 24, 32, 96]


def test_every_window_once_an_epoch():
  length, batch, total = 10, 3, 10 * 14 + 1
  seen = []
  for step in range(4):
    seen += window_starts(total, length, batch, step, seed=1).tolist()
  assert len(set(seen)) == 12
  assert len({start % length for start in seen}) == 1
  assert max(seen) + length + 1 <= total
  again = window_starts(total, length, batch, 4, seed=1)
  assert set(again % length) != {seen[0] % length} or set(again) != set(
    seen[:3]
  )
  tokens = jnp.arange(total, dtype=jnp.uint16)
  rows = gather_windows(tokens, jnp.asarray(seen[:2], jnp.int32), length)
  assert rows[1].tolist() == list(range(seen[1], seen[1] + 11))
  with pytest.raises(UserError, match='training tokens'):
    window_starts(20, length, batch, 0, seed=1)


@pytest.mark.parametrize(
  'dtype', ('float32', pytest.param('bfloat16', marks=pytest.mark.slow))
)
def test_gradients_of_the_training_ops(dtype):
  """Against the gradients that JAX derives from the references."""
  batch = pack(windows(2, 19, seed=3), END)
  # Small weights, so that rounding changes no expert.
  params = jax.jit(TargetTask(MODEL, dtype, 0.0).init)(jax.random.key(1))

  def loss(params, implementation):
    cast = compute_params(params, jnp.dtype(dtype))
    out = packed_forward(MODEL, cast, batch, implementation=implementation)
    logits = packed_logits(MODEL, cast, out.hidden)
    return jnp.mean(jnp.sin(3 * logits))

  ours = jax.jit(jax.grad(loss), static_argnums=1)(params, 'training')
  bound = 2e-4 if dtype == 'float32' else 0.08
  # What float32 says, as far as bfloat16 can.
  dtype = 'float32'
  wanted = jax.jit(jax.grad(loss), static_argnums=1)(params, 'reference')
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(ours),
    jax.tree.leaves(wanted),
    strict=True,
  ):
    a, b = np.asarray(a), np.asarray(b)
    if path[-1].key == BIAS:
      assert not a.any()
    else:
      assert np.abs(a - b).max() <= bound * np.abs(b).max(), path


def test_training_ops_refuse_what_they_cannot():
  params = support.target_of(MODEL, seed=1).params
  model = Transformer(MODEL, implementation='training')
  zeros = jnp.zeros((1, 2), jnp.int32)
  with pytest.raises(ValueError, match='empty cache'):
    model.apply(
      {'params': params},
      zeros,
      zeros,
      init_cache(MODEL, 1, 4, jnp.float32),
      zeros == 0,
    )


def test_router_bias():
  params = support.target_of(MODEL).params
  old = params['layers_1']['mlp']['gate'][BIAS]
  loads = jnp.array([[4.0, 0.0, 2.0, 1.0, 3.0]])
  moved = balanced(MODEL, params, loads, 0.5)
  gate = moved['layers_1']['mlp']['gate']
  assert (gate[BIAS] - old).tolist() == pytest.approx([-0.5, 0.5, 0, 0.5, -0.5])
  assert params['layers_1']['mlp']['gate'][BIAS] is old
  _, counts = forward(params, pack(windows(2, 37), END))
  assert counts.shape == (1, 5) and counts.sum() == 2 * 37 * 2
  assert balanced(load_config('softmax_yarn'), params, loads, 1.0) is params


@pytest.fixture(scope='module')
def trained(corpus, tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  train_target.train('small', MODEL, RECIPE, corpus, folder)
  return folder


def test_it_learns(trained, corpus):
  records = [
    json.loads(x) for x in (trained / METRICS).read_text().splitlines()
  ]
  losses = [r['loss'] for r in records if 'loss' in r]
  assert losses[0] > 5 and losses[-1] < 0.7 * losses[0]
  valid = [r for r in records if 'validation_loss' in r]
  assert [r['step'] for r in valid] == [15, 30]
  assert valid[1]['validation_loss'] < valid[0]['validation_loss']
  last = records[-1]
  assert last['test_loss'] < losses[0]
  ratio = last['test_bits_per_byte'] / valid[1]['validation_bits_per_byte']
  assert 0.8 < ratio < 1.25
  steps = [r for r in records if 'gradient_norm' in r]
  assert all(r['tokens_per_second'] > 0 for r in steps)
  assert all(1 <= r['expert_load'] <= 2.5 for r in steps)


def test_the_bundle_is_what_was_trained(trained, corpus):
  target = api.load_target(trained / 'target.kdtr')
  assert target.config == MODEL and target.stop_ids == (0,)
  files = read_bundle(trained / 'target.kdtr').tokenizer
  assert files == {'tokenizer.json': corpus.tokenizer_path.read_bytes()}
  task = TargetTask(MODEL, 'bfloat16', 1e-3)
  run = Run(trained, train_target.run_identity(MODEL, RECIPE, corpus))
  data = Data(
    corpus.tokens('train'), corpus.tokens('validation'), corpus.end_of_text
  )
  # Nothing is left to do: the last checkpoint comes back.
  state = fit(
    task, RECIPE, data, run, constants=jnp.asarray(corpus.token_bytes)
  )
  run.close()
  assert int(state.step) == RECIPE.steps
  rounded = compute_params(state.params, jnp.bfloat16)
  for a, b in zip(
    jax.tree.leaves(rounded), jax.tree.leaves(target.params), strict=True
  ):
    assert np.array_equal(a.astype(jnp.float32), b)


def test_a_corpus_is_read_before_the_training(corpus, tmp_path, monkeypatch):
  """Hours later another may be in its place."""
  folder = shutil.copytree(corpus.folder, tmp_path / 'corpus')
  copy, written = read_corpus(folder), []

  def fit(*_, **__):
    shutil.rmtree(folder)
    return types.SimpleNamespace(params={})

  class Evaluated(Exception):
    pass

  def evaluate(params, tokens, constants):
    assert np.array_equal(tokens, corpus.tokens('test')[: len(tokens)])
    raise Evaluated

  monkeypatch.setattr(train_target, 'fit', fit)
  monkeypatch.setattr(train_target, 'target_tensors', lambda *_: {})
  monkeypatch.setattr(train_target, 'Evaluation', lambda *_: evaluate)
  monkeypatch.setattr(
    train_target, 'write_bundle', lambda _, bundle: written.append(bundle)
  )
  with pytest.raises(Evaluated):
    train_target.train('small', MODEL, RECIPE, copy, tmp_path / 'run')
  assert written[0].tokenizer == {
    'tokenizer.json': corpus.tokenizer_path.read_bytes()
  }
  assert copy.tokens('train') is copy.tokens('train')


def test_resume_is_bitwise(trained, corpus, tmp_path):
  identity = train_target.run_identity(MODEL, RECIPE, corpus)
  task = TargetTask(MODEL, 'bfloat16', RECIPE.router_bias_step)
  data = Data(
    corpus.tokens('train'), corpus.tokens('validation'), corpus.end_of_text
  )
  constants = jnp.asarray(corpus.token_bytes)
  run = Run(tmp_path / 'run', identity)
  state = fit(task, RECIPE, data, run, constants=constants, stop_after=17)
  run.close()
  assert int(state.step) == 17
  run = Run(tmp_path / 'run', identity)
  state = fit(task, RECIPE, data, run, constants=constants)
  run.close()
  whole = Run(trained, identity)
  wanted = whole.restore(state)
  whole.close()
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
    assert np.array_equal(a, b)
  steps = [(r['step'], 'loss' in r) for r in run.records]
  assert len(set(steps)) == len(steps) and steps[-1][0] == 30


def test_refusals(trained, corpus):
  other = dataclasses.replace(RECIPE, seed=1)
  with pytest.raises(UserError, match='another model, recipe or corpus'):
    train_target.train('small', MODEL, other, corpus, trained)
  model = dataclasses.replace(MODEL, vocab_size=301)
  with pytest.raises(UserError, match='300 tokens.*vocab_size=301'):
    train_target.check_fit(model, RECIPE, corpus)
  model = dataclasses.replace(MODEL, eos_token_id=(1,))
  with pytest.raises(UserError, match='texts end with 0'):
    train_target.check_fit(model, RECIPE, corpus)
  long = dataclasses.replace(RECIPE, batch_size=10**6)
  with pytest.raises(UserError, match='a step takes 1000000 sequences of 33'):
    train_target.check_fit(MODEL, long, corpus)
  model = dataclasses.replace(MODEL, max_position_embeddings=1 << 20)
  size = len(corpus.tokens('validation'))
  long = dataclasses.replace(RECIPE, batch_size=1, sequence_length=size)
  with pytest.raises(UserError, match=f'validation split has {size} tokens'):
    train_target.check_fit(model, long, corpus)
  with pytest.raises(UserError, match='--train_steps=0'):
    RECIPE.with_steps(0)
  assert RECIPE.with_steps(9).warmup_steps == 1
  assert RECIPE.with_steps(1).warmup_steps == 0
  with pytest.raises(UserError, match='has no RECIPE.*python_small'):
    load_recipe('tiny')
  with pytest.raises(UserError, match='warmup_steps=31'):
    dataclasses.replace(RECIPE, warmup_steps=31)


def test_the_shipped_recipe():
  config, recipe = load_recipe('python_small')
  count = support.huggingface.num_parameters(config)
  assert 6e6 <= count <= 7.9e6
  assert recipe.sequence_length <= config.max_position_embeddings
