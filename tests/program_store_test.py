"""A second process finds what a first one compiled, and nothing else."""

import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kdtree_jax import program_store, registry
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decode import Engine, init_state
from kdtree_jax.decode.generate import decode_loop, loop_programs
from kdtree_jax.decode.programs import Ingredients, ProgramCache
from kdtree_jax.drafters.random import RandomDrafter
from kdtree_jax.errors import UserError
from kdtree_jax.model import init_params
from kdtree_jax.named_configs import load_config
from kdtree_jax.program_store import ProgramStore

CONFIG = dataclasses.replace(load_config('tiny'), num_hidden_layers=2)


def make_engine(budget=3, policy='best_first', config=CONFIG):
  drafter = RandomDrafter(config.vocab_size, 4)
  decode = DecodeConfig(
    tree_budget=budget,
    draft_depth=3,
    capacity=16,
    prefill_chunk=8,
    tree_policy=policy,
  )
  return Engine(config, drafter, decode)


@pytest.fixture(autouse=True)
def without_jax_cache():
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()
  yield
  jax.config.update('jax_enable_compilation_cache', before)
  compilation_cache.reset_cache()


@pytest.fixture(scope='module')
def params():
  target = init_params(CONFIG, jax.random.key(0), jnp.float32)
  return {'target': target, 'drafter': {}}


def make_state(engine):
  return init_state(engine, [[1, 2, 3]], [6], (), jnp.float32)


def make_cache(folder):
  """As of a process of its own: XLA cannot store what has run on a CPU."""
  jax.clear_caches()
  cache = ProgramCache()
  cache.store = ProgramStore(folder, ('cpu',))
  return cache


def key_of(store, engine, function=decode_loop, **changed):
  made_of = Ingredients(function, engine, '*', (((1,), 'f4'),), None, True)
  return store.path(made_of._replace(**changed))


def run(cache, engine, params):
  program, _ = cache.get(
    decode_loop, engine, params, make_state(engine), donate=True
  )
  state = make_state(engine)
  result = program(params, state)
  assert state.tokens.is_deleted()
  return np.asarray(result.tokens), np.asarray(result.stats.num_nodes)


def test_a_second_cache_loads_what_the_first_compiled(tmp_path, params):
  engine, counts, results = make_engine(), [], []
  for _ in range(2):
    cache = make_cache(tmp_path / 'programs')
    results.append(run(cache, engine, params))
    counts.append(cache.compilations)
  assert counts == [1, 0]
  for first, second in zip(*results, strict=True):
    np.testing.assert_array_equal(first, second)
  assert len(list((tmp_path / 'programs').iterdir())) == 1


def test_what_does_not_load_is_compiled_and_stored_anew(tmp_path, params):
  engine = make_engine()
  truth = run(make_cache(tmp_path), engine, params)
  (path,) = tmp_path.iterdir()
  whole = path.read_bytes()
  middle = len(whole) // 2
  flipped = bytes([whole[middle] ^ 1])
  for wrong in (
    b'',
    whole[:middle],
    whole[:middle] + flipped + whole[middle + 1 :],
    pickle.dumps((1, 2, 3)),
  ):
    path.write_bytes(wrong)
    cache = make_cache(tmp_path)
    np.testing.assert_array_equal(run(cache, engine, params)[0], truth[0])
    assert cache.compilations == 1
    assert len(path.read_bytes()) > len(whole) // 2


@pytest.mark.parametrize('error', [ValueError, NotImplementedError, OSError])
def test_what_cannot_be_stored_still_runs(
  error, tmp_path, params, monkeypatch, caplog
):
  def serialize(program):
    raise error('not this one')

  monkeypatch.setattr(
    program_store.serialize_executable, 'serialize', serialize
  )
  cache = make_cache(tmp_path)
  run(cache, make_engine(), params)
  assert cache.compilations == 1 and not list(tmp_path.iterdir())
  assert 'not this one' in caplog.text


