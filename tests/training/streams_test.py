"""Ids keep their values whatever the size of the vocabulary."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from kdtree_jax import api, generation
from kdtree_jax.decode import SamplingConfig
from kdtree_jax.errors import UserError
from kdtree_jax.modes import train_drafter
from kdtree_jax.training import build, rollouts, streams
from kdtree_jax.training.corpus import END_OF_TEXT, MASK, read_corpus
from kdtree_jax.training.loop import Data
from kdtree_jax.training.packing import gather_windows, window_starts
from kdtree_jax.training.sources import Document
from tests import support
from tests.training.training_test import MODEL

LARGE = 70_000


def test_the_type_of_ids():
  assert streams.id_dtype(1 << 16) == np.uint16
  assert streams.id_dtype((1 << 16) + 1) == np.uint32
  ids = streams.as_ids(np.array([[0, 65536, 69999]]), LARGE, 'x')
  assert ids.dtype == np.uint32 and ids.tolist() == [[0, 65536, 69999]]
  assert streams.as_ids(np.zeros((0, 3), int), 5, 'x').shape == (0, 3)
  for odd in ([LARGE], [-1]):
    with pytest.raises(UserError, match=f'x: token {odd[0]} is outside'):
      streams.as_ids(np.array(odd), LARGE, 'x')
  with pytest.raises(UserError, match='float64, not integers'):
    streams.as_ids(np.array([1.5]), LARGE, 'x')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A corpus whose words are numbers up to 69997."""
  vocab = {END_OF_TEXT: 0, MASK: 1}
  vocab |= {str(i): i + 2 for i in range(LARGE - 2)}
  model = tokenizers.models.WordLevel(vocab, unk_token=MASK)
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  folder = tmp_path_factory.mktemp('large')
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'manifest.json').write_text('{}')
  text = '5 69997 65534 65533'
  tokens, files = build.encode(
    tokenizer, [Document('a', 'p', 'MIT', 'test', '0', text)]
  )
  assert files[0]['tokens'] == 5
  streams.write_arrays(folder / 'test.npz', {'tokens': tokens})
  return folder


def test_a_corpus_of_many_tokens(folder):
  corpus = read_corpus(folder)
  tokens = corpus.tokens('test')
  assert corpus.vocab_size == LARGE and tokens.dtype == np.uint32
  assert tokens.tolist() == [7, 69999, 65536, 65535, 0]
  windows = gather_windows(jnp.asarray(tokens), jnp.zeros(1, jnp.int32), 3)
  assert windows.tolist() == [[7, 69999, 65536, 65535]]
  drawn = rollouts.choose_prompts(tokens, 0, 1, 4, 0)
  assert drawn.tolist() == [[7, 69999, 65536, 65535]]


def test_what_a_file_may_hold(folder, tmp_path):
  for name in ('tokenizer.json', 'manifest.json'):
    (tmp_path / name).write_bytes((folder / name).read_bytes())
  corpus, path = read_corpus(tmp_path), tmp_path / 'test.npz'
  for tokens, match in (
    (np.array([7, 4463], np.uint16), 'is uint16, but the tokenizer has 70000'),
    (np.array([7, LARGE], np.uint32), 'ids that the tokenizer has not'),
    (np.array([7, 8]), 'int64 .* is no row of uint16 or uint32'),
    (np.array([[7]], np.uint32), 'is no row'),
    (np.array([], np.uint32), 'holds no token'),
  ):
    np.savez(path, tokens=tokens)
    with pytest.raises(UserError, match=match):
      corpus.tokens('test')
  np.savez(path, other=tokens)
  with pytest.raises(UserError, match='test.npz'):
    corpus.tokens('test')
  np.save(tmp_path / 'lone', np.zeros(3))
  for data in (
    (tmp_path / 'lone.npy').read_bytes(),
    (folder / 'test.npz').read_bytes()[:-40],
    b'',
  ):
    path.write_bytes(data)
    with pytest.raises(UserError, match='test.npz: cannot be read'):
      corpus.tokens('test')


def test_wide_files_of_few_ids_are_read(tmp_path):
  vocab = {END_OF_TEXT: 0, MASK: 1, 'a': 7}
  model = tokenizers.models.WordLevel(vocab, unk_token=MASK)
  tokenizers.Tokenizer(model).save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'manifest.json').write_text('{}')
  np.savez(tmp_path / 'test.npz', tokens=np.array([7, 0], np.uint32))
  corpus = read_corpus(tmp_path)
  # Ids with a gap: eight of them, of which three have a name.
  assert corpus.vocab_size == 8 and corpus.token_bytes.tolist()[7] == 1
  assert corpus.tokens('test').dtype == np.uint16
  (tmp_path / 'manifest.json').write_text('[]')
  with pytest.raises(UserError, match='manifest.json is no JSON object'):
    read_corpus(tmp_path)


def test_rollouts_of_many_tokens_are_those_of_decoding():
  target = support.target_of(dataclasses.replace(MODEL, vocab_size=LARGE))
  prompts = np.array([[3, 69999, 65536], [9, 8, 7]])
  roller = train_drafter.Roller(target, 16, 2)
  found = roller(prompts, 6, (1.0,), 11)
  results = generation.generate_batch(
    target,
    None,
    prompts,
    sampling=[SamplingConfig(temperature=1.0, seed=s) for s in (11, 12)],
    max_new_tokens=6,
    stop_ids=(),
    capacity=16,
  )
  said = [[*r.prompt_ids, *r.output_ids] for r in results]
  assert found.dtype == np.uint32 and found.tolist() == said
  data = Data(np.zeros(9, np.uint32), np.zeros(9, np.uint32), 0)
  stream = train_drafter._windows(found, 12, data)
  assert stream[:9].tolist() == said[0] and stream[12:21].tolist() == said[1]
  corpus = np.zeros(60, np.uint32)
  mixed = rollouts.mix(corpus, list(found), 0.5, 0, 0)
  assert set(found.reshape(-1).tolist()) <= set(mixed.tolist())
  with pytest.raises(UserError, match='rollouts: token 6[5-9]... is outside'):
    rollouts.mix(corpus.astype(np.uint16), list(found), 0.5, 0, 0)


def test_streams_that_would_wrap():
  with pytest.raises(UserError, match='2147483648 tokens; at most 2147483647'):
    window_starts(2**31, 10, 2, 0, 0)
  with pytest.raises(UserError, match='train split: int64 .* is no row'):
    Data(np.zeros(9, np.int64), np.zeros(9, np.uint16), 0)


def test_the_manifest_says_what_belongs_to_it(folder, tmp_path):
  for name in ('tokenizer.json', 'test.npz'):
    (tmp_path / name).write_bytes((folder / name).read_bytes())
  digest = read_corpus(folder).tokenizer_digest
  manifest = tmp_path / 'manifest.json'
  splits = {'test': {'sha256': 'x'}}
  manifest.write_text(json.dumps({'tokenizer': digest, 'splits': splits}))
  with pytest.raises(UserError, match='test.npz: is not what manifest.json'):
    read_corpus(tmp_path).tokens('test')
  manifest.write_text(json.dumps({'tokenizer': 'x'}))
  with pytest.raises(UserError, match='tokenizer.json is not the one'):
    read_corpus(tmp_path)


def test_golden_ids_that_would_wrap():
  target = support.target_of(MODEL)
  drafter = api.load_drafter('oracle', target)
  for token in (2**32 + 3, -2):
    golden = np.array([[1, 2, token]])
    with pytest.raises(UserError, match=f'golden id {token} is outside'):
      generation.generate_batch(target, drafter, [[1]], golden=golden)
