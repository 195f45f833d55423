"""Acceptance length of one drafter as its target's weights become coarser.

Arithmetic is float32 throughout and the drafter is the same: only the target's
weights change. INT4 has groups of 8, finer than the 32 of real checkpoints,
because the fixture's experts are 24 wide. Run by hand for the table in
docs/DRAFTERS.md; `pair_by_weights.py` does the same for the trained pair:

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


def settings(form, group):
  """The quantization_config of a real checkpoint of that kind."""
  folder = {'int4': 'kimi_k25_int4', 'fp8': 'deepseek_v3_fp8'}[form]
  raw = json.loads((fixtures.DATA / folder / 'config.json').read_text())
  found = copy.deepcopy(raw.get('text_config', raw)['quantization_config'])
  if form == 'int4':
    found['config_groups']['group_0']['weights']['group_size'] = group
  return found


def quantised(config, tensors, form, group):
  """A target of float32 tensors in FP8 (every linear map) or INT4 (experts)."""
  tensors = dict(tensors)
  for name in list(tensors):
    linear = name.endswith(('_proj.weight', '_with_mqa.weight'))
    if form == 'fp8' and linear:
      scale = name + '_scale_inv'
      tensors[name], tensors[scale], _ = quantize.fp8(tensors[name])
    elif form == 'int4' and '.mlp.experts.' in name:
      packed, scales, _ = quantize.int4(tensors.pop(name), group)
      tensors[name + '_packed'], tensors[name + '_scale'] = packed, scales
  params = hf.target_params(
    config,
    MappingSource(tensors),
    np.float32,
    source_name=form,
    quantization=hf.quantization(
      {'quantization_config': settings(form, group)}
    ),
  )
  return api.Target(form, config, params, api.DTYPES['float32'], (), {})


def print_table(targets, load_drafter, prompts, budgets, new_tokens):
  """A row for each target: chain, trees, and the tokens of the first again.

  Args:
    targets: pairs of a name and a function that makes the target.
    load_drafter: of a target.
    prompts: token ids.
    budgets: of the trees.
    new_tokens: of every prompt.
  """
  options = {'max_new_tokens': new_tokens, 'stop_ids': ()}
  first = None
  columns = '  '.join(f'budget {budget}' for budget in budgets)
  print(f'weights   chain  {columns}  tokens as the first, {len(prompts)} runs')
  for kind, make in targets:
    target = make()
    drafter = load_drafter(target)
    ar = generation.generate_batch(target, None, prompts, **options)
    tokens = np.array([result.output_ids for result in ar])
    first = tokens if first is None else first
    means = []
    chain = ('chain', drafter.block_size - 1)
    for policy, budget in (chain, *(('best_first', b) for b in budgets)):
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
      means.append(f'{np.mean(lengths):.2f}')
    same = (tokens == first).mean()
    print(f'{kind:<9}', *means, f'{same:.0%}', sep='  ', flush=True)


def main():
  """The fixture, whose target has random weights."""
  raw, tensors = fixtures.raw_config(NAME), fixtures.load(NAME)
  config = hf.model_config(raw)

  def plain(kind):
    return lambda: api.load_target(fixtures.DATA / NAME, weights=kind)

  def coarse(form):
    return lambda: quantised(config, tensors, form, GROUP)

  rng = np.random.default_rng(0)
  prompts = rng.integers(0, config.vocab_size, (PROMPTS, LENGTH)).tolist()
  print_table(
    [(kind, plain(kind)) for kind in ('float32', 'bfloat16')]
    + [(form, coarse(form)) for form in ('fp8', 'int4')],
    lambda target: api.load_drafter(fixtures.DATA / NAME / 'dflash', target),
    prompts,
    (24, 64),
    NEW_TOKENS,
  )


if __name__ == '__main__':
  main()
