"""Streams of text: by bytes, in linear time; stop strings in them."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kdtree_jax.io.tokenizer import (
  StopStrings,
  WindowDecoder,
  load_tokenizer,
  text_stream,
)
from tests.io import fixtures
from tests.io.tokenizer_test import write_ranks


@pytest.fixture(scope='module')
def kimi(tmp_path_factory):
  """Bytes, so that ids are bytes."""
  folder = tmp_path_factory.mktemp('kimi')
  write_ranks(folder, [bytes([i]) for i in range(256)])
  return load_tokenizer(folder)


@pytest.fixture(scope='module')
def pieces(tmp_path_factory):
  """A SentencePiece of the Llama kind, whose ids are bytes, then words."""
  inner = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={f'<0x{i:02X}>': i for i in range(256)}
      | {'▁': 256, '▁a': 257, 'é': 258, '漢': 259},
      merges=[],
      byte_fallback=True,
    )
  )
  decoders = tokenizers.decoders
  inner.decoder = decoders.Sequence(
    [
      decoders.Replace('▁', ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(' ', 1, 0),
    ]
  )
  return saved(tmp_path_factory.mktemp('pieces'), inner)


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  """A WordPiece, whose blanks depend on the place."""
  vocab = {'[UNK]': 0, 'a': 1, '##b': 2, 'c': 3, '.': 4}
  inner = tokenizers.Tokenizer(
    tokenizers.models.WordPiece(vocab=vocab, unk_token='[UNK]')
  )
  inner.decoder = tokenizers.decoders.WordPiece()
  return saved(tmp_path_factory.mktemp('words'), inner)


def saved(folder, inner):
  inner.save(str(folder / 'tokenizer.json'))
  return load_tokenizer(folder)


BROKEN = (0xFF, 0x80, 0xE6, 0xF0, 0xED)


@pytest.mark.parametrize('byte', BROKEN)
@pytest.mark.parametrize('kind', ('kimi', 'pieces'))
def test_broken_bytes_do_not_wait(request, kind, byte):
  """At most three are pending, whatever came before."""
  tokenizer = request.getfixturevalue(kind)
  stream, shown = tokenizer.stream(), ''
  for count in range(1, 4001):
    shown += stream.push([byte])
    assert len(shown) >= count - 3
  assert shown + stream.finish() == '\ufffd' * 4000


def test_a_byte_that_begins_nothing_is_shown_at_once(kimi):
  stream = kimi.stream()
  assert [stream.push([b]) for b in (0xFF, 0xE6, 0x41, 0xF0, 0x9F)] == [
    '\ufffd',
    '',
    '\ufffdA',
    '',
    '',
  ]


def test_a_stream_asks_for_each_token_once(kimi, monkeypatch):
  backend, asked = kimi._backend, []
  piece = backend.piece
  monkeypatch.setattr(
    backend, 'piece', lambda *ids: asked.append(ids) or piece(*ids)
  )
  stream = kimi.stream()
  for _ in range(500):
    stream.push([0xE6])
  assert len(asked) == 500


@fixtures.deterministic
@given(
  st.lists(st.sampled_from([0x41, 0x20, 0xE6, 0xBC, 0xA2, *range(256, 260)]))
)
def test_a_sentencepiece_streams_what_it_decodes(pieces, ids):
  stream = pieces.stream()
  text = ''.join(stream.push([token]) for token in ids) + stream.finish()
  assert text == pieces.decode(ids)


def test_broken_bytes_take_no_letters_with_them(pieces):
  """An output that ends within a letter keeps the letters before it."""
  assert pieces.decode([257, *'漢字'.encode()[:-1]]) == 'a漢\ufffd'


@fixtures.deterministic
@given(st.lists(st.integers(0, 6), max_size=12))
def test_a_wordpiece_streams_what_it_decodes(words, ids):
  """Ids 5 and 6 have no token."""
  stream = words.stream()
  text = ''.join(stream.push([token]) for token in ids) + stream.finish()
  assert text == words.decode(ids)


@fixtures.deterministic
@given(st.text('aé漢👩 ', max_size=12))
def test_a_function_without_bytes_streams_letters(kimi, text):
  stream = WindowDecoder(lambda ids: kimi.decode(ids))
  shown = [stream.push([byte]) for byte in text.encode()]
  assert ''.join(shown) == text
  assert not any('\ufffd' in piece for piece in shown)


@pytest.mark.parametrize('byte', BROKEN)
def test_a_function_without_bytes_does_not_wait(kimi, byte):
  longest = 0

  def decode(ids):
    nonlocal longest
    longest = max(longest, len(ids))
    return kimi.decode(ids)

  stream, shown = WindowDecoder(decode), ''
  for count in range(1, 200):
    shown += stream.push([byte])
    assert len(shown) >= count - 3
  shown += stream.push('漢'.encode())
  assert shown.endswith('漢') and longest < 10


def test_a_tokenizers_own_method_is_read_by_bytes(kimi):
  assert text_stream(kimi.decode).push([0xFF]) == '\ufffd'
  assert text_stream(lambda ids: 'x' * len(ids)).push([1, 2]) == 'xx'


@fixtures.deterministic
@given(
  st.text('ab\n漢', max_size=30),
  st.lists(st.text('ab\n漢', min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_end_where_a_search_says(kimi, text, stops):
  ids = [*text.encode()]
  finder = StopStrings(stops, kimi.stream())
  found = next((i for i, t in enumerate(ids) if finder.push(t)), None)
  ends = (
    i
    for i in range(len(ids))
    if any(s in kimi.decode(ids[: i + 1]) for s in stops)
  )
  assert found == next(ends, None)


def test_a_byte_level_token_may_hold_parts_of_letters(tmp_path):
  """And added tokens are text as it is."""
  letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  vocab = {letter: i for i, letter in enumerate(sorted(letters))}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  inner.decoder = tokenizers.decoders.ByteLevel()
  inner.add_special_tokens(['<｜end▁of▁text｜>'])
  tokenizer = saved(tmp_path, inner)
  text = 'a 漢\n<｜end▁of▁text｜>é'
  ids, stream = tokenizer.encode(text), tokenizer.stream()
  shown = [stream.push([token]) for token in ids]
  assert ''.join(shown) == text == tokenizer.decode(ids)
  assert json.loads((tmp_path / 'tokenizer.json').read_text())['added_tokens']