def test_the_last_used_are_kept(tmp_path, monkeypatch):
  monkeypatch.setattr(program_store, 'MAX_FILES', 2)
  store = ProgramStore(tmp_path, ('cpu',))
  program = jax.jit(lambda x: x + 1).lower(jnp.float32(1)).compile()
  paths = [tmp_path / f'{i}.program' for i in range(3)]
  for age, path in zip((200, 100), paths, strict=False):
    store.save(path, program)
    os.utime(path, (path.stat().st_mtime - age,) * 2)
  assert store.load(paths[0])(jnp.float32(1)) == 2
  store.save(paths[2], program)
  assert sorted(tmp_path.iterdir()) == [paths[0], paths[2]]


def other_function(engine, params, state):
  return state


def test_every_ingredient_changes_the_key(tmp_path, monkeypatch):
  store = ProgramStore(tmp_path, ('cpu',))
  engine = make_engine()
  keys = [key_of(store, engine)]
  assert key_of(store, make_engine()) == keys[0]
  other = dataclasses.replace(CONFIG, rope_theta=1e5)
  for changed in (
    make_engine(4),
    make_engine(policy='chain'),
    make_engine(config=other),
    engine.for_prefill(),
  ):
    keys.append(key_of(store, changed))
  for more in (
    {'shapes': (((1,), 'i4'),)},
    {'shapes': (((2,), 'f4'),)},
    {'structure': '(*, *)'},
    {'donate': False},
    {'options': {'xla_some_option': 'true'}},
    {'function': loop_programs},
  ):
    keys.append(key_of(store, engine, **more))
  with jax.default_matmul_precision('highest'):
    keys.append(key_of(store, engine))
  with monkeypatch.context() as patch:
    patch.setenv('XLA_FLAGS', '--xla_some_flag')
    keys.append(key_of(store, engine))
  with monkeypatch.context() as patch:
    patch.setattr(program_store, '_sources', lambda: 'edited')
    keys.append(key_of(ProgramStore(tmp_path, ('cpu',)), engine))
  assert None not in keys and len(set(keys)) == len(keys)
  assert engine.model is engine.model  # A cached property is no ingredient.
  assert key_of(store, engine) == keys[0]


def sources_of(folder, monkeypatch):
  package = type(sys)('package')
  package.__file__ = str(folder / '__init__.py')
  monkeypatch.setattr(program_store, '_PACKAGES', (package,))
  return program_store._sources()


def test_an_edit_changes_the_sources(tmp_path, monkeypatch):
  found, file = [], tmp_path / '__init__.py'
  for text in ('x = 1', 'x = 2'):
    file.write_text(text)
    assert sources_of(tmp_path, monkeypatch) is None  # Not what was imported.
    os.utime(file, (0, 0))
    found.append(sources_of(tmp_path, monkeypatch))
  assert None not in found and found[0] != found[1]
  (tmp_path / '.#lock.py').symlink_to('somebody@somewhere')
  assert sources_of(tmp_path, monkeypatch) == found[1]
  assert sources_of(tmp_path / 'archive', monkeypatch) is None


def test_nothing_is_stored_of_unknown_sources(tmp_path, monkeypatch):
  monkeypatch.setattr(program_store, '_sources', lambda: None)
  store = ProgramStore(tmp_path, ('cpu',))
  assert key_of(store, make_engine()) is None


def test_a_store_that_fails_hangs_nobody(tmp_path, params):
  """An unknown policy fails as often as it is asked for, not once."""
  cache = make_cache(tmp_path)
  engine = make_engine()
  refused = []

  def ask():
    with pytest.raises(UserError, match='unknown tree_policy'):
      run(cache, make_engine(policy='none'), params)
    refused.append(True)

  for _ in range(2):
    # Of a thread that hangs, pytest would wait for the end.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=60)
  assert refused == [True, True]
  locked = tmp_path / 'locked'
  locked.write_text('a file, not a folder')
  cache.store = ProgramStore(locked, ('cpu',))
  run(cache, engine, params)
  assert cache.compilations == 1


def test_a_file_that_does_not_load_is_lowered_as_the_caller_wants(tmp_path):
  """In the caller's thread: JAX's settings are a thread's."""
  seen = []

  def function(engine, params, state):
    seen.append(jax.config.jax_default_matmul_precision)
    return state

  class Store:
    def path(self, made_of):
      return tmp_path / 'x'

    def load(self, path):
      return None

    def save(self, path, program):
      pass

  cache = ProgramCache()
  cache.store = Store()
  with jax.default_matmul_precision('highest'):
    cache.get_all([(function, 'a'), (function, 'b')], {}, jnp.float32(1))
  assert seen == ['highest', 'highest']


