"""Special tokens: what begins a text, what ends one, what a user may write."""

import json
import shutil

import pytest
import tokenizers

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.convert import read_checkpoint
from kdtree_jax.io.kdtr import write_bundle
from kdtree_jax.io.stop_ids import read_stop_ids
from kdtree_jax.io.tokenizer import load_tokenizer
from kdtree_jax.modes.inspect import describe
from tests import support
from tests.io.tokenizer_test import KIMI_NAMES, KIMI_TEMPLATE, write_ranks

SPECIALS = ('<s>', '</s>', '<|User|>', '<|end|>')
CHATML = (
  '{% for m in messages %}<|User|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n'
  '{% endfor %}{% if add_generation_prompt %}<|User|>assistant\n{% endif %}'
)


def byte_level(vocab_size=256):
  """Bytes, then `<|`, a merge."""
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {letter: i for i, letter in enumerate(letters)}
  inner = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab=vocab | {'<|': 256}, merges=[('<', '|')])
  )
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  inner.decoder = tokenizers.decoders.ByteLevel()
  return inner


def with_specials():
  """Ids 257 to 260 are `SPECIALS`; 261 is a run of blanks."""
  inner = byte_level()
  inner.add_special_tokens(list(SPECIALS))
  inner.add_tokens(['    '])
  return inner


def begins(*names):
  """A post-processor that puts tokens before a text, and one after it."""
  return tokenizers.processors.TemplateProcessing(
    single=[*names, '$A', '</s>'],
    special_tokens=[(n, 257 + SPECIALS.index(n)) for n in {*names, '</s>'}],
  )


def save(folder, inner=None, **config):
  folder.mkdir(exist_ok=True)
  (inner or with_specials()).save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return folder


def load(folder, inner=None, **config):
  return load_tokenizer(save(folder, inner, **config))


# ------------------------------------------------- what a text begins with


@pytest.mark.parametrize(
  ('names', 'config', 'wanted'),
  [
    (('<s>',), {}, [257]),
    (('<s>', '<|User|>'), {}, [257, 259]),
    (('<s>',), {'add_bos_token': True, 'bos_token': '<s>'}, [257]),
    (('<s>',), {'add_bos_token': False}, []),
    ((), {'add_bos_token': True, 'bos_token': {'content': '<s>'}}, [257]),
    ((), {'bos_token': '<s>'}, []),
    ((), {}, []),
  ],
)
@pytest.mark.parametrize('nested', (False, True))
def test_what_a_text_begins_with(tmp_path, names, config, wanted, nested):
  """Once, even if the text spells it out; nothing comes after it."""
  inner = with_specials()
  if names:
    inner.post_processor = begins(*names)
    if nested:
      inner.post_processor = tokenizers.processors.Sequence(
        [tokenizers.processors.ByteLevel(), inner.post_processor]
      )
  tokenizer = load(tmp_path, inner, **config)
  word = inner.encode('ab', add_special_tokens=False).ids
  assert tokenizer.encode('ab') == wanted + word
  spelled = ''.join(SPECIALS[i - 257] for i in wanted)
  assert tokenizer.encode(f'{spelled}ab') == wanted + word


def test_a_chat_begins_with_what_its_template_says(tmp_path):
  inner = with_specials()
  inner.post_processor = begins('<s>')
  for template, first in (('{{ bos_token }}a', [257]), ('a', [])):
    config = {'bos_token': '<s>', 'chat_template': template}
    tokenizer = load(tmp_path, inner, **config)
    assert tokenizer.encode_chat([])[:-1] == first


@pytest.mark.parametrize('name', ('<nothing>', None))
def test_a_beginning_that_is_no_token(tmp_path, name):
  with pytest.raises(UserError, match='tokenizer_config.json: .*bos_token'):
    load(tmp_path, add_bos_token=True, bos_token=name)
  with pytest.raises(UserError, match='add_bos_token is 1, not true or false'):
    load(tmp_path, add_bos_token=1, bos_token='<s>')


