"""Acceptance length of one drafter as its target's weights become coarser.

Arithmetic is float32 throughout and the drafter is the same: only the target's
weights change. INT4 has groups of 8, finer than the 32 of real checkpoints,
because the fixture's experts are 24 wide. Run by hand for the table in the
README:

    python tests/peers/acceptance_by_weights.py
"""

import copy
import json
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kdtree_jax import api, generation  # noqa: E402
from kdtree_jax.io import huggingface as hf  # noqa: E402
from kdtree_jax.io.tensors import MappingSource  # noqa: E402
from tests.io import fixtures, quantize  # noqa: E402

NAME = 'deepseek_v3_trained_drafter'
PROMPTS, LENGTH, NEW_TOKENS = 24, 11, 40
# The fixture's experts are 24 wide, which groups of 32 do not divide.
GROUP = 8


def settings(form):
  """The quantization_config of a real checkpoint of that kind."""
  folder = {'int4': 'kimi_k25_int4', 'fp8': 'deepseek_v3_fp8'}[form]
  raw = json.loads((fixtures.DATA / folder / 'config.json').read_text())
  found = copy.deepcopy(raw.get('text_config', raw)['quantization_config'])
  if form == 'int4':
    found['config_groups']['group_0']['weights']['group_size'] = GROUP
  return found


def quantised(form):
  """Config and tensors: FP8 in every linear map, INT4 in routed experts."""
  raw = fixtures.raw_config(NAME, quantization_config=settings(form))
  tensors = fixtures.load(NAME)
  for name in list(tensors):
    linear = name.endswith(('_proj.weight', '_with_mqa.weight'))
    if form == 'fp8' and linear:
      scale = name + '_scale_inv'
      tensors[name], tensors[scale], _ = quantize.fp8(tensors[name])
    elif form == 'int4' and '.mlp.experts.' in name:
      packed, scales, _ = quantize.int4(tensors.pop(name), GROUP)
      tensors[name + '_packed'], tensors[name + '_scale'] = packed, scales
  return raw, tensors


def target_of(kind):
  """The fixture with weights of this kind."""
  if kind in ('float32', 'bfloat16'):
    return api.load_target(fixtures.DATA / NAME, weights=kind)
  raw, tensors = quantised(kind)
  config = hf.model_config(raw)
  params = hf.target_params(
    config,
    MappingSource(tensors),
    np.float32,
    source_name=kind,
    quantization=hf.quantization(raw),
  )
  return api.Target(kind, config, params, api.DTYPES['float32'], (), {})


def main():
  """Prints a row for each kind of weights."""
  rng = np.random.default_rng(0)
  plain = api.load_target(fixtures.DATA / NAME)
  prompts = rng.integers(0, plain.config.vocab_size, (PROMPTS, LENGTH)).tolist()
  options = {'max_new_tokens': NEW_TOKENS, 'stop_ids': ()}
  first = None
  print('weights   chain  budget 24  budget 64  tokens as float32')
  for kind in ('float32', 'bfloat16', 'fp8', 'int4'):
    target = target_of(kind)
    drafter = api.load_drafter(fixtures.DATA / NAME / 'dflash', target)
    ar = generation.generate_batch(target, None, prompts, **options)
    tokens = np.array([result.output_ids for result in ar])
    first = tokens if first is None else first
    means = []
    for policy, budget in (
      ('chain', 7),
      ('best_first', 24),
      ('best_first', 64),
    ):
      results = generation.generate_batch(
        target,
        drafter,
        prompts,
        tree_budget=budget,
        tree_policy=policy,
        **options,
      )
      assert [r.output_ids for r in results] == tokens.tolist()
      lengths = [n for r in results for n in r.acceptance_lengths]
      means.append(np.mean(lengths))
    same = (tokens == first).mean()
    print(
      f'{kind:<9} {means[0]:5.2f}  {means[1]:9.2f}  {means[2]:9.2f}  {same:.0%}'
    )


if __name__ == '__main__':
  main()
