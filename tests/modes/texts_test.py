"""Prompts as text, chats, quantised targets and warnings, by run.py."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.modes import loading, texts
from tests import support
from tests.command_line import called, mode_flags
from tests.io.tokenizer_test import KIMI_NAMES, KIMI_TEMPLATE, write_ranks

NAME = 'moonlight'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A fixture with a vocabulary of 130 as if ids were ASCII."""
  folder = tmp_path_factory.mktemp('texts') / NAME
  shutil.copytree(support.DATA / NAME, folder)
  write_ranks(folder, [bytes([i]) for i in range(256)])
  # Ids of special tokens are beyond this model's vocabulary.
  template = KIMI_TEMPLATE.replace('<|', '[').replace('|>', ']')
  (folder / 'chat_template.jinja').write_text(template)
  return folder


def lines(done):
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_prompt_as_text(folder):
  flags = ('--mode=generate', f'--target={folder}', '--max_new_tokens=6')
  flags += ('--ignore_eos',)
  (record,) = lines(called(*flags, '--prompt=Hi there'))
  assert record['prompt_ids'] == [*b'Hi there']
  wanted = bytes(t for t in record['output_ids'] if t < 256)
  assert record['text'] == wanted.decode('utf-8', 'replace')
  ids = ','.join(map(str, b'Hi there'))
  (same,) = lines(called(*flags, f'--prompt_ids={ids}'))
  assert same['output_ids'] == record['output_ids']
  assert same['text'] == record['text']


def test_a_file_of_talks(folder, tmp_path):
  path = tmp_path / 'p.jsonl'
  path.write_text('{"id": "a", "turns": ["x", "yz"]}\n{"prompt": "w"}\n')
  done = called(
    '--mode=generate',
    f'--target={folder}',
    '--drafter=random',
    '--methods=ar,ddtree',
    '--max_new_tokens=5',
    '--tree_budget=6',
    '--ignore_eos',
    '--chat',
    '--stream',
    f'--prompts={path}',
  )
  records = lines(done)
  keys = [(r['method'], r['id'], r['turn']) for r in records]
  dialogue = [('a', 0), ('a', 1), (1, 0)]
  assert keys == [(m, *t) for m in ('ar', 'ddtree') for t in dialogue]
  for ar, tree in zip(records[:3], records[3:], strict=True):
    assert ar['output_ids'] == tree['output_ids']
    assert ar['text'] == tree['text'] and ar['text'] in done.stderr
  said = bytes(records[1]['prompt_ids']).decode('utf-8', 'replace')
  assert said.startswith('[im_user]user[im_middle]x[im_end][im_assistant]')
  assert said.endswith('yz[im_end][im_assistant]assistant[im_middle]')


@pytest.mark.slow
def test_batches_are_single_runs(folder, tmp_path):
  """Two capacities and a stop string; the order is that of the file."""
  prompts = ['x', 'a much longer prompt ' * 4, 'yz', 'w', 'hello']
  path = tmp_path / 'p.jsonl'
  path.write_text(''.join(json.dumps({'prompt': p}) + '\n' for p in prompts))
  flags = (
    '--mode=generate',
    f'--target={folder}',
    '--drafter=random',
    '--methods=ddtree',
    '--max_new_tokens=12',
    '--tree_budget=6',
    '--ignore_eos',
    '--temperature=2',
    '--seed=5',
    f'--prompts={path}',
  )
  alone = lines(called(*flags))
  together = lines(called(*flags, '--batch_size=3'))
  assert [record['seed'] for record in alone] == [5, 6, 7, 8, 9]
  for a, b in zip(alone, together, strict=True):
    assert {k: v for k, v in a.items() if k != 'seconds'} == {
      k: v for k, v in b.items() if k != 'seconds'
    }
  text = alone[3]['text']
  stop = next(
    c for c in text[2:] if c.isascii() and c.isprintable() and c != ','
  )
  stopped = lines(called(*flags, '--batch_size=3', f'--stop_strings={stop}'))
  for a, b in zip(alone, stopped, strict=True):
    assert b['text'] == a['text'].split(stop)[0]
    if stop in a['text']:
      assert b['stop_reason'] == 'stop'
      assert sum(b['acceptance_lengths']) == len(b['output_ids'])


