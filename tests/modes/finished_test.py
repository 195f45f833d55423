"""What is refused before the work, and what is kept of it."""

import dataclasses
import json
import os
import pathlib
import shutil
import sys

import pytest

from kdtree_jax.decode import GenerateResult
from kdtree_jax.decode.drivers import Seconds
from kdtree_jax.errors import UserError
from kdtree_jax.modes import audit, bench_acceptance, decoding
from tests import support
from tests.command_line import main, mode_flags, run
from tests.io.tokenizer_test import write_ranks
from tests.modes.pair import write_pair

ROOT = pathlib.Path(__file__).parents[2]
TARGET = support.DATA / 'moonlight'
TEMPLATE = """
{%- if messages[-1].content == 'no' %}
{{ raise_exception('refused') }}
{% endif %}
{%- for m in messages %}{{ m.content }}{% endfor %}"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A fixture with a vocabulary of 130 as if ids were ASCII."""
  folder = tmp_path_factory.mktemp('finished') / 'moonlight'
  shutil.copytree(TARGET, folder)
  write_ranks(folder, [bytes([i]) for i in range(256)])
  (folder / 'chat_template.jinja').write_text(TEMPLATE)
  return folder


@pytest.fixture
def served(monkeypatch):
  """Batches as they come, each prompt answered by `ab`: nothing compiles."""
  seen = []

  def results(flags, target, drafter, tokenizer, batch, options):
    seen.append([bytes(prompt.ids).decode() for prompt in batch])
    return [_result(prompt.ids) for prompt in batch]

  monkeypatch.setattr(decoding, 'results', results)
  return seen


def _result(ids):
  return GenerateResult(
    prompt_ids=ids,
    output_ids=[*b'ab'],
    acceptance_lengths=[1, 1],
    num_nodes=[1, 1],
    stop_reason='length',
    seconds=Seconds(0.0, 0.0, 0.0),
    rounds=None,
  )


def prompts_file(path, *turns):
  lines = [
    {'id': f'p{i}', 'turns': t if isinstance(t, list) else [t]}
    for i, t in enumerate(turns)
  ]
  path.write_text('\n'.join(map(json.dumps, lines)))
  return str(path)


def config(folder, prompts, **changes):
  fields = {'mode': 'generate', 'target': str(folder), 'prompts': prompts}
  return mode_flags(**fields | changes)


def read(path):
  return [
    json.loads(line) for line in pathlib.Path(path).read_text().split('\n')[:-1]
  ]


BAD_TURNS = {
  '': 'prompt is empty',
  'é': 'prompt id 195 is outside',
  'x' * 600: '600 tokens',
  '\ud800': 'is not valid',
  'no': 'refused',
}


@pytest.mark.parametrize(
  ('mode', 'text'),
  [
    (mode, text)
    for mode in ('generate', 'audit', 'bench_acceptance')
    for text in BAD_TURNS
    # The last one is refused by the template of a chat.
    if (mode, text) != ('bench_acceptance', 'no')
  ],
)
def test_a_bad_prompt_is_named_before_the_first_is_served(
  folder, tmp_path, served, mode, text
):
  match, chat = BAD_TURNS[text], text == 'no'
  path = prompts_file(tmp_path / 'p.jsonl', 'fine', 'fine too', text)
  fields = {'mode': mode, 'chat': True if chat else None}
  if mode != 'generate':
    fields['drafter'] = 'random'
  with pytest.raises(UserError, match=f"p.jsonl: line 3: id 'p2': .*{match}"):
    run(config(folder, path, **fields))
  assert not served


@pytest.mark.parametrize('batch_size', [None, 2])
def test_a_turn_that_fails_ends_its_conversation_alone(
  folder, tmp_path, served, batch_size
):
  path = prompts_file(
    tmp_path / 'p.jsonl',
    ['long', 'x' * 80, 'never'],
    ['fine', 'y'],
    ['short', 'no', 'never'],
    'z',
  )
  output = tmp_path / 'out'
  fields = {'chat': True, 'max_new_tokens': 2, 'capacity': 64}
  fields |= {'output': str(output), 'batch_size': batch_size}
  with pytest.raises(UserError, match='2 conversations .* line 1: id .p0') as e:
    run(config(folder, path, **fields))
  assert '\n' not in str(e.value)
  found = [(r['id'], r['turn'], r.get('error')) for r in read(output)]
  assert [each[:2] for each in found] == [
    *[('p0', 0), ('p0', 1), ('p1', 0), ('p1', 1)],
    *[('p2', 0), ('p2', 1), ('p3', 0)],
  ]
  errors = {each[:2]: each[2] for each in found if each[2] is not None}
  assert set(errors) == {('p0', 1), ('p2', 1)}
  assert 'more than the capacity of 64' in errors['p0', 1]
  assert 'refused' in errors['p2', 1]
  assert sorted(x for batch in served for x in batch) == sorted(
    ['long', 'fine', 'fineaby', 'short', 'z']
  )


