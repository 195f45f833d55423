"""Tokenizers: ids, round trips, streams, chats, and broken files."""

import base64
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kdtree_jax.errors import UserError
from kdtree_jax.io.kimi_tokenizer import KIMI_PATTERN
from kdtree_jax.io.prompts import read_prompts
from kdtree_jax.io.tokenizer import load_tokenizer
from kdtree_jax.io.tokenizer_files import TokenizerError
from tests.io import fixtures

TEXTS = st.text(max_size=40) | st.text("aB1 \n\r\t'é漢字ｓ👩‍👧", max_size=40)
KIMI_NAMES = {
  256: '[BOS]',
  257: '[EOS]',
  258: '<|im_end|>',
  259: '<|im_user|>',
  260: '<|im_assistant|>',
  265: '<|im_middle|>',
}
KIMI_TEMPLATE = (
  '{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>'
  '{{ m.content }}<|im_end|>{% endfor %}'
  '{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>'
  '{% endif %}'
)


@pytest.fixture(scope='module')
def kimi(tmp_path_factory):
  """Bytes only, so that ids are bytes; real names behind them."""
  folder = tmp_path_factory.mktemp('kimi')
  write_ranks(folder, [bytes([i]) for i in range(256)])
  added = {str(i): {'content': name} for i, name in KIMI_NAMES.items()}
  config = {'added_tokens_decoder': added, 'bos_token': '[BOS]'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  (folder / 'chat_template.jinja').write_text(KIMI_TEMPLATE)
  return load_tokenizer(folder)


def write_ranks(folder, tokens):
  lines = [
    f'{base64.b64encode(token).decode()} {rank}'
    for rank, token in enumerate(tokens)
  ]
  (folder / 'tiktoken.model').write_text('\n'.join(lines) + '\n')


@pytest.fixture(scope='module')
def byte_level(tmp_path_factory):
  """A byte-level BPE of the DeepSeek kind, trained on a few words."""
  folder = tmp_path_factory.mktemp('json')
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  inner.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=['<|begin|>', '<|User|>', '<|Assistant|>'],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  inner.train_from_iterator(['the theme of the thesis, 漢字 漢字'], trainer)
  inner.save(str(folder / 'tokenizer.json'))
  config = {
    'add_bos_token': True,
    'bos_token': {'content': '<|begin|>'},
    'chat_template': (
      '{{ bos_token }}{% for m in messages %}<|User|>{{ m.content }}'
      '{% endfor %}<|Assistant|>'
    ),
  }
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return load_tokenizer(folder)


@fixtures.deterministic
@given(TEXTS)
def test_kimi_round_trip(kimi, text):
  assert kimi.decode(kimi.encode(text)) == text


@fixtures.deterministic
@given(TEXTS)
def test_byte_level_round_trip(byte_level, text):
  ids = byte_level.encode(text)
  assert byte_level.decode(ids) == '<|begin|>' + text


@fixtures.deterministic
@given(TEXTS, st.integers(1, 3))
@pytest.mark.parametrize('kind', ['kimi', 'byte_level'])
def test_a_stream_says_the_same_and_no_half_letters(request, kind, text, step):
  tokenizer = request.getfixturevalue(kind)
  ids, stream = tokenizer.encode(text), tokenizer.stream()
  pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
  if '\ufffd' not in text:
    assert not any('\ufffd' in piece for piece in pieces)
  assert ''.join([*pieces, stream.finish()]) == tokenizer.decode(ids)


@fixtures.deterministic
@given(st.lists(st.integers(0, 255), max_size=12))
def test_a_stream_of_arbitrary_bytes(kimi, ids):
  """What is no unicode becomes U+FFFD, the same as at once."""
  stream = kimi.stream()
  text = ''.join(stream.push([token]) for token in ids) + stream.finish()
  assert text == kimi.decode(ids)


# Worked out by hand from the pattern.
WORDS = {
  'Hello world': ['Hello', ' world'],
  "I'm we'LL it's": ["I'm", " we'LL", " it's"],
  "rock'n'roll": ['rock', "'n", "'roll"],
  '漢字カナ漢': ['漢字', 'カナ', '漢'],
  'abc漢字def': ['abc', '漢字', 'def'],
  'HTTPServer': ['HTTPServer'],
  'fooBar': ['foo', 'Bar'],
  '1234567': ['123', '456', '7'],
  'a1b22': ['a', '1', 'b', '22'],
  'x = y+1;\n\n  z': ['x', ' =', ' y', '+', '1', ';\n\n', ' ', ' z'],
  'end.\r\n': ['end', '.\r\n'],
  '  \n \n': ['  \n \n'],
  'a   b': ['a', '  ', ' b'],
  'a  ': ['a', '  '],
  '你好，world!': ['你好', '，world', '!'],
  '(word)': ['(word', ')'],
  ' ...': [' ...'],
  '١٢٣٤': ['١٢٣', '٤'],
}


@pytest.fixture(scope='module')
def by_words(tmp_path_factory):
  """Every word above is one token, so that ids show where text is cut.

  Merges must build it up: all prefixes have a rank as well.
  """
  folder = tmp_path_factory.mktemp('words')
  tokens = [bytes([i]) for i in range(256)]
  for words in WORDS.values():
    for word in words:
      data = word.encode()
      tokens += [data[:n] for n in range(2, len(data) + 1)]
  write_ranks(folder, list(dict.fromkeys(tokens)))
  return load_tokenizer(folder)


@pytest.mark.parametrize('text', WORDS)
def test_kimi_cuts_text_as_its_pattern_says(by_words, text):
  ids = by_words.encode(text)
  assert [by_words.decode([token]) for token in ids] == WORDS[text]


def test_the_pattern_is_kimis():
  assert KIMI_PATTERN.startswith(
    r'[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*'
    r'[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'
  )
  assert KIMI_PATTERN.endswith(r'|\s*[\r\n]+|\s+(?!\S)|\s+')


def test_special_tokens_of_kimi(kimi):
  text = 'a<|im_end|>[EOS]<|reserved_token_511|>'
  assert kimi.encode(text) == [97, 258, 257, 511]
  assert kimi.decode([97, 258, 511]) == 'a<|im_end|><|reserved_token_511|>'
  # Rows that pad the model's vocabulary have no text.
  assert kimi.decode([97, 512, 9999]) == 'a'


def test_chats(kimi, byte_level):
  ids = kimi.encode_chat([{'role': 'user', 'content': 'hi'}])
  middle = [265, *b'hi', 258, 260, *b'assistant', 265]
  assert ids == [259, *b'user', *middle]
  text = byte_level.decode(
    byte_level.encode_chat([{'role': 'user', 'content': 'the'}])
  )
  assert text == '<|begin|><|User|>the<|Assistant|>'


def test_a_folder_without_tokenizer(tmp_path):
  assert load_tokenizer(tmp_path) is None


def with_template(folder, template):
  write_ranks(folder, [bytes([i]) for i in range(256)])
  config = {'chat_template': template}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return load_tokenizer(folder)


def test_templates_by_name(tmp_path):
  named = [
    {'name': 'tool', 'template': 'x'},
    {'name': 'default', 'template': 'y'},
  ]
  assert with_template(tmp_path, named).encode_chat([]) == [*b'y']


def test_json_in_templates_is_that_of_transformers(tmp_path):
  template = (
    '{% set x = {"b": "é<", "a": [1]} %}{{ x | tojson }} '
    '{{ x | tojson(sort_keys=true, separators=(",", ":")) }} '
    '{{ x.b | tojson(ensure_ascii=true) }} {{ x.a | tojson(indent=1) }}'
  )
  tokenizer = with_template(tmp_path, template)
  text = tokenizer.decode(tokenizer.encode_chat([]))
  assert text == (
    '{"b": "é<", "a": [1]} {"a":[1],"b":"é<"} "\\u00e9<" [\n 1\n]'
  )


TEMPLATES = [
  ('{{ raise_exception("no system role") }}', 'no system role'),
  ('{{ messages[0].x.y }}', 'has no attribute'),
  ('{{ messages.__class__.__mro__ }}', 'unsafe|undefined|access'),
  ('{{ messages.append(1) }}', 'not safely callable|unsafe'),
  ('{% for %}', 'no template'),
  ('{{ ' + '(' * 5000 + '1' + ')' * 5000 + ' }}', 'no template'),
  ('{{ ' + '-' * 500 + '1 }}', 'no template'),
  ('{% if x %}' * 200 + '{% endif %}' * 200, 'no template'),
  ('{{ messages | tojson(odd=1) }}', "argument 'odd'"),
  (3, 'chat_template is no text'),
]


@pytest.mark.parametrize(('template', 'match'), TEMPLATES)
def test_templates_that_fail(tmp_path, template, match):
  with pytest.raises(UserError, match=f'tokenizer_config.json: .*{match}') as e:
    with_template(tmp_path, template).encode_chat(
      [{'role': 'user', 'content': 'x'}]
    )
  assert '\n' not in str(e.value)


def test_without_template(tmp_path):
  with pytest.raises(TokenizerError, match='has no chat template'):
    with_template(tmp_path, None).encode_chat([])


BROKEN = {
  'tokenizer.json': ['', '{', '[]', '{"model": 3}'],
  'tiktoken.model': ['', 'YQ==', 'YQ== x', '*** 0', 'YQ== 1\nYg== 2', 'YQ== 0'],
  'tokenizer_config.json': ['[', '{"added_tokens_decoder": 3}'],
}


@pytest.mark.parametrize(
  ('name', 'text'), [(n, t) for n, texts in BROKEN.items() for t in texts]
)
def test_broken_files(tmp_path, name, text):
  if name == 'tokenizer_config.json':
    write_ranks(tmp_path, [bytes([i]) for i in range(256)])
  (tmp_path / name).write_text(text)
  with pytest.raises(UserError, match=name) as info:
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.encode('b')
  assert '\n' not in str(info.value)


def test_two_tokens_of_one_name(tmp_path):
  write_ranks(tmp_path, [bytes([i]) for i in range(256)])
  added = {'256': {'content': 'x'}, '257': {'content': 'x'}}
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps({'added_tokens_decoder': added})
  )
  with pytest.raises(TokenizerError, match="'x' is the name of two tokens"):
    load_tokenizer(tmp_path)


