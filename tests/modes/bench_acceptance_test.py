"""The sweep over budgets and temperatures, end to end on a tiny pair."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.decode import SamplingConfig
from kdtree_jax.errors import UserError
from kdtree_jax.modes import bench_acceptance, resumable_runs
from kdtree_jax.options import GenerateOptions
from kdtree_jax.teacher_forcing import teacher_forced
from kdtree_jax.training.corpus import read_corpus
from tests.command_line import mode_flags
from tests.modes.pair import write_pair

SIZES = {
  'num_prompts': 3,
  'prompt_length': 6,
  'max_new_tokens': 12,
  'tree_budget': ('5',),
  'temperature': ('0', '1'),
  'batch_size': 4,
}


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp('bench')
  write_pair(folder)
  return folder


def config(files, **changes):
  fields = SIZES | {
    'mode': 'bench_acceptance',
    'target': str(files / 'target.kdtr'),
    'drafter': str(files / 'drafter.kdtr'),
    'corpus': str(files / 'corpus'),
  }
  return mode_flags(**fields | changes)


def test_a_sweep_and_its_continuation(files, tmp_path, capsys):
  output, plots = tmp_path / 'x.jsonl', tmp_path / 'plots'
  given = {'output': str(output), 'plots': str(plots)}
  assert bench_acceptance.run(config(files, output=str(output))) == 0
  text = output.read_text()
  cut = ''.join(text.splitlines(keepends=True)[:-3])
  output.write_text(cut)
  capsys.readouterr()
  assert bench_acceptance.run(config(files, **given)) == 0
  assert output.read_text().startswith(cut)
  again = [json.loads(line) for line in output.read_text().splitlines()]
  records = [json.loads(line) for line in text.splitlines()]
  for old, new in zip(records, again, strict=True):
    assert old | {'seconds': 0} == new | {'seconds': 0}
  # AR, the chain, and trees with and without it, at two temperatures; on real
  # text the chain and a tree. Three documents of five are used.
  assert len(records) == 3 * (2 * (1 + 1 + 2) + 2)
  assert all(r['match'] for r in records if r['match'] is not None)
  assert sum(r['match'] is not None for r in records) == 3 * 2 * 3
  outputs = {
    (r['id'], r['temperature']): r['output_ids']
    for r in records
    if r['method'] == 'ar'
  }
  assert len(outputs) == 6
  for record in records:
    assert len(record['prompt_ids']) == 6
    if record['forced']:
      walks = record['target_acceptance_lengths']
      assert len(walks) == record['target_forwards']
    elif record['method'] != 'ar':
      lengths = record['acceptance_lengths']
      nodes = record['nodes']
      accepted = sum(lengths) - len(lengths)
      assert sum(nodes['accepted']) == accepted
      assert sum(nodes['rank_accepted']) == accepted
      assert sum(nodes['nodes']) <= record['tree_budget'] * len(lengths)
  shown = capsys.readouterr().out
  assert '### Temperature 1, the model' in shown
  assert '### Real text, accepted where the text' in shown
  assert 'temperature 0: 9 of 9 outputs are token for token' in shown
  assert output.with_suffix('.md').read_text() in shown
  for name in ('acceptance.png', 'histogram.png'):
    assert (plots / name).read_bytes().startswith(b'\x89PNG')


def test_runs_of_another_set_up_are_not_continued(files, tmp_path):
  path = tmp_path / 'x.jsonl'
  target = api.load_target(files / 'target.kdtr')
  drafter = api.load_drafter(files / 'drafter.kdtr', target)
  mark = resumable_runs.fingerprint(target, drafter)
  path.write_text(json.dumps({'fingerprint': mark, 'max_new_tokens': 12}))
  assert resumable_runs.read_runs(str(path), {'max_new_tokens': 12})
  with pytest.raises(UserError, match='has max_new_tokens=12, not 13; give a'):
    resumable_runs.read_runs(
      str(path), {'fingerprint': mark, 'max_new_tokens': 13}
    )
  path.write_text('[1]')
  with pytest.raises(UserError, match='line 1 has x=null, not 1'):
    resumable_runs.read_runs(str(path), {'x': 1})
  other = api.load_drafter('repeat', target)
  assert resumable_runs.fingerprint(target, other) != mark


def test_records_with_an_old_name_are_continued(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_text('{"seed": 3, "chain_seed": true}')
  (record,) = resumable_runs.read_runs(str(path), {'seed': 3})
  assert record == {'seed': 3, 'keep_top1_chain': True}


def test_what_does_not_belong_together(files, tmp_path):
  """Equal widths are no proof: of tokens, of texts, of weights."""
  corpus, path = tmp_path / 'corpus', tmp_path / 'x.jsonl'
  shutil.copytree(files / 'corpus', corpus)
  given = config(files, corpus=str(corpus), output=str(path))
  target = api.load_target(files / 'target.kdtr')
  drafter = api.load_drafter(files / 'drafter.kdtr', target)
  bench = bench_acceptance._Bench(
    given, target, drafter, read_corpus(given.corpus), [], None
  )
  path.write_text(json.dumps(bench.common) + '\n')
  with np.load(corpus / 'test.npz') as arrays:
    tokens = arrays['tokens']
  np.savez(corpus / 'test.npz', tokens=np.where(tokens == 5, 6, tokens))
  with pytest.raises(UserError, match='has corpus=".*", not ".*"; give a new'):
    bench_acceptance.run(given)
  head = {'weight': target.params['lm_head']['weight'].at[-1, -1].add(1)}
  other = dataclasses.replace(target, params=target.params | {'lm_head': head})
  changed = dataclasses.replace(bench, target=other).common
  assert changed['fingerprint'] != bench.common['fingerprint']
  text = (corpus / 'tokenizer.json').read_text()
  swapped = text.replace('"A":0', '"A":1').replace('"B":1', '"B":0')
  assert swapped != text
  (corpus / 'tokenizer.json').write_text(swapped)
  with pytest.raises(UserError) as raised:
    bench_acceptance.run(given)
  found = str(raised.value)
  assert found.startswith(f'--corpus={corpus}: its tokenizer (')
  assert f'is not that of the target {target.name} (' in found


@pytest.mark.slow
def test_real_text_equal_to_the_models_own_gives_its_rounds(files):
  """Forcing what AR would say changes no walk."""
  target = api.load_target(files / 'target.kdtr')
  drafter = api.load_drafter(files / 'drafter.kdtr', target)
  prompts = [[31, 0, 39, 53, 42, 9], [7, 8, 9, 10, 11, 12]]
  options = {'max_new_tokens': 26, 'tree_budget': 24, 'stop_ids': ()}
  longer = generation.generate_batch(
    target, None, prompts, max_new_tokens=34, stop_ids=()
  )
  own = generation.generate_batch(
    target, drafter, prompts, record_rounds=True, **options
  )
  texts = [[*r.prompt_ids, *r.output_ids] for r in longer]

  def forced_along(texts):
    given = GenerateOptions(**options)
    return teacher_forced(target, drafter, texts, 6, given)

  forced = forced_along(texts)
  for free, result in zip(own, forced, strict=True):
    assert result.along_text.acceptance_lengths == free.acceptance_lengths
    assert result.along_target.acceptance_lengths == free.acceptance_lengths
    assert result.along_text.rounds == free.rounds
    assert result.along_text.output_ids == free.output_ids
    assert max(free.acceptance_lengths) > 1
  # Text that the target would never say: its own walk goes on regardless.
  other = [[(t + 1) % 60 for t in text] for text in texts]
  for result in forced_along(other):
    assert result.along_text.output_ids == result.along_text.output_ids
    walks = result.along_target.acceptance_lengths
    assert len(walks) == len(result.along_text.acceptance_lengths)
  with pytest.raises(UserError, match='fewer than 32 tokens'):
    forced_along([texts[0][:31]])


def test_mixed_temperatures(files):
  """A row draws as if the others were not there; one program for all."""
  target = api.load_target(files / 'target.kdtr')
  prompts = [[31, 0, 39, 53]] * 2
  cold, warm = (SamplingConfig(temperature=t, seed=5) for t in (0.0, 1.0))

  def outputs(**drawing):
    results = generation.generate_batch(
      target, None, prompts, max_new_tokens=8, stop_ids=(), **drawing
    )
    return [result.output_ids for result in results]

  mixed = outputs(sampling=[cold, warm])
  assert outputs(sampling=[warm, cold]) == mixed[::-1]
  assert outputs(temperature=1.0, seeds=[5, 5]) == [mixed[1]] * 2
  assert mixed[0] != mixed[1]
  with pytest.raises(UserError, match='1 sampling for 2 prompts'):
    outputs(sampling=[cold])


def test_prompts_from_a_file(files, tmp_path):
  path = tmp_path / 'p.jsonl'
  path.write_text('{"id": "a", "prompt": "JaBc"}\n{"prompt": "zz"}\n')
  given = config(
    files, corpus=None, prompts=str(path), num_prompts=None, prompt_length=None
  )
  found, tokenizer = resumable_runs.passages(given, None)
  assert [p.id for p in found] == ['a', 1]
  assert found[1].ids == tokenizer.encode('zz') and found[0].text is None


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'corpus': None}, 'needs one of --corpus or --prompts'),
    ({'prompts': 'x.jsonl'}, 'needs one of --corpus or --prompts'),
    ({'prompts': 'x', 'corpus': None}, '--num_prompts is not used with'),
    ({'prompt_length': 90}, 'no test document has 102 tokens'),
    ({'num_prompts': 0}, '--num_prompts=0 is below 1'),
    ({'temperature': ('x',)}, '--temperature=x is not a comma'),
    ({'temperature': ()}, '--temperature is empty'),
    ({'temperature': ('-1',)}, 'temperature=-1.0 must be'),
    ({'tree_budget': ('-1',)}, 'tree_budget=-1'),
    ({'target': None}, 'needs --target'),
    ({'drafter': None}, 'needs --drafter'),
    ({'output': 'no/where.jsonl'}, '--output=no/where.jsonl'),
  ],
)
def test_what_is_refused(files, changes, match):
  with pytest.raises(UserError, match=match):
    bench_acceptance.run(config(files, **changes))


def test_batches_of_one_width():
  found = list(resumable_runs.batches(list(range(10)), 4))
  assert [(len(batch), count) for batch, count in found] == [
    (4, 4),
    (4, 4),
    (4, 2),
  ]
  assert found[-1][0] == [8, 9, 8, 8]
  assert list(resumable_runs.batches([], 4)) == []
