"""run.py as a user calls it."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from kdtree_jax.api import bundled
from kdtree_jax.modes import flags
from kdtree_jax.modes.program_cache import keep_compiled_programs
from tests import support
from tests.command_line import called, main

ROOT = pathlib.Path(__file__).parents[2]
FIXTURE = 'tests/data/deepseek_v3_trained_drafter'
PROMPT = '--prompt_ids=31,0,39,53,42,9,34,17,61,56,11'


def run(*arguments, as_users=False):
  """With programs that the suite shares, or optimised as users have them."""
  env = dict(os.environ)
  if as_users:
    del env['XLA_FLAGS'], env['NPROC']
  return subprocess.run(
    [sys.executable, 'run.py', *arguments],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_demo():
  done = run(as_users=True)
  assert (done.returncode, done.stderr) == (0, '')
  lines = done.stdout.splitlines()
  assert lines[0].startswith('model: hidden=256 layers=4 ')
  prompt = lines[1].removeprefix('prompt(8): ').split()
  assert len(prompt) == 8
  ar = lines[2].removeprefix('AR     (24 target forwards): ').split()
  tree = lines[3].removeprefix('DDTree (3 target forwards): ').split()
  assert len(ar) == 24 and ar == tree
  assert lines[4] == 'match: yes, token for token'
  assert lines[5].startswith('mean acceptance length: 8.00 ')
  assert lines[6].startswith('decode seconds: AR ')
  assert 'upper bound' in done.stdout and 'launch overhead' in done.stdout


@pytest.mark.slow
def test_demo_with_other_flags():
  done = run(
    '--drafter=random',
    '--max_new_tokens=5',
    '--block_size=3',
    '--tree_budget=2',
    f'--bundle={bundled("tiny")}',
  )
  assert done.returncode == 0, done.stderr
  assert 'AR     (5 target forwards): ' in done.stdout
  assert '(block size 3, tree budget 2, drafter random)' in done.stdout


def test_generate(tmp_path):
  path = tmp_path / 'out.jsonl'
  done = called(
    '--mode=generate',
    f'--target={FIXTURE}',
    f'--drafter={FIXTURE}/dflash',
    PROMPT,
    '--max_new_tokens=40',
    '--tree_budget=7,24',
    '--stop_ids=',
    '--dump_trees',
    f'--output={path}',
  )
  assert (done.returncode, done.stdout) == (0, ''), done.stderr
  records = [json.loads(line) for line in path.read_text().splitlines()]
  trace = support.trace('deepseek_v3_trained_drafter')
  runs = {run['tree_budget']: run for run in trace['runs']}
  methods = [(r['method'], r['tree_budget']) for r in records]
  assert methods == [('ar', 0), ('chain', 7), ('ddtree', 7), ('ddtree', 24)]
  for record in records:
    assert record['prompt_ids'] == trace['prompt']
    assert record['output_ids'] == trace['ar_ids'][11:]
    assert record['stop_reason'] == 'length'
    assert record['target_forwards'] == len(record['acceptance_lengths'])
    assert set(record['seconds']) == {'prefill', 'decode'}
    assert len(record['trees']) == record['target_forwards']
    drafts = 0 if record['method'] == 'ar' else record['target_forwards']
    assert record['draft_forwards'] == drafts
  assert records[0]['block_size'] == 1
  chain = records[1]
  assert chain['acceptance_lengths'] == trace['chain']['acceptance_lengths']
  for record in records[2:]:
    wanted = runs[record['tree_budget']]
    assert record['block_size'] == 8
    assert record['acceptance_lengths'] == wanted['acceptance_lengths']
    assert record['trees'][0] == wanted['rounds'][0]


def test_generate_stops_at_the_checkpoints_own_stop_id():
  """config.json says 1; an empty list lifts it, another list replaces it."""
  base = ('--mode=generate', f'--target={FIXTURE}', '--max_new_tokens=12')
  # `test_generate` gives the empty list, and gets these.
  free = support.trace('deepseek_v3_trained_drafter')['ar_ids'][11:23]
  stop = free[4]
  done = called(*base, PROMPT, f'--stop_ids={stop}')
  record = json.loads(done.stdout)
  assert record['method'] == 'ar'
  wanted = free[: free.index(stop) + 1]
  assert record['output_ids'] == wanted
  assert record['stop_reason'] == 'stop'
  assert sum(record['acceptance_lengths']) == len(wanted)


@pytest.mark.slow
def test_generate_with_stubs_from_a_bundle():
  done = run(
    '--mode=generate',
    f'--target={bundled("tiny")}',
    '--drafter=oracle',
    '--prompt_ids=1,2,3',
    '--max_new_tokens=10',
    '--block_size=4',
    '--methods=chain,ddtree',
    '--capacity=13',
  )
  assert done.returncode == 0, done.stderr
  chain, tree = map(json.loads, done.stdout.splitlines())
  assert chain['output_ids'] == tree['output_ids']
  assert len(chain['output_ids']) == 10
  # Nothing is known behind the capacity: only the last round falls short.
  assert chain['acceptance_lengths'][:2] == [4, 4]


def test_make_bundle_and_inspect(tmp_path):
  path = tmp_path / 'x.kdtr'
  make = ('--mode=make_bundle', '--variant=single_head')
  made = called(*make, f'--output={path}')
  assert made.returncode == 0, made.stderr
  again = tmp_path / 'y.kdtr'
  run(*make, f'--output={again}')  # Whose sets are in another order.
  assert path.read_bytes() == again.read_bytes()
  seen = called('--mode=inspect', f'--target={path}')
  assert seen.returncode == 0
  assert 'model.layers.0.self_attn.q_proj.weight' in seen.stdout


GENERATE = ('--mode=generate', f'--target={FIXTURE}')


@pytest.mark.parametrize(
  ('arguments', 'message'),
  (
    (('--mode=nothing',), '--mode'),
    (('--mod=demo',), 'Did you mean'),
    (('stray',), 'stray'),
    (('--repetition_penalty=1.1',), 'history along every path'),
    (('--max_new_tokens=many',), 'max_new_tokens'),
    (('--max_new_tokens=0',), 'max_new_tokens=0'),
    (('--tree_budget=1,2',), '--tree_budget'),
    (('--tree_budget=-1',), 'tree_budget=-1'),
    (('--block_size=0',), 'block_size=0'),
    (('--block_size=33',), 'block_size=33'),
    (('--drafter=nobody',), 'nobody'),
    (('--bundle=missing.kdtr',), 'missing.kdtr'),
    (('--bundle=README.md',), 'README.md'),
    (('--variant=tiny',), '--variant is not used by --mode=demo'),
    (('--mode=inspect',), '--target'),
    (('--mode=inspect', '--target=missing'), 'missing'),
    (('--mode=make_bundle',), '--variant'),
    (('--mode=make_bundle', '--variant=huge'), '--variant'),
    (('--mode=generate', PROMPT), '--target'),
    (GENERATE, '--prompt_ids'),
    ((*GENERATE, '--prompt_ids=1,x'), '--prompt_ids'),
    ((*GENERATE, '--prompt_ids='), 'prompt is empty'),
    ((*GENERATE, '--prompt_ids=64'), 'prompt id 64'),
    ((*GENERATE, '--prompt_ids=-1'), 'prompt id -1'),
    ((*GENERATE, PROMPT, '--capacity=10'), 'capacity of 10'),
    ((*GENERATE, PROMPT, '--capacity=513'), 'max_position_embeddings=512'),
    ((*GENERATE, PROMPT, '--methods=beam'), '--methods=beam'),
    ((*GENERATE, PROMPT, '--methods=ddtree'), '--drafter'),
    ((*GENERATE, PROMPT, '--tree_budget=4'), '--tree_budget is not used'),
    ((*GENERATE, PROMPT, '--stop_ids=64'), 'stop id 64'),
    ((*GENERATE, PROMPT, '--dtype=float64'), '--dtype'),
    ((*GENERATE, PROMPT, '--temperature=-1'), 'temperature=-1'),
    ((*GENERATE, PROMPT, '--temperature=1', '--top_p=0'), 'top_p=0'),
    ((*GENERATE, PROMPT, '--top_k=3'), 'no effect at temperature 0'),
    ((*GENERATE, PROMPT, '--keep_top1_chain'), '--keep_top1_chain is not used'),
    ((*GENERATE, PROMPT, '--ignore_eos', '--stop_ids=3'), '--ignore_eos'),
    ((*GENERATE, PROMPT, '--stream', '--dump_trees'), '--stream'),
    ((*GENERATE, PROMPT, '--batch_size=0'), '--batch_size=0'),
    ((*GENERATE, PROMPT, '--batch_size=2', '--stream'), 'one prompt'),
    ((*GENERATE, PROMPT, '--stop_strings=x'), 'tokenizer'),
    ((*GENERATE, PROMPT, '--stop_strings='), 'holds an empty string'),
    (
      (*GENERATE, PROMPT, '--parse_special_in_messages'),
      'not used without --chat',
    ),
    ((*GENERATE, PROMPT, '--prefill_chunk=0'), 'prefill_chunk=0'),
    ((*GENERATE, PROMPT, '--kernels=mosaic_gpu'), 'needs dtype=bfloat16'),
    (
      (*GENERATE, PROMPT, '--kernels=mosaic_gpu', '--dtype=bfloat16'),
      'needs a Hopper GPU',
    ),
    ((*GENERATE, PROMPT, '--output=missing/x.jsonl'), '--output'),
    (
      (
        *(*GENERATE, PROMPT, '--drafter=oracle', '--methods=chain'),
        '--tree_budget=4',
      ),
      '--tree_budget is not used',
    ),
    ((*GENERATE, PROMPT, '--drafter=oracle', '--tree_budget='), 'is empty'),
    ((*GENERATE, PROMPT, '--drafter=oracle', '--tree_budget=99999'), '99999'),
    ((*GENERATE, PROMPT, '--kernels=triton'), '--kernels'),
    ((*GENERATE, PROMPT, f'--drafter={FIXTURE}'), 'config.json'),
    (
      (*GENERATE, PROMPT, '--drafter=tests/data/moonlight/dflash'),
      'for vocab_size=130, not 64',
    ),
    (
      (*GENERATE, PROMPT, f'--drafter={FIXTURE}/dflash', '--block_size=9'),
      'block_size=9',
    ),
  ),
  ids=lambda value: None if isinstance(value, str) else ' '.join(value[-1:]),
)
def test_wrong_input_is_one_line(arguments, message, monkeypatch, capsys):
  """In this process: what `run.py` does after its imports."""
  monkeypatch.chdir(ROOT)
  assert main(*arguments) == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1 and lines[0].startswith('error: '), lines
  assert message in lines[0]


def test_texts_and_paths_are_taken_as_they_are(tmp_path):
  """Flags that are given once for each; a comma or a blank is part of it."""
  given = ('\n\n', 'a ', ' b, c', ',')
  arguments = ['--target=x', '--prompt_ids=1']
  arguments += [f'--stop_strings={text}' for text in given]
  found = flags.parse(['run.py', '--mode=generate', *arguments])
  assert found.stop_strings == given
  folders = (str(tmp_path / 'a, b'), f' {tmp_path}')
  arguments = [f'--corpus_sources={folder}' for folder in folders]
  found = flags.parse(
    ['run.py', '--mode=make_corpus', '--output=x', *arguments]
  )
  assert found.corpus_sources == folders


def test_wrong_input_in_a_process_of_its_own():
  done = run('--max_new_tokens=0')
  assert (done.returncode, done.stdout.count('model: ')) == (2, 1)
  assert done.stderr.startswith('error: max_new_tokens=0')


@pytest.fixture
def cache_settings():
  """JAX's settings of its cache, unset and put back afterwards."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: jax.config.values[name] for name in names}
  jax.config.update('jax_compilation_cache_dir', None)
  yield jax.config
  for name, value in before.items():
    jax.config.update(name, value)


def test_where_compiled_programs_are_kept(
  tmp_path, monkeypatch, cache_settings
):
  """In the user's cache folder, unless JAX's settings name another."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  keep_compiled_programs()
  kept = str(tmp_path / 'kdtree_jax')
  assert cache_settings.jax_compilation_cache_dir == kept
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'other'))
  keep_compiled_programs()
  assert cache_settings.jax_compilation_cache_dir == kept


def test_a_folder_that_cannot_be_made_keeps_nothing(
  tmp_path, monkeypatch, cache_settings
):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  keep_compiled_programs()
  assert cache_settings.jax_compilation_cache_dir is None