def test_a_token_without_a_name(tmp_path):
  write_ranks(tmp_path, [bytes([i]) for i in range(256)])
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps({'added_tokens_decoder': {'300': {'content': ''}}})
  )
  with pytest.raises(TokenizerError, match='the name of token 300 is empty'):
    load_tokenizer(tmp_path)


def test_text_that_is_no_unicode(kimi):
  with pytest.raises(TokenizerError, match='is not valid'):
    kimi.encode('\ud800')


# ---------------------------------------------------------------- prompts


def test_prompts(tmp_path):
  path = tmp_path / 'p.jsonl'
  path.write_text(
    '{"prompt": "a"}\n\n{"id": "x", "turns": ["b", "c"], "category": "d"}\n'
  )
  first, second = read_prompts(path)
  assert (first.id, first.turns) == (0, ('a',))
  assert (second.id, second.turns) == ('x', ('b', 'c'))


@pytest.mark.parametrize(
  ('text', 'match'),
  [
    ('', 'holds no prompt'),
    ('{', 'line 1: not JSON'),
    ('{"prompt": "a"}\n3', 'line 2: 3 is not'),
    ('{}', 'either prompt or turns'),
    ('{"prompt": "a", "turns": []}', 'either prompt or turns'),
    ('{"turns": []}', 'is no text'),
    ('{"turns": [3]}', 'is no text'),
    ('{"prompt": 3}', 'is no text'),
    ('{"prompt": "a", "id": [1]}', 'id is'),
  ],
)
def test_prompts_that_are_refused(tmp_path, text, match):
  path = tmp_path / 'p.jsonl'
  path.write_text(text)
  with pytest.raises(UserError, match=f'p.jsonl: .*{match}'):
    read_prompts(path)
  with pytest.raises(UserError, match='no such file'):
    read_prompts(tmp_path / 'q')
