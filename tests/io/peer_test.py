"""What transformers says about checkpoints that this project saved.

The answers were recorded by `tests/peers/transformers_logits.py` (transformers
5.24, torch, CPU, float32) on the folders that `--mode=convert` makes of bundles
that `--mode=make_bundle` makes: both are the same every time.
"""

import json
import pathlib

import pytest
from safetensors.numpy import load_file

from kdtree_jax import api, generation
from kdtree_jax.io.export import write_checkpoint
from kdtree_jax.modes.make_bundle import make_bundle
from tests import support

ANSWERS = pathlib.Path(__file__).parents[1] / 'peers' / 'answers'
NAMES = tuple(sorted(path.stem for path in ANSWERS.glob('*.safetensors')))


@pytest.mark.parametrize('name', NAMES)
def test_transformers_reads_what_we_save(name, tmp_path):
  folder = tmp_path / name
  write_checkpoint(folder, make_bundle(name))
  answer = load_file(ANSWERS / f'{name}.safetensors')
  target = api.load_target(folder)
  logits = generation.forward_logits(target, answer['input_ids'])
  assert support.relative_error(logits, answer['logits']) < 5e-5
  raw = json.loads((folder / 'config.json').read_text())
  assert raw['architectures'][0].endswith('ForCausalLM')


def test_answers_are_of_both_kinds_of_router():
  assert {'grouped_yarn', 'softmax_yarn'} <= set(NAMES)
