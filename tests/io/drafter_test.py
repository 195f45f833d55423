"""Windows, causality, amplitudes and speculators' layout of drafters."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from kdtree_jax import api, generation, sessions
from kdtree_jax.drafters import attention
from kdtree_jax.drafters.base import TargetHead
from kdtree_jax.drafters.dflash import (
  DFlashDrafter,
  DFlashState,
)
from kdtree_jax.errors import UserError
from kdtree_jax.io import huggingface as hf
from kdtree_jax.io.tensors import CheckpointError
from kdtree_jax.modes.inspect import describe
from tests import support
from tests.io import fixtures
from tests.io.fixtures import DATA, raw_config

NAME = 'deepseek_v3_trained_drafter'
SLIDING, FULL = 'sliding_attention', 'full_attention'


def config_of(**changes):
  return hf.drafter_config(raw_config(f'{NAME}/dflash', **changes))


def nested(**keys):
  inner = raw_config(f'{NAME}/dflash')['dflash_config']
  return {'dflash_config': inner | keys}


@pytest.mark.parametrize(
  ('changes', 'windows', 'causal'),
  [
    ({}, [None, None], [False, False]),
    (
      {'layer_types': [SLIDING, FULL], 'sliding_window': 4},
      [4, None],
      [True, False],
    ),
    (
      {
        'layer_types': [SLIDING, FULL],
        'sliding_window': 4,
        'is_causal': False,
      },
      [4, None],
      [False, False],
    ),
    (nested(causal=True), [None, None], [True, True]),
    (nested(causal_head=True), [None, None], [True, True]),
    (nested(use_swa=True, swa_window_size=3), [3, 3], [False, False]),
    (
      {
        'use_sliding_window': True,
        'sliding_window': 5,
        'max_window_layers': 1,
      },
      [None, 5],
      [False, True],
    ),
    (
      {'sliding_window': 5, 'use_sliding_window': False},
      [None, None],
      [False, False],
    ),
  ],
)
def test_windows_and_causality_follow_the_config(changes, windows, causal):
  config = config_of(**changes)
  assert [config.window(i) for i in range(2)] == windows
  assert [config.is_causal(i) for i in range(2)] == causal


def visible_by_hand(config, layer, length, rows, width):
  """Which keys (context, then block) each slot sees, in plain loops."""
  seen = np.zeros((width, rows + width), bool)
  for q in range(width):
    for k in range(rows + width):
      position = k if k < rows else length + k - rows
      if k < rows and k >= length:
        continue
      if config.is_causal(layer) and position > length + q:
        continue
      start = length if config.window_from_root else length + q
      window = config.window(layer)
      if window is not None and start - position >= window:
        continue
      seen[q, k] = True
  return seen


MASKS = {
  'full': {},
  'causal': {'is_causal': True},
  'sliding': {'layer_types': [SLIDING] * 2, 'sliding_window': 3},
  'sliding, whole block': nested(use_swa=True, swa_window_size=3),
}


@pytest.mark.parametrize('case', MASKS)
def test_a_slot_sees_what_it_should_and_nothing_else(case):
  config = config_of(**MASKS[case])
  rows, width, length = 10, 8, 6
  positions = jnp.arange(rows, dtype=jnp.int32)
  view = attention.View(
    start=jnp.array([[length]], jnp.int32),
    positions=positions[None],
    seen=(positions < length)[None, None],
  )
  context, block = attention.visible_rows(config, 0, view, width)
  context = np.broadcast_to(context[0, 0], (width, rows))
  assert np.array_equal(
    np.concatenate([context, block], axis=1),
    visible_by_hand(config, 0, length, rows, width),
  )


@pytest.mark.parametrize(
  'case',
  [
    pytest.param(case, marks=[pytest.mark.slow] * (case != 'sliding'))
    for case in MASKS
  ],
)
def test_masks_change_the_draft_but_never_the_output(case, tmp_path):
  """Acceptance may drop: the fixture was trained to see everything."""
  target = support.fixture(NAME)
  folder = copy_drafter(tmp_path, **MASKS[case])
  drafter = api.load_drafter(folder, target)
  trace = support.trace(NAME)
  prompt = trace['prompt']
  result = generation.generate(
    target, drafter, prompt, max_new_tokens=24, tree_budget=24, stop_ids=()
  )
  assert result.output_ids == trace['ar_ids'][len(prompt) :][:24]


def copy_drafter(folder, tensors=None, **changes):
  raw = raw_config(f'{NAME}/dflash', **changes)
  (folder / 'config.json').write_text(json.dumps(raw))
  if tensors is None:
    tensors = fixtures.load(f'{NAME}/dflash')
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
  return folder


def test_far_context_is_out_of_a_window():
  """Context rows outside every window may be anything at all."""
  config = config_of(layer_types=[SLIDING] * 2, sliding_window=3)
  drafter = DFlashDrafter(config, config.block_size)
  params = drafter.init_params(jax.random.key(1), jnp.float32)
  length = jnp.array([9], jnp.int32)
  width = 2 * config.num_key_value_heads * config.head_dim
  context = jax.random.normal(jax.random.key(2), (2, 1, 16, width))
  table = jax.random.normal(jax.random.key(3), (64, config.hidden_size))
  head = TargetHead(lambda t: table[t], lambda h: h @ table.T)
  tokens = jnp.zeros((1, 20), jnp.int32)

  def draft(context):
    state = DFlashState(context=context)
    return drafter.draft(params, state, tokens, length, head)

  plain = draft(context)
  assert np.array_equal(plain, draft(context.at[:, :, :7].multiply(9.0)))
  assert not np.array_equal(plain, draft(context.at[:, :, 7].multiply(9.0)))


# --------------------------------------------------------------- amplitude


def test_the_amplitude_of_yarn_can_be_replaced(tmp_path):
  yarn = {
    'rope_type': 'yarn',
    'factor': 64.0,
    'original_max_position_embeddings': 32,
    'mscale': 1.0,
    'mscale_all_dim': 1.0,
  }
  target = support.fixture(NAME)
  folder = copy_drafter(tmp_path, rope_scaling=yarn)
  plain = api.load_drafter(folder, target)
  assert plain.drafter.config.rope_scaling.attention_factor is None
  loud = api.load_drafter(folder, target, attention_factor=1.415888)
  assert loud.drafter.config.rope_scaling.attention_factor == 1.415888
  raw = yarn | {'attention_factor': 1.2}
  folder = copy_drafter(tmp_path, rope_scaling=raw)
  stated = api.load_drafter(folder, target)
  assert stated.drafter.config.rope_scaling.attention_factor == 1.2
  for bad in (0.0, -1.0, float('nan')):
    with pytest.raises(UserError, match='drafter_attention_factor='):
      api.load_drafter(folder, target, attention_factor=bad)
  with pytest.raises(UserError, match='has no YaRN'):
    api.load_drafter(DATA / NAME / 'dflash', target, attention_factor=1.0)
  with pytest.raises(UserError, match='not used by oracle'):
    api.load_drafter('oracle', target, attention_factor=1.0)


# ------------------------------------------------------------- speculators


def speculators_raw(**changes):
  zlab = raw_config(f'{NAME}/dflash')
  inner = {
    k: v
    for k, v in zlab.items()
    if k not in ('dflash_config', 'block_size', 'num_target_layers')
  }
  inner['architectures'] = ['Qwen3ForCausalLM']
  taps = zlab['dflash_config']['target_layer_ids']
  raw = {
    'architectures': ['DFlashSpeculator'],
    'speculators_model_type': 'dflash',
    'speculators_version': '0.5.0',
    'speculators_config': {'verifier': {'name_or_path': 'x'}},
    'transformer_layer_config': inner,
    'block_size': zlab['block_size'],
    'mask_token_id': zlab['dflash_config']['mask_token_id'],
    'aux_hidden_state_layer_ids': [*(tap + 1 for tap in taps), 3],
    'draft_vocab_size': inner['vocab_size'],
    'sliding_window_non_causal': False,
    'sample_from_anchor': False,
  } | changes
  return {k: v for k, v in raw.items() if v is not None}


def speculators_tensors(draft_ids=None):
  target = fixtures.load(NAME)
  head = target['lm_head.weight']
  tensors = fixtures.load(f'{NAME}/dflash')
  tensors['embed_tokens.weight'] = target['model.embed_tokens.weight']
  tensors['lm_head.weight'] = head
  if draft_ids is not None:
    tensors['lm_head.weight'] = head[draft_ids]
    tensors['d2t'] = np.array(draft_ids) - np.arange(len(draft_ids))
    tensors['t2d'] = np.isin(np.arange(len(head)), draft_ids)
  return tensors


def speculators_folder(folder, tensors, **changes):
  (folder / 'config.json').write_text(json.dumps(speculators_raw(**changes)))
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
  return folder


def run(target, drafter):
  trace = support.trace(NAME)
  return generation.generate(
    target,
    drafter,
    trace['prompt'],
    max_new_tokens=24,
    tree_budget=24,
    stop_ids=(),
  )


def test_speculators_layout_is_the_same_drafter(tmp_path):
  target = support.fixture(NAME)
  zlab = run(target, api.load_drafter(DATA / NAME / 'dflash', target))
  folder = speculators_folder(tmp_path, speculators_tensors())
  drafter = api.load_drafter(folder, target)
  assert drafter.drafter.config.target_layer_ids == tuple(
    raw_config(f'{NAME}/dflash')['dflash_config']['target_layer_ids']
  )
  own = run(target, drafter)
  assert own.output_ids == zlab.output_ids
  assert own.acceptance_lengths == zlab.acceptance_lengths


@pytest.mark.parametrize('stated', [None, 3])
def test_speculators_are_described_without_their_target(tmp_path, stated):
  """The last id is the target's depth and no tap: fc tells so."""
  tensors = speculators_tensors()
  changes = {'num_target_layers': stated}
  folder = speculators_folder(tmp_path, tensors, **changes)
  taps = speculators_raw()['aux_hidden_state_layer_ids'][:-1]
  listed = ', '.join(str(tap - 1) for tap in taps)
  assert f'taps after layers {listed} of 3' in describe(folder)
  speculators_folder(tmp_path, tensors, aux_hidden_state_layer_ids=taps)
  assert f'taps after layers {listed} of {taps[-1]}' in describe(folder)
  ids = [*taps, 3, 4]
  speculators_folder(tmp_path, tensors, aux_hidden_state_layer_ids=ids)
  with pytest.raises(UserError, match='fc.weight'):
    describe(folder)