def test_arrays_elsewhere_have_programs_of_their_own(tmp_path, monkeypatch):
  """A stored program is bound to the first device."""

  class Store:
    def path(self, made_of):
      raise AssertionError('asked for a program of another device')

  cache, state, here = ProgramCache(), jnp.float32(1), jax.devices()
  cache.store = Store()
  with monkeypatch.context() as patch:
    patch.setattr(jax, 'devices', lambda: ['elsewhere', *here])
    cache.get(other_function, 'a', {}, state)
  assert cache.compilations == 1
  with pytest.raises(AssertionError, match='another device'):
    cache.get(other_function, 'b', {}, state)


def test_foreign_code_is_not_stored(tmp_path):
  """Nobody would notice an edit of it."""

  class Foreign(RandomDrafter):
    pass

  store = ProgramStore(tmp_path, ('cpu',))
  engine = make_engine()
  drafter = Foreign(CONFIG.vocab_size, 4)
  assert key_of(store, dataclasses.replace(engine, drafter=drafter)) is None
  assert key_of(store, engine, function=other_function) is None
  best_first = registry.get('tree_policy', 'best_first')

  @functools.wraps(best_first)
  def wrapped(*arguments):
    return best_first(*arguments)

  name = 'policy of program_store_test'
  for policy in (other_function, wrapped, functools.partial(best_first)):
    registry.register('tree_policy', name)(policy)
    try:
      assert key_of(store, make_engine(policy=name)) is None
    finally:
      registry._ENTRIES['tree_policy'].pop(name)


def test_for_a_gpu_only_by_default(tmp_path, monkeypatch):
  store = ProgramStore(tmp_path)
  for backend in ('cpu', 'gpu'):
    monkeypatch.setattr(jax, 'default_backend', lambda name=backend: name)
    assert (key_of(store, make_engine()) is None) == (backend == 'cpu')


@pytest.mark.parametrize('policy', registry.names('tree_policy'))
@pytest.mark.parametrize('drafter', registry.names('drafter'))
def test_all_that_is_registered_here_is_stored(drafter, policy, tmp_path):
  engine = make_engine(policy=policy)
  create = registry.get('drafter', drafter).create
  engine = dataclasses.replace(engine, drafter=create(CONFIG, 4))
  assert key_of(ProgramStore(tmp_path, ('cpu',)), engine) is not None


CHILD = """
import sys
import jax
from kdtree_jax.config import DecodeConfig
from kdtree_jax.named_configs import load_config
from kdtree_jax.decode import Engine
from kdtree_jax.decode.generate import decode_loop
from kdtree_jax.decode.programs import Ingredients
from kdtree_jax.program_store import ProgramStore
from kdtree_jax.benchmark.subject import random_drafter
from kdtree_jax import api

target = api.random_target('tiny')
drafter = random_drafter(target, 4, 64).drafter
decode = DecodeConfig(tree_budget=3, draft_depth=3, capacity=16)
engine = Engine(target.config, drafter, decode)
structure = jax.tree.structure(target.params)
store = ProgramStore(sys.argv[1], ('cpu',))
shapes = (((1,), 'f4'),)
made_of = Ingredients(decode_loop, engine, structure, shapes, None, True)
print(store.path(made_of))
"""


def test_not_beside_the_cache_of_jax(tmp_path):
  """What comes from there cannot be stored again: it would be incomplete."""
  store = ProgramStore(tmp_path, ('cpu',))
  before = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  try:
    assert key_of(store, make_engine()) is not None
    jax.config.update('jax_enable_compilation_cache', True)
    assert key_of(store, make_engine()) is None
  finally:
    jax.config.update('jax_compilation_cache_dir', before)


def test_every_process_has_the_same_key(tmp_path):
  children = [
    subprocess.Popen(
      [sys.executable, '-c', CHILD, str(tmp_path)],
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ
      | {'PYTHONHASHSEED': seed, 'JAX_ENABLE_COMPILATION_CACHE': 'false'},
    )
    for seed in ('1', '2')
  ]
  found = [child.communicate(timeout=300)[0].strip() for child in children]
  assert found[0] == found[1]
  assert found[0].startswith(str(tmp_path))