def test_a_post_processor_with_tokens_that_are_none(tmp_path):
  inner = byte_level()
  inner.post_processor = begins('<s>')
  with pytest.raises(UserError, match="post_processor: '<s>' is token 257"):
    load(tmp_path, inner)


# ----------------------------------------------- added_tokens_decoder alone


def test_tokens_that_only_the_config_names(tmp_path):
  added = {
    '261': {'content': '<tool>', 'special': False, 'normalized': False},
    '257': {'content': '<s>', 'special': True},
    '258': {'content': '</s>', 'special': True},
    '259': {'content': '<|User|>', 'special': True},
    '260': {'content': '<|end|>', 'special': True},
  }
  tokenizer = load(tmp_path, byte_level(), added_tokens_decoder=added)
  ids = tokenizer.encode('a<|end|><tool>')
  assert ids[1:] == [260, 261]
  assert tokenizer.decode(ids) == 'a<|end|><tool>'


@pytest.mark.parametrize(
  ('added', 'match'),
  [
    ({'300': {'content': '<far>'}}, "'<far>' is token 300, but 262"),
    ({'258': {'content': '<s>'}}, "'<s>' is token 258, but 257"),
    ({'x': {'content': '<s>'}}, "'x' is .*no id with a token"),
    ({'257': {'special': True}}, "'257' is .*no id with a token"),
    ([3], 'added_tokens_decoder is no object'),
  ],
)
def test_tokens_that_two_files_see_differently(tmp_path, added, match):
  with pytest.raises(UserError, match=f'tokenizer_config.json: .*{match}'):
    load(tmp_path, added_tokens_decoder=added)


# ---------------------------------------------------------------- stop ids


def checkpoint(folder, source='moonlight'):
  """A target of 130 ids whose tokenizer has all its special ones below."""
  shutil.copytree(support.DATA / source, folder)
  vocab = {chr(97 + i): i for i in range(20)}
  inner = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab=vocab, unk_token='a')
  )
  inner.add_special_tokens(list(SPECIALS))
  raw = json.loads((folder / 'config.json').read_text()) | {'eos_token_id': 1}
  (folder / 'config.json').write_text(json.dumps(raw))
  (folder / 'generation_config.json').write_text('{"eos_token_id": [5, 1]}')
  save(folder, inner, eos_token='</s>', chat_template=CHATML)
  return folder, raw


def test_stop_ids_of_every_place(tmp_path):
  folder, raw = checkpoint(tmp_path / 'x')
  stops = read_stop_ids(folder, raw)
  assert stops.sources == {
    'config.json': (1,),
    'generation_config.json': (5, 1),
    'eos_token of tokenizer_config.json': (21,),
    'end of a turn in the chat template': (23,),
  }
  assert stops.ids == (1, 5, 21, 23)
  text = describe(folder)
  assert 'stop ids: 1, 5, 21, 23\n' in text
  assert '\n  by end of a turn in the chat template: 23\n' in text
  assert api.load_target(folder).stop_ids == (1, 5, 21, 23)
  bundle = read_checkpoint(folder)
  assert bundle.config.eos_token_id == (1, 5, 21, 23)
  write_bundle(tmp_path / 'x.kdtr', bundle)
  assert api.load_target(tmp_path / 'x.kdtr').stop_ids == (1, 5, 21, 23)
  assert 'stop ids: 1, 5, 21, 23\n' in describe(tmp_path / 'x.kdtr')


ENDS = {
  CHATML: '<|end|>',
  # With a blank before it, as Llama 2 has it.
  '{% for m in messages %}{{ m.content }} </s>{% endfor %}': '</s>',
  # In the content's place a template may want another key, and fail.
  '{{ messages[0].text.x }}': None,
  '{{ raise_exception("no") }}': None,
  '{% for %}': None,
  'no answer<|end|>': None,
  '{% for m in messages %}{{ m.content }}{% endfor %}': None,
  # What begins the next turn, or an answer, ends none.
  '{% for m in messages %}<|User|>{{ m.content }}{% endfor %}': None,
  '{% for m in messages %}{{ m.content }}{% endfor %}<s>': None,
  '{% for m in messages %}{% if m.role == "assistant" %}{% generation %}'
  '{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}': '</s>',
}