@pytest.mark.parametrize('error', [KeyboardInterrupt(), UserError('x')])
@pytest.mark.parametrize(
  ('batch_size', 'kept'), [(1, ['p0', 'p1']), (2, ['p0', 'p1', 'p2', 'p3'])]
)
def test_what_is_finished_is_kept(
  folder, tmp_path, monkeypatch, served, error, batch_size, kept
):
  """Two capacities: in batches, p2 is done before p1."""
  path = prompts_file(
    tmp_path / 'p.jsonl', 'a', 'b' * 70, 'c', 'd' * 70, 'e', 'f' * 140
  )
  output = tmp_path / 'out'
  output.write_text('of an earlier run')
  real, calls = decoding.results, []

  def results(*given):
    calls.append(given)
    if len(calls) == 3:
      assert [r['id'] for r in read(output)] == kept
      raise error
    assert (output.read_text() == 'of an earlier run') == (len(calls) == 1)
    return real(*given)

  monkeypatch.setattr(decoding, 'results', results)
  fields = {'max_new_tokens': 2, 'output': str(output)}
  with pytest.raises(type(error)):
    run(config(folder, path, batch_size=batch_size, **fields))
  assert [r['id'] for r in read(output)] == kept


def test_lines_wait_for_those_before_them_and_are_never_lost():
  written = []
  with pytest.raises(KeyboardInterrupt):
    with decoding.InOrder(range(6), written.append) as lines:
      lines.add(1, {'n': 1})
      assert not written
      lines.add(0, None)
      assert [each['n'] for each in written] == [1]
      lines.add(5, {'n': 5})
      lines.add(3, {'n': 3})
      raise KeyboardInterrupt
  assert [each['n'] for each in written] == [1, 3, 5]


@pytest.mark.parametrize('source', ['file', 'pipe', 'standard input'])
def test_prompts_are_read_once(folder, tmp_path, monkeypatch, served, source):
  path = prompts_file(tmp_path / 'p.jsonl', 'old')
  if source != 'file':
    reader, writer = os.pipe()
    os.write(writer, pathlib.Path(path).read_bytes())
    os.close(writer)
    path = f'/dev/fd/{reader}'
    if source == 'standard input':
      monkeypatch.setattr(sys, 'stdin', os.fdopen(reader))
      path = '-'
  real = decoding.results

  def results(*given):
    (tmp_path / 'p.jsonl').write_text('{"prompt": "new"}')
    return real(*given)

  monkeypatch.setattr(decoding, 'results', results)
  output = tmp_path / 'out'
  fields = {'drafter': 'random', 'output': str(output)}
  assert run(config(folder, path, **fields)) == 0
  assert [(r['method'], r['text']) for r in read(output)] == [
    *[('ar', 'ab'), ('chain', 'ab'), ('ddtree', 'ab')]
  ]
  assert served == [['old']] * 3
  if source == 'pipe':
    os.close(reader)
  elif source == 'standard input':
    sys.stdin.close()


def test_two_prompts_with_one_id(folder, tmp_path):
  path = tmp_path / 'p.jsonl'
  path.write_text('{"id": "a", "prompt": "x"}\n\n{"id": "a", "prompt": "y"}')
  for mode in ('generate', 'audit', 'bench_acceptance'):
    drafter = {'drafter': 'random'} if mode != 'generate' else {}
    with pytest.raises(UserError, match=r"line 3: the id 'a' .*line 1$"):
      run(config(folder, str(path), mode=mode, **drafter))


def test_an_audit_keeps_the_reports_that_are_done(
  folder, tmp_path, monkeypatch
):
  path, output = prompts_file(tmp_path / 'p', 'a', 'b', 'c'), tmp_path / 'out'
  calls = []

  @dataclasses.dataclass
  class Report:
    failures: list[str] = dataclasses.field(default_factory=list)

  def fake(*given):
    calls.append(given)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return Report()

  monkeypatch.setattr(audit, 'audit_prompt', fake)
  monkeypatch.setattr(audit, 'verdict', str)
  fields = {'mode': 'audit', 'drafter': 'random', 'output': str(output)}
  with pytest.raises(KeyboardInterrupt):
    run(config(folder, path, **fields))
  assert [r['id'] for r in read(output)] == ['p0', 'p1']


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  folder = tmp_path_factory.mktemp('pair')
  write_pair(folder)
  return folder


def sweep_config(pair, output, **changes):
  fields = {
    'mode': 'bench_acceptance',
    'target': str(pair / 'target.kdtr'),
    'drafter': str(pair / 'drafter.kdtr'),
    'corpus': str(pair / 'corpus'),
    'output': str(output),
    **{'num_prompts': 3, 'prompt_length': 6, 'max_new_tokens': 12},
    **{'temperature': ('0',), 'tree_budget': ('5',), 'batch_size': 1},
  }
  return mode_flags(**fields | changes)


