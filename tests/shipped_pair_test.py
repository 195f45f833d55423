"""The trained pair that ships: its files, its words, what gets accepted."""

import pytest

from kdtree_jax import api, generation
from kdtree_jax.io.kdtr import read_bundle
from kdtree_jax.io.tokenizer import load_tokenizer
from kdtree_jax.modes.demo_pair import DRAFTER, TARGET

MEGABYTE = 10**6
PROMPTS = (
  'import os\nimport sys\n\n\ndef main():\n    parser = argparse.',
  'class Stack:\n    def __init__(self):\n        self.items = []\n\n    def ',
  '    def test_equal(self):\n        self.assertEqual(',
  'def read_json(path):\n    """Return the contents of a JSON file."""\n',
  'try:\n    import numpy as np\nexcept ImportError:\n',
)
# Greedy, float32, 64 tokens each: mean acceptance lengths.
PINNED = {'chain': 3.862, 'ddtree': 4.764}
TREE_BUDGET = 16


def test_files_fit_the_package():
  target, drafter = (api.bundled(name) for name in (TARGET, DRAFTER))
  sizes = [path.stat().st_size for path in (target, drafter)]
  assert max(sizes) < 16 * MEGABYTE and sum(sizes) <= 24 * MEGABYTE
  bundle, alone = read_bundle(target), read_bundle(drafter)
  count = sum(value.size for value in bundle.target.values())
  assert 6_000_000 <= count <= 8_000_000
  assert 3 * sum(value.size for value in alone.drafter.values()) <= count
  assert alone.config is None and bundle.drafter is None
  assert bundle.config.n_routed_experts >= 16 and bundle.config.eos_token_id


def test_acceptance_is_pinned():
  path = api.bundled(TARGET)
  target, tokenizer = api.load_target(path), load_tokenizer(path)
  drafter = api.load_drafter(api.bundled(DRAFTER), target)
  prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
  options = {'max_new_tokens': 64, 'stop_ids': (), 'capacity': 128}
  ar = generation.generate_batch(target, None, prompts, **options)
  found = {}
  for name, policy, budget in (
    ('chain', 'chain', drafter.block_size - 1),
    ('ddtree', 'best_first', TREE_BUDGET),
  ):
    results = generation.generate_batch(
      target,
      drafter,
      prompts,
      tree_policy=policy,
      tree_budget=budget,
      **options,
    )
    assert [r.output_ids for r in results] == [r.output_ids for r in ar]
    tokens = sum(sum(r.acceptance_lengths) for r in results)
    found[name] = tokens / sum(r.target_forwards for r in results)
  assert found == pytest.approx(PINNED, rel=0.05)