def test_a_draft_vocabulary_is_mapped_to_the_targets(tmp_path):
  """All ids but those that a run needs least: it accepts nearly as much."""
  target = support.fixture(NAME)
  used = sorted(set(support.trace(NAME)['ar_ids']))
  folder = speculators_folder(
    tmp_path, speculators_tensors(used), draft_vocab_size=len(used)
  )
  drafter = api.load_drafter(folder, target)
  result = run(target, drafter)
  zlab = run(target, api.load_drafter(DATA / NAME / 'dflash', target))
  assert result.output_ids == zlab.output_ids
  assert result.mean_acceptance_length > 0.8 * zlab.mean_acceptance_length
  config = drafter.drafter.config
  state = DFlashState(context=jnp.zeros((2, 1, 4, 64)))
  logits = drafter.drafter.draft(
    drafter.params,
    state,
    jnp.zeros((1, 20), jnp.int32),
    jnp.array([0], jnp.int32),
    TargetHead(None, None),
  )
  assert logits.shape == (1, config.block_size - 1, config.vocab_size)
  finite = np.isfinite(np.asarray(logits)).all(axis=(0, 1))
  assert np.flatnonzero(finite).tolist() == used


SPECULATORS_FAULTS = [
  ({}, lambda t: t.pop('lm_head.weight'), "'lm_head.weight' is missing"),
  ({}, lambda t: t.pop('embed_tokens.weight'), 'embed_tokens.weight'),
  (
    {'draft_vocab_size': 8},
    lambda t: None,
    r"'d2t' is missing, expected \[8\]",
  ),
  (
    {},
    lambda t: t.update({'d2t': np.ones(64, np.int64)}),
    "'d2t' does not lead to different ids",
  ),
  (
    {},
    lambda t: t.update({'t2d': np.arange(64) < 63}),
    "'t2d' does not mark the ids that 'd2t' leads to",
  ),
  (
    {},
    lambda t: t.update({'t2d': np.ones(63, np.bool_)}),
    r"'t2d' has shape \[63\], the config asks for \[64\]",
  ),
  (
    {},
    lambda t: t.update({'t2d': np.ones(64, np.float32)}),
    "'t2d' has dtype F32; supported: BOOL",
  ),
  ({'architectures': ['x']}, lambda t: None, 'supported: DFlashDraftModel, DF'),
  ({'speculators_model_type': 'eagle3'}, lambda t: None, "is 'eagle3'"),
  ({'sample_from_anchor': True}, lambda t: None, 'sample_from_anchor'),
  ({'draft_vocab_size': 65}, lambda t: None, 'draft_vocab_size=65'),
  ({'transformer_layer_config': None}, lambda t: None, 'is missing'),
  ({'aux_hidden_state_layer_ids': [0, 1]}, lambda t: None, 'holds -1'),
  ({'aux_hidden_state_layer_ids': [1]}, lambda t: None, 'fc.weight'),
  ({'odd': 1}, lambda t: None, 'odd'),
]


