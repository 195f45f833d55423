"""Acceptance length of the shipped drafter as its target's weights get coarser.

Arithmetic is float32 throughout and the drafter is the same: only the target's
weights change. Prompts are the beginnings of this project's own modules, which
no training has seen. INT4 has groups of 16, finer than the 32 of real
checkpoints, because the experts are 48 wide. Run by hand for the table in the
README:

    python tests/peers/pair_by_weights.py
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
from kdtree_jax.io.kdtr import read_bundle  # noqa: E402
from kdtree_jax.io.tensors import MappingSource  # noqa: E402
from kdtree_jax.io.tokenizer import load_tokenizer  # noqa: E402
from kdtree_jax.modes.demo_pair import DRAFTER, TARGET  # noqa: E402
from tests.io import fixtures, quantize  # noqa: E402

PROMPTS, LENGTH, NEW_TOKENS = 48, 64, 128
# The experts are 48 wide, which groups of 32 do not divide.
GROUP = 16


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
  bundle = read_bundle(api.bundled(TARGET))
  tensors = {k: v.astype(np.float32) for k, v in bundle.target.items()}
  for name in list(tensors):
    linear = name.endswith(('_proj.weight', '_with_mqa.weight'))
    if form == 'fp8' and linear:
      scale = name + '_scale_inv'
      tensors[name], tensors[scale], _ = quantize.fp8(tensors[name])
    elif form == 'int4' and '.mlp.experts.' in name:
      packed, scales, _ = quantize.int4(tensors.pop(name), GROUP)
      tensors[name + '_packed'], tensors[name + '_scale'] = packed, scales
  return bundle.config, tensors


def target_of(kind):
  """The shipped target with weights of this kind."""
  if kind == 'bfloat16':
    # As it ships: float32 arithmetic on values that are bfloat16.
    return api.load_target(api.bundled(TARGET))
  config, tensors = quantised(kind)
  raw = {'quantization_config': settings(kind)}
  params = hf.target_params(
    config,
    MappingSource(tensors),
    np.float32,
    source_name=kind,
    quantization=hf.quantization(raw),
  )
  return api.Target(kind, config, params, api.DTYPES['float32'], (), {})


def prompts(tokenizer):
  """The first tokens of the project's longest modules."""
  files = sorted(
    ROOT.glob('kdtree_jax/*/*.py'), key=lambda f: -f.stat().st_size
  )
  ids = (tokenizer.encode(file.read_text())[:LENGTH] for file in files)
  return [found for found in ids if len(found) == LENGTH][:PROMPTS]


def main():
  """Prints a row for each kind of weights."""
  texts = prompts(load_tokenizer(api.bundled(TARGET)))
  options = {'max_new_tokens': NEW_TOKENS, 'stop_ids': ()}
  first = None
  print('weights   chain  budget 16  budget 64  prompts, tokens as bfloat16')
  for kind in ('bfloat16', 'fp8', 'int4'):
    target = target_of(kind)
    drafter = api.load_drafter(api.bundled(DRAFTER), target)
    ar = generation.generate_batch(target, None, texts, **options)
    tokens = np.array([result.output_ids for result in ar])
    first = tokens if first is None else first
    means = []
    for policy, budget in (
      ('chain', drafter.block_size - 1),
      ('best_first', 16),
      ('best_first', 64),
    ):
      results = generation.generate_batch(
        target,
        drafter,
        texts,
        tree_budget=budget,
        tree_policy=policy,
        **options,
      )
      assert [r.output_ids for r in results] == tokens.tolist()
      lengths = [n for r in results for n in r.acceptance_lengths]
      means.append(np.mean(lengths))
    same = (tokens == first).mean()
    print(
      f'{kind:<9} {means[0]:5.2f}  {means[1]:9.2f}  {means[2]:9.2f}  '
      f'{len(texts)}, {same:.0%}',
      flush=True,
    )


if __name__ == '__main__':
  main()