def config(**changes):
  fields = {'mode': 'generate', 'target': str(support.DATA / NAME)} | changes
  return mode_flags(**fields)


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({}, 'needs one of --prompt_ids or --prompt or --prompts'),
    ({'prompt': 'x', 'prompt_ids': ('1',)}, 'needs one of'),
    ({'prompt': 'x'}, 'moonlight has none; use --prompt_ids'),
    ({'prompt': 'x', 'chat': True}, 'has no chat template'),
  ],
)
def test_flags_that_do_not_go_together(changes, match):
  with pytest.raises(UserError, match=match):
    texts.dialogues(config(**changes), texts.tokenizer_of(config(**changes)))


def test_turns_need_chat(folder, tmp_path):
  path = tmp_path / 'p.jsonl'
  path.write_text('{"turns": ["x", "y"]}')
  given = config(target=str(folder), prompts=str(path))
  with pytest.raises(UserError, match='2 turns, which need --chat'):
    texts.dialogues(given, texts.tokenizer_of(given))
  with pytest.raises(UserError, match='--chat is not used with --prompt_ids'):
    config(target=str(folder), prompt_ids=('1',), chat=True)


@pytest.mark.parametrize('parsed', (False, True))
def test_control_tokens_in_a_prompt_are_text(tmp_path, parsed):
  """In every turn of a chat, the model's own included, unless asked for."""
  write_ranks(tmp_path, [bytes([i]) for i in range(256)])
  added = {str(i): {'content': name} for i, name in KIMI_NAMES.items()}
  config_json = {'added_tokens_decoder': added, 'chat_template': KIMI_TEMPLATE}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config_json))
  text = 'a<|im_end|>'
  fields = {'target': str(tmp_path), 'prompt': text}
  given = config(**fields, chat=True, parse_special_in_messages=parsed)
  tokenizer = texts.tokenizer_of(given)
  (dialogue,) = texts.dialogues(given, tokenizer)
  first = texts.next_ids(dialogue, 0, tokenizer, True)
  dialogue.messages.append({'role': 'assistant', 'content': text})
  second = texts.next_ids(dialogue, 0, tokenizer, True)
  assert (first.count(258), second.count(258)) == ((2, 6) if parsed else (1, 3))
  # A raw prompt is the user's own to make up.
  raw = config(**fields)
  (dialogue,) = texts.dialogues(raw, tokenizer)
  assert texts.next_ids(dialogue, 0, tokenizer, False) == [97, 258]


def test_a_broken_tokenizer_is_no_obstacle_to_ids(folder, tmp_path):
  (tmp_path / 'tokenizer.json').write_text('{')
  given = config(target=str(tmp_path), prompt_ids=('1',))
  assert texts.tokenizer_of(given) is None
  with pytest.raises(UserError, match='tokenizer.json'):
    texts.tokenizer_of(config(target=str(tmp_path), prompt='x'))


@pytest.mark.slow
def test_weights_by_flag():
  target = f'--target={support.DATA / "kimi_k25_int4"}'
  flags = ('--mode=generate', target, '--max_new_tokens=4', '--ignore_eos')
  flags += ('--prompt_ids=3,1,4,1,5', '--drafter=oracle', '--block_size=4')
  outputs = []
  for weights in ('as_stored', 'float32'):
    records = lines(called(*flags, f'--weights={weights}', '--tree_budget=5'))
    outputs += [record['output_ids'] for record in records]
  assert len(outputs) == 6 and all(ids == outputs[0] for ids in outputs)


@dataclasses.dataclass
class Rounds:
  acceptance_lengths: list[int]
  nodes: int = 9

  @property
  def num_nodes(self):
    return [self.nodes] * len(self.acceptance_lengths)


def test_a_drafter_of_another_target_is_noticed():
  stub = api.LoadedDrafter('random', None, {})
  real = api.LoadedDrafter(str(support.DATA), None, {})
  dull = Rounds([3, *[1] * 32])
  assert 'was accepted in 32 rounds' in loading.mismatch(real, [dull])
  assert loading.mismatch(stub, [dull]) is None
  assert loading.mismatch(None, [dull]) is None
  lively = Rounds([*[1] * 31, 2, *[1] * 31])
  assert loading.mismatch(real, [lively]) is None
  # Where nothing was drafted nothing can be accepted.
  assert loading.mismatch(real, [Rounds([1] * 40, nodes=1)]) is None


def test_a_bar_on_a_terminal(monkeypatch, capsys):
  path = support.DATA / NAME
  with loading.loading(str(path)) as progress:
    assert progress is None
  monkeypatch.setattr('sys.stderr.isatty', lambda: True, raising=False)
  seen = []
  with loading.loading(str(path)) as progress:
    api.load_target(path, progress=lambda n: (progress(n), seen.append(n)))
  size = (path / 'model.safetensors').stat().st_size
  assert 0.9 * size < sum(seen) < size and np.all(seen)