@pytest.mark.parametrize(('changes', 'spoil', 'match'), SPECULATORS_FAULTS)
def test_speculators_that_are_refused(changes, spoil, match, tmp_path):
  tensors = speculators_tensors()
  spoil(tensors)
  folder = speculators_folder(tmp_path, tensors, **changes)
  with pytest.raises(UserError, match=match) as info:
    api.load_drafter(folder, support.fixture(NAME))
  assert '\n' not in str(info.value)


@pytest.mark.parametrize('entry', range(4))
def test_both_maps_of_a_draft_vocabulary_say_the_same(tmp_path, entry):
  """One id more, one less, and another one in its place."""
  target, ids = support.fixture(NAME), [0, 5, 9, 63]
  tensors = speculators_tensors(ids)
  for spoil in ((), (1,), (ids[entry],), (ids[entry], 1)):
    mask = tensors['t2d'].copy()
    mask[list(spoil)] ^= True
    folder = speculators_folder(
      tmp_path, tensors | {'t2d': mask}, draft_vocab_size=4
    )
    if not spoil:
      params = api.load_drafter(folder, target).params
      assert np.asarray(params['d2t'] + np.arange(4)).tolist() == ids
      assert 't2d' not in params
      floats = sum(v.size for v in tensors.values() if v.dtype.kind == 'f')
      assert f'parameters: {floats:,}\n' in describe(folder)
      continue
    with pytest.raises(CheckpointError, match="'t2d' does not mark the ids"):
      api.load_drafter(folder, target)


