"""A tiny target and then its drafter learn; a run resumes bit for bit."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.config import ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.convert import read_drafter
from kdtree_jax.io.digests import tokenizer_digest
from kdtree_jax.io.export import write_checkpoint
from kdtree_jax.io.kdtr import Bundle, write_bundle
from kdtree_jax.io.unload import target_tensors
from kdtree_jax.modes import convert, train_drafter
from kdtree_jax.modes.loading import check_pair
from kdtree_jax.training import drafter as training_drafter
from kdtree_jax.training import rollouts
from kdtree_jax.training.checkpoints import METRICS, Run
from kdtree_jax.training.corpus import Corpus
from kdtree_jax.training.drafter import DraftTask, drafter_config
from kdtree_jax.training.loop import Data, fit, init_state
from kdtree_jax.training.packing import pack
from kdtree_jax.training.recipe import DrafterRecipe, TrainRecipe
from kdtree_jax.training.streams import read_arrays
from kdtree_jax.training.target import TargetTask
from tests import support
from tests.command_line import mode_flags

MODEL = ModelConfig(
  vocab_size=40,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  q_lora_rank=None,
  kv_lora_rank=12,
  qk_nope_head_dim=8,
  qk_rope_head_dim=8,
  v_head_dim=8,
  intermediate_size=48,
  moe_intermediate_size=16,
  n_routed_experts=4,
  num_experts_per_tok=2,
  n_shared_experts=1,
  first_k_dense_replace=1,
  max_position_embeddings=64,
)
TARGET_RECIPE = TrainRecipe(
  steps=100,
  batch_size=16,
  sequence_length=32,
  learning_rate=1e-2,
  final_learning_rate=1e-4,
  warmup_steps=10,
  compute_dtype='float32',
  validate_every=1000,
  checkpoint_every=1000,
)
RECIPE = DrafterRecipe(
  steps=100,
  batch_size=16,
  sequence_length=32,
  learning_rate=1e-2,
  final_learning_rate=1e-4,
  warmup_steps=10,
  compute_dtype='float32',
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=16,
  intermediate_size=48,
  block_size=5,
  target_layer_ids=(0, 1),
  anchors=8,
  gamma=4.0,
  rollouts=16,
  rollout_tokens=20,
  prompt_tokens=(10, 8),
  validation_rollouts=16,
  validation_sequences=16,
  validate_every=1000,
  checkpoint_every=30,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Counting(Corpus):
  """Documents that count on by a step of their own, modulo 37."""

  def tokens(self, split):
    rng = np.random.default_rng(len(split))
    documents = []
    for _ in range(300):
      start, step, length = rng.integers((0, 1, 12), (37, 5, 25))
      documents += [(start + step * np.arange(length)) % 37 + 2, [0]]
    return np.concatenate(documents).astype(np.uint16)


CORPUS = Counting(pathlib.Path('counting'), {}, 40, 0, 1, np.ones(40, np.int32))


@functools.cache
def trained_target(folder):
  data = Data(CORPUS.tokens('train'), CORPUS.tokens('validation'), 0)
  task = TargetTask(MODEL, 'float32', 1e-3)
  run = Run(folder / 'target', {})
  state = fit(
    task, TARGET_RECIPE, data, run, constants=jnp.asarray(CORPUS.token_bytes)
  )
  run.close()
  return api.Target('tiny', MODEL, state.params, jnp.float32, (), {})


@pytest.fixture(scope='module')
def target(tmp_path_factory):
  return trained_target(tmp_path_factory.mktemp('target'))


@pytest.fixture(scope='module')
def output(target, tmp_path_factory):
  """A whole run."""
  folder = tmp_path_factory.mktemp('drafter') / 'run'
  train_drafter.train(target, CORPUS, RECIPE, folder)
  return folder


def mean_acceptance(target, drafter, policy, budget):
  """On greedy continuations of texts that nobody was trained on."""
  stream = CORPUS.tokens('test')
  prompts = rollouts.choose_prompts(stream, 0, 8, 8, 7)
  results = generation.generate_batch(
    target,
    drafter,
    prompts,
    max_new_tokens=24,
    tree_policy=policy,
    tree_budget=budget,
  )
  lengths = [x for r in results for x in r.acceptance_lengths]
  return np.mean(lengths)


def test_the_loss_falls_and_the_drafts_are_accepted(target, output):
  records = [json.loads(x) for x in (output / METRICS).read_text().splitlines()]
  losses = [r['loss'] for r in records if 'loss' in r]
  assert losses[-1] < 0.75 * losses[0]
  trained = api.load_drafter(output / 'drafter', target)
  config = drafter_config(RECIPE, MODEL, CORPUS.mask)
  assert trained.drafter.config == config
  params = init_state(DraftTask(RECIPE, MODEL, config), RECIPE).params
  untrained = api.LoadedDrafter('untrained', trained.drafter, params)
  before = mean_acceptance(target, untrained, 'best_first', 16)
  after = mean_acceptance(target, trained, 'best_first', 16)
  assert after > before + 1
  last = records[-1]
  assert 1 < last['greedy_acceptance_length_chain'] <= 5
  assert (
    last['greedy_acceptance_length_chain']
    <= last['greedy_acceptance_length_tree_16']
    <= last['greedy_acceptance_length_tree_64']
  )
  assert len(last['greedy_accuracy']) == 4


def test_a_stopped_run_goes_on_bit_for_bit(target, output, tmp_path):
  folder = tmp_path / 'run'
  train_drafter.train(target, CORPUS, RECIPE, folder, stop_after=50)
  assert not (folder / 'drafter').exists()
  train_drafter.train(target, CORPUS, RECIPE, folder)
  name = 'drafter/model.safetensors'
  assert (folder / name).read_bytes() == (output / name).read_bytes()
  # A finished run has nothing left to do.
  before = (folder / METRICS).read_bytes()
  train_drafter.train(target, CORPUS, RECIPE, folder)
  assert (folder / METRICS).read_bytes() == before
  other = dataclasses.replace(RECIPE, gamma=3.0)
  with pytest.raises(UserError, match='holds a run of another'):
    train_drafter.train(target, CORPUS, other, folder)


def with_other_head(target):
  """The same architecture and norms, another language head."""
  head = {'weight': target.params['lm_head']['weight'][::-1]}
  return dataclasses.replace(target, params=target.params | {'lm_head': head})


def test_another_target_takes_neither_the_run_nor_the_drafter(
  target, output, tmp_path
):
  other = with_other_head(target)
  with pytest.raises(UserError, match=r'another model.*\(weights is .* here\)'):
    train_drafter.train(other, CORPUS, RECIPE, output)
  name = output / 'drafter'
  with pytest.raises(UserError, match=f'{name}: was trained .* not for tiny'):
    api.load_drafter(name, other)
  bundle = tmp_path / 'drafter.kdtr'
  write_bundle(bundle, read_drafter(name))
  with pytest.raises(UserError, match='give that target, or train a drafter'):
    api.load_drafter(bundle, other)
  # Nor do both become one file.
  folder, both = tmp_path / 'target', tmp_path / 'pair.kdtr'
  tensors = target_tensors(MODEL, other.params, np.float32)
  write_checkpoint(folder, Bundle('other', MODEL, tensors, {}, None, None, {}))
  with pytest.raises(UserError, match=f'{name}: was trained .* not for target'):
    convert.run(
      mode_flags(
        mode='convert',
        target=str(folder),
        drafter=str(name),
        output=str(both),
      )
    )
  assert not both.exists()
  # Another dtype is the same target.
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params)
  half = dataclasses.replace(target, params=params, dtype=jnp.bfloat16)
  assert api.load_drafter(bundle, half).block_size == RECIPE.block_size


def test_rollouts_of_a_run_are_looked_at(target, output, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(output, folder)
  path = folder / train_drafter.ROLLOUTS
  arrays = read_arrays(path)
  kept = dict(arrays)
  for change in (
    {'train_1': arrays['train_1'][:, ::-1]},
    {'train_0': arrays['train_0'].astype(np.int32)},
    {'validation': arrays['validation'][:3]},
  ):
    np.savez(path, **kept | change)
    with pytest.raises(UserError, match='does not continue the prompts'):
      train_drafter.train(target, CORPUS, RECIPE, folder)
  wrong = arrays['validation'].copy()
  wrong[-1, -1] = 40
  np.savez(path, **kept | {'validation': wrong})
  with pytest.raises(UserError, match='token 40 is outside the vocabulary'):
    train_drafter.train(target, CORPUS, RECIPE, folder)
  path.write_bytes(b'PK')
  with pytest.raises(UserError, match='rollouts.npz: cannot be read'):
    train_drafter.train(target, CORPUS, RECIPE, folder)


def test_a_corpus_in_other_tokens_is_refused(target, tmp_path, capsys):
  def files(kind):
    model = {'type': kind, 'vocab': {str(i): i for i in range(40)}}
    return {'tokenizer.json': json.dumps({'model': model}).encode()}

  digest = tokenizer_digest(files('BPE'), 'x')
  corpus = dataclasses.replace(CORPUS, tokenizer_digest=digest)
  other = dataclasses.replace(target, tokenizer=files('WordLevel'))
  with pytest.raises(UserError, match='--corpus=counting: its tokenizer'):
    train_drafter.train(other, corpus, RECIPE, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
  check_pair(corpus, dataclasses.replace(target, tokenizer=files('BPE')))
  assert not capsys.readouterr().err
  check_pair(corpus, target)
  assert 'tiny has no tokenizer' in capsys.readouterr().err


@pytest.mark.parametrize(
  'name',
  ['kimi_k25_int4', pytest.param('deepseek_v3_fp8', marks=pytest.mark.slow)],
)
def test_a_quantised_target_teaches(name):
  target = support.fixture(name)
  recipe = dataclasses.replace(RECIPE, target_layer_ids=None, batch_size=2)
  config = drafter_config(recipe, target.config, 1)
  task = DraftTask(recipe, target.config, config)
  tokens = np.random.default_rng(0).integers(2, 40, (2, 30))
  batch = pack(jnp.asarray(tokens.astype(np.int32)), 5)
  params = jax.jit(task.init)(jax.random.key(0))

  @jax.jit
  def gradient(params, constants):
    loss = functools.partial(task.loss, batch=batch, key=jax.random.key(1))
    return jax.value_and_grad(loss, has_aux=True)(params, constants)

  (loss, _), found = gradient(params, target.params)
  assert np.isfinite(loss)
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(found))


def test_what_a_recipe_says_of_the_loss_arrives_there(monkeypatch):
  recipe = dataclasses.replace(
    RECIPE, gamma=3.0, prefix_power=0.25, hard_weight=0.75, anchors=2
  )
  task = DraftTask(recipe, MODEL, drafter_config(recipe, MODEL, CORPUS.mask))
  told = {}

  def loss(*arguments, **options):
    told.update(options, anchors=arguments[-1])

  monkeypatch.setattr(training_drafter, 'draft_loss', loss)
  batch = pack(jnp.ones((3, 30), jnp.int32), 0)
  task._loss({}, {}, None, batch, jax.random.key(1))
  assert told.pop('anchors').index.shape == (3, 2)
  assert told == {'gamma': 3.0, 'prefix_power': 0.25, 'hard_weight': 0.75}


# ---------------------------------------------------------------- rollouts


def test_prompts_lie_within_documents():
  stream = CORPUS.tokens('train')
  prompts = rollouts.choose_prompts(stream, 0, 50, 12, 3)
  assert prompts.shape == (50, 12) and (prompts != 0).all()
  text = stream.tolist()
  starts = [i for i in range(len(text)) if text[i : i + 12] == list(prompts[7])]
  assert starts
  with pytest.raises(UserError, match='no document of the corpus has 99'):
    rollouts.choose_prompts(stream, 0, 1, 99, 0)


def test_loops_are_cut_when_they_are_four_rounds_old():
  rng = np.random.default_rng(0)
  free = rng.permutation(400)
  looped = np.concatenate([free[:50], np.tile(free[50:60], 35)])[:400]
  constant = np.concatenate([free[:90], np.full(310, 7)])
  parts = rollouts.cut_loops(np.stack([free, looped, constant]))
  assert [len(part) for part in parts] == [400, 50 + 40, 90 + 24]
  assert np.array_equal(parts[1], looped[:90])


def test_rollouts_have_their_share_as_documents():
  corpus = np.full(300, 3, np.uint16)
  parts = [np.full(9, 4), np.array([5, 6, 0])]
  stream = rollouts.mix(corpus, parts, 0.25, 0, 1)
  assert stream.dtype == np.uint16
  assert np.array_equal(stream[:300], corpus)
  added = stream[300:]
  assert 100 <= len(added) < 110 and added[-1] == 0
  documents = {
    tuple(d[:-1]) for d in np.split(added, np.flatnonzero(added == 0) + 1)
  }
  assert documents - {()} == {(4,) * 9, (5, 6)}
  assert rollouts.mix(corpus, parts, 0.0, 0, 1) is corpus


# ------------------------------------------------------------------- flags


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'anchors': 33}, 'anchors=33 is not in 1..32'),
    ({'block_size': 1}, 'block_size=1 is not in 2..32'),
    ({'gamma': 0.0}, 'gamma=0.0 is not positive'),
    ({'prefix_power': -0.5}, 'prefix_power=-0.5 is below 0'),
    ({'hard_weight': 1.5}, 'hard_weight=1.5 is not in 0..1'),
    ({'prompt_tokens': ()}, 'prompt_tokens is empty'),
    ({'prompt_tokens': (4, 13)}, 'prompt_tokens=13 and rollout_tokens=20 do'),
    ({'prompt_tokens': (0,)}, 'prompt_tokens=0 and rollout_tokens=20 do not'),
    ({'rollout_tokens': 32}, 'rollout_tokens=32 is not in 1..31'),
    ({'temperatures': ()}, 'temperatures is empty'),
    ({'temperatures': (0.5, -1.0)}, 'temperatures: temperature=-1.0 must be 0'),
    ({'temperatures': (1e-9,)}, 'temperatures: temperature=1e-09 must be'),
    ({'temperatures': 1.0}, 'temperatures=1.0 is not a list'),
    ({'prompt_tokens': 8}, 'prompt_tokens=8 is not a list'),
    (
      {'prompt_tokens': (2.0,)},
      'prompt_tokens=.* holds 2.0, which is not an int',
    ),
    ({'target_layer_ids': ()}, 'target_layer_ids is empty'),
    ({'target_layer_ids': (-1,)}, 'target_layer_ids=.* holds a layer below 0'),
    ({'rollouts': -1}, 'rollouts=-1 is not in 0'),
    ({'rollouts': 1.5}, 'rollouts=1.5 is not an integer'),
    ({'validation_rollouts': 0}, 'validation_rollouts=0 is not in 1'),
    ({'rollout_share': float('nan')}, 'rollout_share=nan is out of range'),
    ({'num_key_value_heads': 3}, 'num_key_value_heads=3 does not divide'),
    ({'head_dim': 15}, 'head_dim=15 is odd'),
    ({'num_hidden_layers': 0}, 'num_hidden_layers=0 is below 1'),
    ({'intermediate_size': True}, 'intermediate_size=True is not an integer'),
    ({'steps': 10.0}, 'steps=10.0 is not an integer'),
    ({'batch_size': '4'}, "batch_size='4' is not an integer"),
    ({'seed': -1}, 'seed=-1 is below 0'),
    ({'learning_rate': 0}, 'learning_rate=0 is not positive'),
    ({'learning_rate': float('inf')}, 'learning_rate=inf is out of range'),
    ({'learning_rate': None}, 'learning_rate=None is not a number'),
    ({'final_learning_rate': 1}, 'final_learning_rate=1 exceeds learning_rate'),
    ({'weight_decay': float('nan')}, 'weight_decay=nan is out of range'),
    ({'beta2': 1.0}, 'beta2=1.0 is not in 0..1'),
    ({'clip_norm': 0.0}, 'clip_norm=0.0 is not positive'),
    ({'compute_dtype': 'float16'}, "compute_dtype='float16' is neither"),
  ],
)
def test_a_wrong_recipe_is_refused(change, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(RECIPE, **change)


def test_what_does_not_fit_is_refused(target, tmp_path):
  small = dataclasses.replace(MODEL, max_position_embeddings=36)
  with pytest.raises(UserError, match='reach to 37, the target to'):
    drafter_config(RECIPE, small, 1)
  large = dataclasses.replace(CORPUS, vocab_size=41)
  with pytest.raises(UserError, match='has 41 tokens, the target 40'):
    train_drafter.train(target, large, RECIPE, tmp_path / 'run')
  for change, match in (
    ({'batch_size': 10_000}, 'a step takes 10000 sequences of 32'),
    ({'prompt_tokens': (8, 12, 25), 'rollout_tokens': 4}, 'has 25 tokens'),
    ({'target_layer_ids': (0, 2)}, 'target_layer_ids holds 2'),
  ):
    recipe = dataclasses.replace(RECIPE, **change)
    with pytest.raises(UserError, match=match):
      train_drafter.train(target, CORPUS, recipe, tmp_path / 'run')
  masked = dataclasses.replace(CORPUS, mask=40)
  with pytest.raises(UserError, match='mask_token_id=40 is outside'):
    train_drafter.train(target, masked, RECIPE, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('flag', ['target', 'corpus', 'recipe', 'output'])
def test_flags_that_are_needed(flag):
  flags = dict(target='a', corpus='b', recipe='python_small', output='c')
  with pytest.raises(UserError, match=f'needs --{flag}'):
    train_drafter.run(mode_flags(mode='train_drafter', **flags | {flag: None}))


def test_a_recipe_for_a_drafter_is_needed():
  flags = dict(target='a', corpus='b', recipe='tiny', output='c')
  with pytest.raises(UserError, match='tiny.py has no DRAFTER_RECIPE'):
    train_drafter.run(mode_flags(mode='train_drafter', **flags))
