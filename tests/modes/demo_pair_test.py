"""The demo's trained part, on the tiny pair of the fixtures."""

import dataclasses

import pytest

from kdtree_jax import api
from kdtree_jax.decode import GenerateResult, RoundRecord
from kdtree_jax.decode.drivers import Seconds
from kdtree_jax.io.tokenizer import load_tokenizer
from kdtree_jax.modes import demo_pair
from tests.modes.pair import write_pair


@pytest.mark.slow  # The demo itself says so: see run_test.
def test_all_methods_say_the_same(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(demo_pair, 'MAX_NEW_TOKENS', 12)
  write_pair(tmp_path)
  path = tmp_path / 'target.kdtr'
  target, tokenizer = api.load_target(path), load_tokenizer(path)
  drafter = api.load_drafter(tmp_path / 'drafter.kdtr', target)
  assert demo_pair.show_pair(target, drafter, tokenizer)
  shown = capsys.readouterr().out
  assert 'AR (12 target forwards):' in shown
  assert shown.count('the same text, token for token') == 2
  assert 'DDTree, budget 16 (' in shown and '*' in shown

  honest = demo_pair.generation.continue_prompts

  def wrong(target, drafter, *args, **options):
    (result,) = honest(target, drafter, *args, **options)
    if drafter is None:
      return [result]
    return [dataclasses.replace(result, output_ids=result.output_ids[::-1])]

  monkeypatch.setattr(demo_pair.generation, 'continue_prompts', wrong)
  assert not demo_pair.show_pair(target, drafter, tokenizer)
  assert 'the same text' not in capsys.readouterr().out


class Letters:
  def decode(self, ids):
    return ''.join(chr(96 + token) for token in ids)


def test_the_round_that_is_drawn(monkeypatch):
  """A tree in which a second choice was right, the longest of those."""
  plain = RoundRecord(1, [2, 3], [1, 1], [-1, 0, 0], [0.0, -0.1, -3.0], [0, 1])
  second = dataclasses.replace(plain, accepted_indices=[0, 2])
  result = GenerateResult(
    prompt_ids=[1],
    output_ids=[1, 2],
    acceptance_lengths=[2, 2, 1],
    num_nodes=[3, 3, 3],
    stop_reason='length',
    seconds=Seconds(0, 0, 0),
    rounds=[plain, second, dataclasses.replace(plain, accepted_indices=[0])],
  )
  lines = demo_pair._drawing(result, Letters()).splitlines()
  assert lines[0].startswith('round 2 of 3: ')
  assert lines[2:] == [
    "  'a' *",
    "  |- 'b' 90%, path 90%",
    "  `- 'c' 5%, path 5% *",
  ]