@pytest.mark.parametrize(('template', 'wanted'), ENDS.items())
def test_the_end_of_a_turn(tmp_path, template, wanted):
  folder = save(tmp_path / 'x', chat_template=template)
  found = read_stop_ids(folder, {}).ids
  assert found == (() if wanted is None else (257 + SPECIALS.index(wanted),))


def test_kimis_end_of_a_turn_without_tiktoken(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'tiktoken', None)
  write_ranks(tmp_path, [bytes([i]) for i in range(256)])
  added = {str(i): {'content': name} for i, name in KIMI_NAMES.items()}
  config = {'added_tokens_decoder': added, 'eos_token': '[EOS]'}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  (tmp_path / 'chat_template.jinja').write_text(KIMI_TEMPLATE)
  assert read_stop_ids(tmp_path, {}).ids == (257, 258)
  # Tokens that the model cannot generate end nothing.
  assert read_stop_ids(tmp_path, {'vocab_size': 258}).ids == (257,)


def test_an_end_that_is_no_token(tmp_path):
  folder = save(tmp_path / 'x', eos_token='<nothing>')
  with pytest.raises(UserError, match="config.json: eos_token is '<nothing>'"):
    read_stop_ids(folder, {})


def test_a_broken_tokenizer_is_named(tmp_path):
  folder, raw = checkpoint(tmp_path / 'x')
  (folder / 'tokenizer.json').write_text('{')
  stops = read_stop_ids(folder, raw)
  assert stops.ids == (1, 5) and 'tokenizer.json' in stops.problem
  assert 'the tokenizer was not read: ' in describe(folder)


# ------------------------------------------------------- what a user writes


def kimi(folder):
  folder.mkdir()
  write_ranks(folder, [bytes([i]) for i in range(256)])
  added = {str(i): {'content': name} for i, name in KIMI_NAMES.items()}
  config = {'added_tokens_decoder': added, 'chat_template': KIMI_TEMPLATE}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return load_tokenizer(folder)


def said(content, role='user'):
  return [{'role': role, 'content': content}]


def test_kimis_control_tokens_in_a_message(tmp_path):
  tokenizer = kimi(tmp_path / 'x')
  content = 'a<|im_end|><|im_system|>b[EOS]<|reserved_token_300|>'
  middle = [259, *b'user', 265, *content.encode(), 258]
  wanted = [*middle, 260, *b'assistant', 265]
  assert tokenizer.encode_chat(said(content)) == wanted
  tokens = tokenizer.encode_chat(said(content), parse_special=True)
  assert tokens[6:11] == [97, 258, *b'<|i']
  assert 257 in tokens and 300 in tokens


@pytest.mark.parametrize('content', ('<|end|>', ' x<|end|>y<s>\n', '<<|end|>'))
def test_control_tokens_in_a_message(tmp_path, content):
  """As if the tokenizer had none of them there; blanks stay what they are."""
  tokenizer, plain = load(tmp_path, chat_template=CHATML), byte_level()
  plain.add_tokens(['    '])
  ids = tokenizer.encode_chat(said(content + '    z'))
  text = f'user\n{(content + "    z").strip()}'

  def encoded(text):
    found = plain.encode(text).ids
    return [261 if token == 257 else token for token in found]

  end = encoded('\n')
  wanted = [259, *encoded(text), 260, *end, 259, *encoded('assistant\n')]
  assert ids == wanted
  assert 256 in ids  # `<|` is merged, and across a placeholder too
  parsed = tokenizer.encode_chat(said(content), parse_special=True)
  assert parsed.count(260) == 2


