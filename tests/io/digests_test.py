"""Digests tell what widths do not, and nothing else."""

import copy
import json

import jax
import jax.numpy as jnp
import pytest

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import SAMPLE, tokenizer_digest, weights_digest
from tests import support


def params():
  keys = iter(jax.random.split(jax.random.key(0), 8))
  draw = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
  return {
    'norm': {'weight': draw(8)},
    'head': {'weight': draw(SAMPLE // 100, 260)},
    'experts': {'down': draw(3, 4, 5).astype(jnp.bfloat16)},
    'd2t': jnp.arange(7, dtype=jnp.int32),
  }


@pytest.mark.parametrize('rounded', [False, True])
def test_any_tensor_that_is_replaced(rounded):
  whole = params()
  assert whole['head']['weight'].size > SAMPLE
  digest = weights_digest(whole, rounded=rounded)
  assert digest == weights_digest(params(), rounded=rounded)
  leaves, tree = jax.tree.flatten(whole)
  seen = {digest}
  for i, leaf in enumerate(leaves):
    for other in (leaf + 1, leaf[::-1]):
      changed = tree.unflatten([*leaves[:i], other, *leaves[i + 1 :]])
      seen.add(weights_digest(changed, rounded=rounded))
  # One value of one expert.
  down = whole['experts']['down'].at[2, 1, 3].mul(1.5)
  seen.add(weights_digest(whole | {'experts': {'down': down}}, rounded=rounded))
  # The same bits under another name, and in another shape.
  renamed = {('other' if k == 'd2t' else k): v for k, v in whole.items()}
  seen.add(weights_digest(renamed, rounded=rounded))
  reshaped = whole | {'d2t': whole['d2t'].reshape(1, 7)}
  seen.add(weights_digest(reshaped, rounded=rounded))
  assert len(seen) == 1 + 2 * len(leaves) + 3


def test_a_dtype_is_part_of_it_unless_rounded():
  single = params()
  half = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, single
  )
  assert weights_digest(single) != weights_digest(half)
  same = weights_digest(single, rounded=True)
  assert same == weights_digest(half, rounded=True)
  tiny = half | {'norm': {'weight': half['norm']['weight'].at[0].set(1e-39)}}
  zero = half | {'norm': {'weight': half['norm']['weight'].at[0].set(0)}}
  assert len({weights_digest(x, rounded=True) for x in (tiny, zero)}) == 1


@pytest.mark.parametrize('name', ['deepseek_v3_fp8', 'kimi_k25_int4'])
def test_one_checkpoint_however_it_is_loaded(name):
  forms = [
    ('float32', 'as_stored'),
    ('float32', 'float32'),
    ('bfloat16', 'bfloat16'),
  ]
  found = [api.load_target(support.DATA / name, *form) for form in forms]
  assert len({target.digest for target in found}) == 1
  assert len({weights_digest(target.params) for target in found}) == 3


# -------------------------------------------------------------- tokenizers


BPE = {
  'version': '1.0',
  'truncation': None,
  'padding': None,
  'added_tokens': [
    {'id': 3, 'content': '<b>', 'special': True, 'normalized': False},
    {'id': 4, 'content': '<a>', 'special': True, 'normalized': False},
  ],
  'normalizer': {'type': 'NFC'},
  'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': False},
  'post_processor': None,
  'decoder': {'type': 'ByteLevel'},
  'model': {
    'type': 'BPE',
    'dropout': None,
    'byte_fallback': False,
    'vocab': {'a': 0, 'b': 1, 'ab': 2},
    'merges': [['a', 'b']],
  },
}


def digest(raw):
  return tokenizer_digest({'tokenizer.json': json.dumps(raw).encode()}, 'x')


def change(path, value):
  raw = copy.deepcopy(BPE)
  *outer, last = path
  inner = raw
  for key in outer:
    inner = inner[key]
  inner[last] = value
  return raw


@pytest.mark.parametrize(
  ('path', 'value'),
  [
    (('model', 'merges'), ['a b']),
    (('model', 'ignore_merges'), False),
    (('model', 'unk_token'), None),
    (('model', 'vocab'), {'ab': 2, 'b': 1, 'a': 0}),
    (('added_tokens'), BPE['added_tokens'][::-1]),
    (('added_tokens', 0, 'lstrip'), False),
    (('padding'), {'strategy': 'BatchLongest'}),
    (('decoder'), None),
  ],
  ids=str,
)
def test_the_spelling_is_no_part_of_it(path, value):
  path = (path,) if isinstance(path, str) else path
  assert digest(change(path, value)) == digest(BPE)


@pytest.mark.parametrize(
  ('path', 'value'),
  [
    (('model', 'vocab'), {'a': 1, 'b': 0, 'ab': 2}),
    (('model', 'merges'), []),
    (('model', 'byte_fallback'), True),
    (('model', 'type'), 'WordLevel'),
    (('added_tokens', 0, 'content'), '<c>'),
    (('added_tokens', 0, 'lstrip'), True),
    (('normalizer', 'type'), 'NFD'),
    (('normalizer',), None),
    (('pre_tokenizer', 'add_prefix_space'), True),
  ],
  ids=str,
)
def test_what_decides_about_ids_is(path, value):
  assert digest(change(path, value)) != digest(BPE)


def test_tiktoken():
  ranks = b'YQ== 0\nYg== 1\n'
  config = {'added_tokens_decoder': {'2': {'content': '<x>'}}}

  def of(ranks, config):
    text = json.dumps(config).encode()
    files = {'tiktoken.model': ranks, 'tokenizer_config.json': text}
    return tokenizer_digest(files, 'x')

  whole = of(ranks, config)
  assert whole == of(b'Yg==  1\n\nYQ== 0', config | {'bos_token': '<x>'})
  reserved = {'3': {'content': '<|reserved_token_3|>'}}
  named = config['added_tokens_decoder'] | reserved
  assert whole == of(ranks, {'added_tokens_decoder': named})
  assert whole != of(b'YQ== 1\nYg== 0\n', config)
  assert whole != of(ranks, {'added_tokens_decoder': {'2': '<y>'}})
  assert whole != tokenizer_digest({'tiktoken.model': ranks}, 'x')
  assert tokenizer_digest({'chat_template.jinja': b''}, 'x') is None


@pytest.mark.parametrize(
  'files',
  [
    {'tokenizer.json': b'{'},
    {'tokenizer.json': b'[]'},
    {'tokenizer.json': b'{"model": 3}'},
    {'tokenizer.json': b'{"model": {}, "added_tokens": [3]}'},
    {'tiktoken.model': b'x'},
    {'tiktoken.model': b'YQ== 0', 'tokenizer_config.json': b'[]'},
  ],
)
def test_what_is_no_tokenizer(files):
  with pytest.raises(UserError, match='^here: no tokenizer'):
    tokenizer_digest(files, 'here')
