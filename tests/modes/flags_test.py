"""Flags: one dataclass a mode, the command line, the pages of --help."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import typing

import pytest

import kdtree_jax
from kdtree_jax.errors import UserError
from kdtree_jax.modes import flags
from kdtree_jax.modes.options import MODES, flags_of
from kdtree_jax.modes.options.fields import REQUIRED
from kdtree_jax.options import GenerateKeywords, GenerateOptions
from tests.command_line import arguments, main, mode_flags

ROOT = pathlib.Path(__file__).parents[2]
# The least that a mode takes.
NEEDED = {
  'generate': {'target': 't', 'prompt_ids': (1,)},
  'audit': {'target': 't', 'prompt_ids': (1,), 'drafter': 'null'},
  'bench': {'target': 't'},
  'bench_acceptance': {'target': 't', 'drafter': 'null', 'corpus': 'c'},
  'inspect': {'target': 't'},
  'convert': {'target': 't', 'output': 'o'},
  'make_bundle': {'variant': 'tiny'},
  'make_corpus': {'corpus_sources': ('s',), 'output': 'o'},
  'train_target': {'corpus': 'c', 'recipe': 'tiny', 'output': 'o'},
  'train_drafter': {
    **{'corpus': 'c', 'recipe': 'tiny', 'output': 'o', 'target': 't'}
  },
  'demo': {},
}


@pytest.mark.parametrize('mode', MODES)
def test_defaults_are_those_of_the_fields(mode):
  given = mode_flags(mode, **NEEDED[mode])
  assert type(given) is MODES[mode] and given.mode == mode
  assert given.given == set(NEEDED[mode])
  for name, each in flags_of(MODES[mode]).items():
    wanted = NEEDED[mode].get(name, each.default)
    assert getattr(given, name) == wanted, name


@pytest.mark.parametrize('mode', MODES)
def test_required_flags_are_asked_for(mode):
  for name, each in flags_of(MODES[mode]).items():
    if each.default is REQUIRED:
      rest = {k: v for k, v in NEEDED[mode].items() if k != name}
      with pytest.raises(UserError, match=f'--mode={mode} needs --{name}$'):
        mode_flags(mode, **rest)


def test_types():
  given = mode_flags(
    'generate',
    **NEEDED['generate'] | {'prompt_ids': (3, 1), 'stop_ids': ()},
    drafter='random',
    tree_budget=(7, 24),
    methods=('chain', 'ddtree'),
    temperature=0.5,
    chat=False,
    stop_strings=('a, b', ' '),
  )
  assert given.prompt_ids == (3, 1) and given.stop_ids == ()
  assert given.tree_budget == (7, 24) and given.temperature == 0.5
  assert given.methods == ('chain', 'ddtree') and given.chat is False
  assert given.stop_strings == ('a, b', ' ')
  sweep = NEEDED['bench_acceptance'] | {'temperature': (1, 0.5)}
  assert mode_flags('bench_acceptance', **sweep).temperatures == [0.5, 1.0]


@pytest.mark.parametrize(
  ('mode', 'argument', 'message'),
  [
    ('generate', '--tree_budget=1,x', 'a comma-separated list of integers'),
    ('generate', '--tree_budget=1,,2', 'a comma-separated list of integers'),
    ('generate', '--max_new_tokens=1.5', '--max_new_tokens=1.5 is not an int'),
    ('generate', '--temperature=0,1', '--temperature=0,1 is not a number'),
    ('generate', '--methods=', '--methods is empty; choose from ar, chain'),
    ('generate', '--methods=beam', '--methods=beam is none of ar, chain'),
    ('generate', '--chat=maybe', '--chat=maybe'),
    ('generate', '--seed', 'Missing value for flag --seed'),
    ('generate', '--max_new_tokns=3', 'Did you mean: max_new_tokens'),
    ('generate', '--nostrem', 'nostrem'),
    ('generate', '--variant=tiny', '--variant is not used by --mode=generate'),
    ('demo', '--nochat', '--chat is not used by --mode=demo'),
    ('demo', '--hit_rate=1', '--hit_rate is not used by --mode=demo'),
    ('bench', '--context=1,0', '--context needs positive integers'),
    ('bench', '--layers=1', '--layers is not used without --config'),
    ('bench', '--max_new_tokens=9', 'is not used without --end_to_end'),
    ('bench', '--acceptance_rate=0.8', 'is not used without --end_to_end'),
    ('bench_acceptance', '--temperature=x', 'comma-separated list of numbers'),
    ('bench_acceptance', '--temperature=', '--temperature is empty'),
    ('bench_acceptance', '--batch_size=0', '--batch_size=0 is below 1'),
    ('make_bundle', '--variant=no', '--variant=no is none of deepseek'),
    ('make_corpus', '--presence_penalty=1', 'history along every path'),
  ],
)
def test_wrong_flags(mode, argument, message):
  given = [*arguments(mode, **NEEDED[mode]), argument]
  with pytest.raises(UserError) as raised:
    flags.parse(given)
  assert message in str(raised.value) and '\n' not in str(raised.value)


def test_modes_and_their_flags_come_in_any_order(tmp_path):
  wanted = mode_flags('inspect', target='t')
  assert flags.parse(['x', '--target', 't', '--mode', 'inspect']) == wanted
  (tmp_path / 'f').write_text('--mode=inspect\n--target=t\n')
  assert flags.parse(['x', f'--flagfile={tmp_path}/f']) == wanted
  assert flags.mode_of(['x', '--target=t']) == 'demo'


ALIASES = [
  ('--hit_rate=0.5', 'acceptance_rate', 0.5),
  ('--chain_seed', 'keep_top1_chain', True),
  ('--nochain_seed', 'keep_top1_chain', False),
  ('--drafter=hit_rate', 'drafter', 'acceptance_rate'),
  ('--drafter=silent', 'drafter', 'null'),
]


@pytest.mark.parametrize(('argument', 'name', 'value'), ALIASES)
def test_old_names_still_work(argument, name, value, capsys):
  given = {**NEEDED['generate'], 'drafter': 'random'}
  found = flags.parse([*arguments('generate', **given), argument])
  assert getattr(found, name) == value and name in found.given
  assert capsys.readouterr() == ('', '')


def test_old_names_are_listed_where_they_should_be():
  log = (ROOT / 'CHANGELOG.md').read_text()
  values = flags.VALUE_ALIASES['drafter']
  for old, new in {**flags.FLAG_ALIASES, **values}.items():
    assert f'`{old}`' in log or f'`--{old}`' in log
    assert f'`{new}`' in log or f'`--{new}`' in log


@pytest.mark.parametrize('mode', MODES)
def test_help_of_a_mode(mode, capsys):
  assert main(f'--mode={mode}', '--help', '--nonsense') == 0
  page, errors = capsys.readouterr()
  assert not errors and max(map(len, page.splitlines())) <= 80
  assert re.findall(r'^  --(?:\[no\])?(\w+)', page, re.M) == [
    *flags_of(MODES[mode])
  ]
  assert not set(re.findall(r'\w+', page)) & {'hit_rate', 'chain_seed'}
  words = ' '.join(page.split())
  for each in flags_of(MODES[mode]).values():
    assert each.help in words
    if isinstance(each.default, int) and not isinstance(each.default, bool):
      assert f'Default: {each.default}.' in words


def test_the_first_page_teaches():
  """Quickly: without JAX, and so is a typo."""
  code = """
import sys, run
assert run.main(['run.py', '-h']) == 0
assert run.main(['run.py', '--mod=x']) == 2
assert not {'jax', 'flax', 'kdtree_jax.api'} & sys.modules.keys()
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.startswith("error: Unknown command line flag 'mod'")
  for mode in MODES:
    assert re.search(rf'^  {mode} ', done.stdout, re.M)
  commands = re.findall(r'python run.py (--.*)', done.stdout)
  assert len(commands) >= 3 and '--mode=NAME --help' in done.stdout


def test_public_names_are_found_when_they_are_used():
  assert set(kdtree_jax.__all__) == set(kdtree_jax._HOMES)
  for name in kdtree_jax.__all__:
    assert getattr(kdtree_jax, name).__name__ == name
    assert name in dir(kdtree_jax)
  with pytest.raises(AttributeError, match='no attribute .nothing'):
    _ = kdtree_jax.nothing


def test_keywords_are_the_fields_of_the_options():
  keywords = typing.get_type_hints(GenerateKeywords)
  fields = dataclasses.fields(GenerateOptions)
  assert keywords == {field.name: field.type for field in fields}