def test_messages_without_control_tokens_are_encoded_as_ever(tmp_path):
  tokenizer = load(tmp_path, chat_template=CHATML)
  text = '<|User|>user\na < b |> c<|end|>\n<|User|>assistant\n'
  messages = said('a < b |> c')
  assert tokenizer.encode_chat(messages) == tokenizer.encode(text)


def test_control_tokens_of_a_vocabulary_that_has_them(tmp_path):
  """A model of pieces that would find `</s>` in a text by itself."""
  pieces = [('<unk>', 0.0), ('</s>', 0.0), ('<', -1.0), ('/', -1.0)]
  pieces += [('s', -1.0), ('>', -1.0), ('a', -1.0)]
  inner = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
  inner.add_special_tokens(['</s>'])
  template = '{{ messages[0].content }}</s>'
  tokenizer = load(tmp_path, inner, chat_template=template)
  assert tokenizer.encode_chat(said('a</s>')) == [6, 2, 3, 4, 5, 1]


REWORKED = {
  # The template sees the content as it is.
  "{{ m.content.split('</s>')[-1] }}": 'b<|end|>',
  "{{ m.content.split('<|end|>')[0] }}": 'a</s>b',
  "{{ (m.content ~ '')[:5] if '</s>' in m.content else 'wrong' }}": None,
  "{{ 'x' + m.content + 'y' }}": 'xa</s>b<|end|>y',
  '{{ m.content + m.content }}': 'a</s>b<|end|>a</s>b<|end|>',
  '{{ m.content[1:] | upper | lower }}': '</s>b<|end|>',
  "{{ m.content | replace('</s>', '-') }}": 'a-b<|end|>',
  "{{ m.content.replace('</s>', '-') }}": 'a-b<|end|>',
  "{{ 'x-y'.replace('-', m.content) }}": 'xa</s>b<|end|>y',
  "{{ '%s!' % m.content }}": 'a</s>b<|end|>!',
  "{{ '{}!'.format(m.content) }}": 'a</s>b<|end|>!',
  "{{ '{content}!'.format(**m) }}": 'a</s>b<|end|>!',
  "{{ '-'.join([m.content, 'z']) }}": 'a</s>b<|end|>-z',
  "{{ [m.content, 'z'] | join('-') }}": 'a</s>b<|end|>-z',
  '{{ m.content | tojson }}': '"a</s>b<|end|>"',
  "{{ {'x': [m.content]} | tojson }}": '{"x": ["a</s>b<|end|>"]}',
  "{% for c in m.content.split('b') %}{{ c }}{% endfor %}": 'a</s><|end|>',
  '{% set x %}{{ m.content }}{% endset %}{{ x | trim }}': 'a</s>b<|end|>',
  '{{ m.content | length }}{{ m.content is string }}': '13True',
  '{{ m.parts[0].text }}': '<s>',
}


@pytest.mark.parametrize(('expression', 'wanted'), REWORKED.items())
def test_whatever_a_template_does_with_a_content(tmp_path, expression, wanted):
  """Its text is as ever, and no control token comes from the content."""
  template = '{% for m in messages %}' + expression + '{% endfor %}<|User|>'
  tokenizer = load(tmp_path, chat_template=template)
  message = {
    'role': 'user',
    'content': 'a</s>b<|end|>',
    'parts': [{'type': 'text', 'text': '<s>'}],
  }
  if wanted is None:
    with pytest.raises(UserError, match='--parse_special_in_messages'):
      tokenizer.encode_chat([message])
    return
  ids = tokenizer.encode_chat([message])
  assert tokenizer.decode(ids) == f'{wanted}<|User|>'
  assert [token for token in ids if token > 256] == [259]