def test_a_sweep_keeps_the_runs_that_are_done(pair, tmp_path, monkeypatch):
  calls, output = [], tmp_path / 'x.jsonl'

  def free(self, item, batch):
    calls.append(batch)
    if len(calls) == 3:
      raise KeyboardInterrupt
    line = {'output_ids': [1], 'acceptance_lengths': [1]}
    return [self._named(item, job) | line | self.common for job in batch]

  monkeypatch.setattr(bench_acceptance._Bench, '_free', free)
  with pytest.raises(KeyboardInterrupt):
    run(sweep_config(pair, output))
  assert len(read(output)) == 2
  calls[:] = [None] * 10  # It goes on with the third.
  only = bench_acceptance.Item('ar', 0, 'best_first', False, False)
  monkeypatch.setattr(bench_acceptance, '_items', lambda *_, **__: [only])
  monkeypatch.setattr(bench_acceptance, '_finish', lambda *_: 0)
  monkeypatch.setattr(bench_acceptance, 'summarise', list)
  assert run(sweep_config(pair, output)) == 0
  assert len(read(output)) == 3 and len(calls) == 11
  # A device is written and never read.
  assert run(sweep_config(pair, '/dev/null')) == 0


def test_tables_have_a_file_of_their_own(pair, tmp_path):
  names = ('x.jsonl', 'x.md', 'run.1', 'run.2')
  found = [bench_acceptance.tables_path(str(tmp_path / n)).name for n in names]
  assert found == ['x.md', 'x.md.md', 'run.1.md', 'run.2.md']
  for none in (None, '/dev/null'):
    assert bench_acceptance.tables_path(none) is None
  (tmp_path / 'README.md').write_text('read me')
  given = sweep_config(pair, tmp_path / 'README.jsonl')
  with pytest.raises(UserError, match='would replace .*README.md'):
    run(given)
  assert (tmp_path / 'README.md').read_text() == 'read me'


LONG = 'x' * 300
MOONLIGHT = f'--target={TARGET}'
REFUSED = {
  'generate': (MOONLIGHT, '--prompt_ids=1'),
  'audit': (MOONLIGHT, '--prompt_ids=1', '--drafter=random'),
  'bench': (MOONLIGHT,),
  'bench_acceptance': (MOONLIGHT, '--drafter=random', '--corpus=missing'),
  'make_bundle': ('--variant=tiny',),
  'make_corpus': ('--corpus_sources=tests',),
  'train_target': ('--recipe=python_small', '--corpus=missing'),
  'train_drafter': (MOONLIGHT, '--recipe=python_small', '--corpus=missing'),
  'convert': (MOONLIGHT,),
}


@pytest.mark.parametrize('path', ['', 'no/such/x', LONG, 'pyproject.toml/x'])
@pytest.mark.parametrize('mode', REFUSED)
def test_an_output_is_refused_before_the_work(mode, path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  if mode == 'convert' and path:
    path += '.kdtr'
  assert main(f'--mode={mode}', *REFUSED[mode], f'--output={path}') == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(('error: --output=', 'error: --output is empty'))


def test_plots_are_refused_before_the_work(monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  given = ('--mode=bench_acceptance', *REFUSED['bench_acceptance'])
  for path in ('', 'no/such/x', LONG, 'pyproject.toml', '/dev/null'):
    assert main(*given, f'--plots={path}') == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(('error: --plots=', 'error: --plots is empty'))


PATHS = {
  'target': ('--mode=inspect',),
  'drafter': ('--mode=generate', MOONLIGHT, '--prompt_ids=1'),
  'bundle': ('--mode=demo',),
  'prompts': ('--mode=generate', MOONLIGHT),
  'corpus': ('--mode=train_target', '--recipe=python_small', '--output=x'),
  'corpus_sources': ('--mode=make_corpus', '--output=x'),
}


@pytest.mark.parametrize('path', ['', LONG, 'a\0b'])
@pytest.mark.parametrize('flag', PATHS)
def test_a_flag_that_names_no_path(flag, path, capsys):
  assert main(*PATHS[flag], f'--{flag}={path}') == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert f'--{flag}' in line and '\0' not in line


def test_an_output_that_is_an_input(tmp_path, capsys):
  path = tmp_path / 'p.jsonl'
  path.write_text('{"prompt": "x"}')
  (tmp_path / 'link').symlink_to(path)
  code = main(
    *('--mode=generate', MOONLIGHT),
    *(f'--prompts={path}', f'--output={tmp_path / "link"}'),
  )
  assert code == 2 and 'which it would replace' in capsys.readouterr().err
  assert path.read_text() == '{"prompt": "x"}'