def test_a_drafter_of_another_target_is_refused_where_it_is_used():
  """Each size by itself, of a trained drafter and of a stub."""
  target = support.fixture(NAME)
  drafter = api.load_drafter(DATA / NAME / 'dflash', target)
  config = target.config
  for field, value in (
    ('hidden_size', 2 * config.hidden_size),
    ('vocab_size', config.vocab_size + 1),
    ('num_hidden_layers', config.num_hidden_layers + 1),
  ):
    wrong = dataclasses.replace(
      target, config=dataclasses.replace(config, **{field: value})
    )
    match = f'dflash does not fit the target: .* {field}=.*, not {value}'
    with pytest.raises(UserError, match=match):
      generation.generate(wrong, drafter, [1, 2])
    with pytest.raises(UserError, match=match):
      sessions.Stream(wrong, drafter, [[1, 2]])
  stub = api.load_drafter('random', support.fixture('moonlight'))
  with pytest.raises(UserError, match='random does not fit .* vocab_size=130'):
    generation.generate(target, stub, [1, 2])


def test_untrained_parameters_have_the_shapes_of_loaded_ones(tmp_path):
  target = support.fixture(NAME)
  ids = [0, 5, 9, 63]
  folder = speculators_folder(
    tmp_path, speculators_tensors(ids), draft_vocab_size=4
  )
  drafter = api.load_drafter(folder, target)
  fresh = drafter.drafter.init_params(jax.random.key(0), jnp.float32)

  def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), dict(tree))

  assert shapes(fresh) == shapes(drafter.params)


def test_configs_of_variants_name_the_key():
  for key in ('draft_shift', 'sample_from_anchor', 'conv_kernel_size'):
    with pytest.raises(CheckpointError, match=key):
      config_of(**nested(**{key: 2}))
