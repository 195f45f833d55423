"""What the public calls take: integers of any library, and nothing like them.

All of it is refused before anything is compiled.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax
from kdtree_jax import (
  Conversation,
  DecodeConfig,
  GenerateOptions,
  SamplingConfig,
  Stream,
  UserError,
  api,
  checks,
  forward_logits,
  generate,
  generate_batch,
  load_drafter,
)
from kdtree_jax.audit import audit
from kdtree_jax.teacher_forcing import teacher_forced
from tests import support

NO_INTEGER = ('1', 1.0, 1.5, True, np.True_, None, np.float32(1), [1], b'1')
NO_IDS = ('12', b'12', [1.7], [True], ['1'], {1: 2}, {1, 2}, 7, None, [[1]])


def force(target, drafter, texts, prompt_length, **options):
  given = GenerateOptions(tree_budget=4, **options)
  return teacher_forced(target, drafter, texts, prompt_length, given)


@pytest.fixture(scope='module')
def target():
  return support.variant('tiny')


@pytest.fixture(autouse=True)
def nothing_compiles():
  # Making a target's weights or a state compiles small programs.
  decoding = ('prefill', 'decode_rounds', 'forward_logits')
  before = support.compilations(*decoding)
  yield
  assert support.compilations(*decoding) == before


def refused(match, call, *operands, **fields):
  """One line, whatever was given."""
  with pytest.raises(UserError, match=match) as error:
    call(*operands, **fields)
  assert '\n' not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize('value', NO_INTEGER, ids=repr)
def test_what_is_no_integer(value):
  for name in ('max_new_tokens', 'tree_budget', 'prefill_chunk', 'seed'):
    refused(f'{name}=', GenerateOptions, **{name: value})
  if value is not None:
    refused('capacity=', GenerateOptions, capacity=value)
  for name in ('top_k', 'seed'):
    refused(f'{name}=', SamplingConfig, temperature=1.0, **{name: value})
  for name in ('tree_budget', 'draft_depth', 'capacity', 'prefill_chunk'):
    fields = {'tree_budget': 1, 'draft_depth': 1, name: value}
    refused(f'{name}=', DecodeConfig, **fields)
  config = support.variant('tiny').config
  refused('hidden_size=', dataclasses.replace, config, hidden_size=value)


@pytest.mark.parametrize('kind', (np.int32, np.uint8, np.asarray, jnp.int32))
def test_what_is_one(kind):
  options = GenerateOptions(
    max_new_tokens=kind(3), capacity=kind(9), stop_ids=kind([4, 5])
  )
  assert options == GenerateOptions(
    max_new_tokens=3, capacity=9, stop_ids=(4, 5)
  )
  assert type(options.max_new_tokens) is int
  assert type(SamplingConfig(temperature=1.0, seed=kind(7)).seed) is int


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  (
    ('max_new_tokens', 0, 'is below 1'),
    ('max_new_tokens', -3, 'is below 1'),
    ('max_new_tokens', 2**31, 'exceeds'),
    ('capacity', 0, 'is below 1'),
    ('capacity', 2**63, 'not in'),
    ('prefill_chunk', 0, 'is below 1'),
    ('tree_budget', -1, 'is below 0'),
    ('tree_budget', 2**20, 'exceeds'),
    ('tree_policy', 'widest', "'widest'; known: best_first"),
    ('tree_policy', ['chain'], 'not a string'),
    ('keep_top1_chain', 'no', 'not true or false'),
    ('keep_top1_chain', 1, 'not true or false'),
    ('kernels', None, 'not a string'),
    ('stop_ids', '12', 'not a list'),
    ('stop_ids', 5, 'not a list'),
    ('stop_ids', (1.5,), 'holds 1.5, which is not an integer'),
    ('seed', -1, 'must be in'),
    ('seed', 2**32, 'not in'),
    ('temperature', '0.5', 'not a number'),
    ('temperature', True, 'not a number'),
    ('temperature', math.nan, 'out of range'),
    ('temperature', math.inf, 'out of range'),
    ('temperature', 1e39, 'out of range'),
    ('temperature', [1.0], 'not a number'),
    ('top_p', math.nan, 'out of range'),
    ('min_p', '0', 'not a number'),
  ),
)
def test_options_out_of_range(name, value, message):
  fields = {'temperature': 1.0, name: value}
  refused(f'{name}.*{message}', GenerateOptions, **fields)


def test_a_set_of_stop_ids_is_one():
  assert set(GenerateOptions(stop_ids={3, 1}).stop_ids) == {1, 3}


@pytest.mark.parametrize('ids', NO_IDS, ids=repr)
def test_what_is_no_sequence_of_ids(target, ids):
  oracle = load_drafter('oracle', target)
  stub = load_drafter('random', target)
  refused('prompt_ids', generate, target, None, ids)
  refused(r'prompts\[1\]', generate_batch, target, None, [[1], ids])
  refused(r'prompts\[0\]', Stream, target, None, [ids])
  refused('ids', Conversation(target, None).send, ids)
  refused('ids', forward_logits, target, ids)
  refused('prompt_ids', audit, target, stub, ids)
  if ids is not None:
    refused('golden_ids', generate, target, oracle, [1], golden_ids=ids)
  refused(r'texts\[0\]', force, target, stub, [ids], 1)


@pytest.mark.parametrize('prompts', ('12', 5, {1: [2]}, None))
def test_what_is_no_batch(target, prompts):
  refused('prompts', generate_batch, target, None, prompts)


@pytest.mark.parametrize('token', (-1, 10**6, 2**31))
def test_ids_outside_the_vocabulary(target, token):
  oracle = load_drafter('oracle', target)
  stub = load_drafter('random', target)
  text = [1, 2, token, 3]
  for kind, call in (
    ('prompt', lambda: generate(target, None, text)),
    ('prompt', lambda: forward_logits(target, text)),
    ('golden', lambda: generate(target, oracle, [1], golden_ids=text)),
    ('text', lambda: force(target, stub, [text], 1)),
    ('stop', lambda: generate(target, None, [1], stop_ids=[token])),
  ):
    refused(f'{kind} id {token} is outside the vocabulary', call)


def test_texts_to_follow(target):
  stub, oracle = (load_drafter(name, target) for name in ('random', 'oracle'))
  texts = [[1, 2, 3, 4]]
  refused('fewer than 5', force, target, stub, texts, 2, max_new_tokens=3)
  for length in (0, 1.5, True):
    refused('prompt_length', force, target, stub, texts, length)
  refused('oracle', force, target, oracle, texts, 1)
  refused('None', force, target, None, texts, 1)


@pytest.mark.parametrize(
  ('fields', 'message'),
  (
    ({'seeds': [1.5]}, 'seeds'),
    ({'seeds': '1'}, 'seeds'),
    ({'seeds': [-1]}, 'seed=-1'),
    ({'sampling': [{'temperature': 1.0}]}, 'SamplingConfig'),
    ({'sampling': None, 'seeds': [2**32]}, 'seed='),
  ),
)
def test_draws_of_a_batch(target, fields, message):
  refused(message, generate_batch, target, None, [[1]], **fields)


@pytest.mark.parametrize('rounds', (0, -1, 2**31, 1.5, True, '1'))
def test_rounds_of_a_step(target, rounds):
  refused(
    'rounds_per_step', Stream, target, None, [[1]], rounds_per_step=rounds
  )


def test_what_was_never_loaded(target, tmp_path):
  drafter = load_drafter('random', target)
  for call in (generate, Conversation, Stream, generate_batch):
    rest = () if call is Conversation else ([[1]],)
    rest = ([1],) if call is generate else rest
    refused('load_target', call, str(tmp_path), None, *rest)
    refused('load_drafter', call, target, 'random', *rest)
  refused('load_target', forward_logits, 'x', [1])
  refused('load_target', load_drafter, 'random', 'tiny')
  refused('load_target', audit, 'tiny', drafter, [1])


@pytest.mark.parametrize('name', ('dflash', 'random'))
def test_a_drafter_of_another_target(target, name):
  other = support.variant('single_head')
  changed = dataclasses.replace(
    other.config, vocab_size=other.config.vocab_size - 1
  )
  smaller = api.Target('other', changed, {}, other.dtype, (), {})
  drafter = load_drafter(name, smaller)
  for call, rest in (
    (generate, ([1],)),
    (Conversation, ()),
    (Stream, ([[1]],)),
    (audit, ([1],)),
  ):
    refused('does not fit the target', call, target, drafter, *rest)


def test_a_drafter_of_another_dtype(target):
  drafter = load_drafter(
    'dflash', dataclasses.replace(target, dtype=jnp.bfloat16)
  )
  refused('dtype=bfloat16', generate, target, drafter, [1])


@pytest.mark.parametrize(
  ('fields', 'message'),
  (
    ({'block_size': 1.5}, 'block_size'),
    ({'block_size': '4'}, 'block_size'),
    ({'block_size': True}, 'block_size'),
    ({'acceptance_rate': '0.5'}, 'acceptance_rate'),
    ({'acceptance_rate': math.nan}, 'acceptance_rate'),
  ),
)
def test_loading_a_drafter(target, fields, message):
  refused(message, load_drafter, 'acceptance_rate', target, **fields)


def test_random_layers():
  refused('layers', api.random_target, 'tiny', layers=1.5)


def test_an_audit_without_tokens(target):
  drafter = load_drafter('random', target)
  for count in (0, -1, 1.5):
    refused('max_new_tokens', audit, target, drafter, [1], max_new_tokens=count)


def test_all_that_a_batch_needs_is_public():
  assert kdtree_jax.SamplingConfig is SamplingConfig
  assert set(kdtree_jax.__all__) <= set(dir(kdtree_jax))


def test_a_message_is_one_short_line():
  refused('is not an integer', checks.integer, 'a\nb' * 999, 'seed')
  refused('is not an integer', checks.integer, np.zeros((9, 9)), 'seed')