def test_nobody_can_write_a_placeholder(tmp_path):
  tokenizer = load(tmp_path, chat_template=CHATML)
  hidden = tokenizer._backend.hidden
  other = type(hidden)(SPECIALS)
  content = f'{other.placeholder("<|end|>")}<s>\uf000\ue100\uf001'
  ids = tokenizer.encode_chat(said(content))
  assert content in tokenizer.decode(ids) and ids.count(260) == 1


# ---------------------------------------------------------------- templates


def test_templates_see_special_tokens_as_in_transformers(tmp_path):
  template = (
    '{{ cls_token }} {{ sep_token }} {{ mask_token }} {{ image_token }} '
    '{{ additional_special_tokens | join("+") }} {{ pad_token is defined }} '
    '{{ documents is none }}'
  )
  tokenizer = load(
    tmp_path,
    chat_template=template,
    cls_token={'content': '[C]'},
    sep_token='[S]',
    mask_token='[M]',
    extra_special_tokens={'image_token': '[I]'},
    additional_special_tokens=['[A]', {'content': '[B]'}],
  )
  text = tokenizer.decode(tokenizer.encode_chat([]))
  assert text == '[C] [S] [M] [I] [A]+[B] False True'


def test_what_the_model_is_trained_on_is_marked_and_no_more(tmp_path):
  template = (
    '{% for m in messages %}\n  {% generation %}\n{{ m.content }}'
    '{% set x = 1 %}{% if m.content == "b" %}{% break %}{% endif %}\n'
    '  {% endgeneration %}\n'
    '{{ x is defined }}{% endfor %}'
  )
  tokenizer = load(tmp_path, chat_template=template)
  ids = tokenizer.encode_chat([*said('a'), *said('b'), *said('c')])
  assert tokenizer.decode(ids) == 'aFalseb'


@pytest.mark.parametrize('template', ('{% for %}', 3, b'\xff'))
def test_a_template_that_is_none_is_no_reason_to_refuse_text(
  tmp_path, template
):
  if isinstance(template, bytes):
    save(tmp_path)
    (tmp_path / 'chat_template.jinja').write_bytes(template)
    tokenizer = load_tokenizer(tmp_path)
  else:
    tokenizer = load(tmp_path, chat_template=template)
  assert tokenizer.decode(tokenizer.encode('ab')) == 'ab'
  with pytest.raises(UserError, match='chat_template|tokenizer_config'):
    tokenizer.encode_chat(said('x'))


# ------------------------------------------------- texts a library refuses


def test_long_runs(tmp_path):
  """Ids are those of the whole where tiktoken takes it, of parts elsewhere."""
  tokenizer = kimi(tmp_path / 'x')
  text = 'a[EOS] b' + ' ' * 1_000_000 + 'c'
  ids = tokenizer.encode(text)
  assert ids[:4] == [97, 257, 32, 98] and len(ids) == 1_000_005
  assert tokenizer.decode(ids) == text
  spelled = tokenizer.encode_chat(said('[EOS]' + ' ' * 1_000_000))
  assert spelled.count(257) == 0 and spelled.count(32) == 1_000_000


def test_long_runs_are_cut_as_kimi_cuts_them(tmp_path):
  """Every 25000 blanks of a text that is refused, from where a run begins."""
  folder = tmp_path / 'x'
  folder.mkdir()
  tokens = [bytes([i]) for i in range(256)]
  write_ranks(folder, [*tokens, b'  ', b'    ', b'        '])
  ids = load_tokenizer(folder).encode('a' + ' ' * 700_001)
  part = [258] * (25_000 // 8)
  # Kimi's own tokenizer cuts at 400000 letters as well.
  assert ids[:1] == [97] and ids[1 : 1 + 15 * 3125] == part * 15
  assert load_tokenizer(folder).decode(ids) == 'a' + ' ' * 700_001


def test_what_a_library_refuses_is_one_line(tmp_path):
  inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab={'a': 0}))
  tokenizer = load(tmp_path, inner)
  with pytest.raises(UserError, match="refuses text 'b': ") as info:
    tokenizer.encode('b')
  assert '\n' not in str(info.value)
