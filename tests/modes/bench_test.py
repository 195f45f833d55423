"""--mode=bench on a tiny config: records, what they say of each other, resume.

Its figures mean nothing on a CPU; that it runs and adds up is what is tested.
"""

import json
import os
import pathlib

import pytest

from kdtree_jax.benchmark import compile_time, end_to_end, model_pair
from kdtree_jax.modes import bench
from tests import support
from tests.command_line import main

ROOT = pathlib.Path(__file__).parents[2]
BASE = (
  '--mode=bench',
  '--config=single_head',
  '--layers=1',
  '--block_size=4',
)


def call(*arguments):
  """In this process, with the strict settings of the suite."""
  return main(*BASE, *arguments)


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def of(records, kind):
  return [r for r in records if r['kind'] == kind]


def test_bench(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(model_pair, 'LAYERS', 1)
  cached, compiled = [], compile_time._in_new_process

  def in_new_process(*arguments):
    seconds = compiled(*arguments)
    cached.append(sorted(os.listdir(arguments[-1])))
    return seconds

  monkeypatch.setattr(compile_time, '_in_new_process', in_new_process)
  path = tmp_path / 'out.jsonl'
  output = f'--output={path}'
  sweep = ('--context=24,40', '--tree_budget=5', output)
  assert call(*sweep) == 0
  # The second process found what the first one had compiled.
  assert len(cached) == 2 and cached[0] == cached[1]
  assert len(cached[0]) == 2  # prefill and the loop
  table = capsys.readouterr().out
  records = read(path)
  check_file(records)
  for words in ('budget', 'break-even', 'prefill of 24'):
    assert words in table

  # The same again measures nothing; a wider sweep measures the rest.
  asked = []
  monkeypatch.setattr(bench, '_measure', lambda *given: asked.append(given[2]))
  assert call(*sweep) == 0
  assert read(path) == records and not asked
  assert capsys.readouterr().out == table
  assert call(*sweep, '--tree_budget=5,7') == 0
  (missing,) = asked
  assert [(s.context, s.tree_budget) for s in missing] == [(24, 7), (40, 7)]
  # Other settings do not go into the same file.
  assert call(*sweep, '--kernels=reference') == 2
  assert 'holds kernels=auto, not reference' in capsys.readouterr().err


@pytest.mark.slow  # tests/benchmark/end_to_end_test.py has most of it.
def test_end_to_end(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(model_pair, 'LAYERS', 1)
  path = tmp_path / 'out.jsonl'
  sweep = ('--context=24', '--tree_budget=5', f'--output={path}')
  extra = ('--end_to_end', '--max_new_tokens=40', '--acceptance_rate=0.5')
  compiled, counted = end_to_end.compile_all, []

  def compile_all(calls):
    found = compiled(calls)
    counted.append(support.compilations())
    return found

  monkeypatch.setattr(end_to_end, 'compile_all', compile_all)
  monkeypatch.setattr(
    compile_time, 'compile_seconds', lambda *_: {'cold': 1.5, 'warm': None}
  )
  assert call(*sweep, *extra) == 0
  # All programs were compiled side by side, none when it was their turn.
  assert counted == [support.compilations()]
  table = capsys.readouterr().out
  assert 'tokens equal' in table and 'cannot be stored' in table
  check_end_to_end(*of(read(path), 'end_to_end'))


def check_file(records):
  head = records[0]
  assert head['kind'] == 'run'
  assert head['versions']['jax'] and 'device' in head['hardware']
  assert head['command'].startswith('python run.py')
  assert head['settings']['dtype'] == 'float32'
  steps = of(records, 'step')
  keys = [(s['method'], s['context'], s['tree_budget']) for s in steps]
  assert keys == [
    ('ar', 24, 0),
    ('ddtree', 24, 5),
    ('ar', 40, 0),
    ('ddtree', 40, 5),
  ]
  for step in steps:
    check_step(step, head['measured']['copy_bytes_per_second'])
  assert [r['tokens'] for r in of(records, 'prefill')] == [24, 40]
  (compiled,) = of(records, 'compile')
  seconds = compiled['measured']
  # The second process is None unless it finds every program. How much that
  # saves says nothing here: a tiny model is mostly traced, not compiled.
  assert seconds['cold_seconds'] > 0 and seconds['warm_seconds'] > 0
  (memory,) = of(records, 'memory')
  assert memory['measured']['weight_bytes'] > 0
  assert len(of(records, 'computed')) == 2


def check_step(step, bandwidth):
  """What a record says follows from what it says was measured."""
  measured, computed = step['measured'], step['computed']
  assert measured['ms_min'] <= measured['ms'] <= measured['ms_max']
  limit = sum(computed['bytes'].values()) / bandwidth * 1e3
  assert computed['limit_ms'] == pytest.approx(limit)
  assert computed['fraction_of_limit'] * measured['ms'] == pytest.approx(limit)
  # Rows of 20 + 8 floats; of the drafter a key and a value of 128.
  latent, context = 28 * 4, 2 * 128 * 4
  (experts,) = measured['unique_experts_by_layer']
  if step['method'] == 'ar':
    assert computed['bytes']['cache'] == step['context'] * latent
    assert (experts, measured['tokens_per_round']) == (1, 1)
    assert measured['stages_us'] == {}
    return
  assert computed['bytes']['cache'] == step['context'] * (latent + context)
  assert 1 <= experts <= 5 and measured['tokens_per_round'] >= 1
  stages = measured['stages_us']
  assert set(stages) == {'draft', 'tree_build', 'accept', 'commit'}
  total = computed['verify_us'] + sum(stages.values())
  assert total == pytest.approx(measured['ms'] * 1e3)


def check_end_to_end(oracle, half):
  assert (
    oracle['drafter'] == 'oracle' and half['drafter'] == 'acceptance_rate 0.5'
  )
  for record in (oracle, half):
    # float32: equal, whatever is drafted.
    assert record['measured']['first_difference'] is None
    assert record['measured']['revisions'] == 0
    assert record['measured']['tokens_per_second'] > 0
  assert oracle['measured']['acceptance_length'] == 4
  assert oracle['computed']['expected_acceptance_length'] == 4
  assert half['computed']['expected_acceptance_length'] == 1.875
  assert 1 < half['measured']['acceptance_length'] < 3


@pytest.mark.parametrize(
  ('arguments', 'message'),
  (
    (('--context=0',), '--context'),
    (('--context=',), '--context'),
    (('--tree_budget=x',), '--tree_budget'),
    (('--acceptance_rate=0.5',), 'without --end_to_end'),
    (('--target=x',), 'exclude each other'),
    (('--layers=9',), 'layers=9'),
    (('--drafter=oracle',), '--end_to_end'),
    (('--output=README.md',), 'not a file of --mode=bench'),
    (('--output=missing/x.jsonl',), '--output'),
  ),
)
def test_wrong_input_is_one_line(arguments, message, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  assert call(*arguments) == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1 and message in lines[0], lines
