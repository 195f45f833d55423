"""Acceptance length of the trained pair as the target's weights get coarser.

As `acceptance_by_weights.py`, on prompts that no training has seen: the
beginnings of this project's own modules. INT4 has groups of 16, because the
experts are 48 wide:

    python tests/peers/pair_by_weights.py
"""

import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kdtree_jax import api  # noqa: E402
from kdtree_jax.io.kdtr import read_bundle  # noqa: E402
from kdtree_jax.io.tokenizer import load_tokenizer  # noqa: E402
from kdtree_jax.modes.demo_pair import DRAFTER, TARGET  # noqa: E402
from tests.peers.acceptance_by_weights import (  # noqa: E402
  print_table,
  quantised,
)

PROMPTS, LENGTH, NEW_TOKENS, GROUP = 48, 64, 128, 16


def prompts_of(tokenizer):
  """The first tokens of the project's longest modules."""
  files = sorted(
    ROOT.glob('kdtree_jax/*/*.py'), key=lambda file: -file.stat().st_size
  )
  ids = (tokenizer.encode(file.read_text())[:LENGTH] for file in files)
  return [found for found in ids if len(found) == LENGTH][:PROMPTS]


def main():
  """The file holds bfloat16: float32 weights would be the same values."""
  path = api.bundled(TARGET)
  bundle = read_bundle(path)
  tensors = {k: v.astype(np.float32) for k, v in bundle.target.items()}

  def coarse(form):
    return lambda: quantised(bundle.config, tensors, form, GROUP)

  print_table(
    [('bfloat16', lambda: api.load_target(path))]
    + [(form, coarse(form)) for form in ('fp8', 'int4')],
    lambda target: api.load_drafter(api.bundled(DRAFTER), target),
    prompts_of(load_tokenizer(path)),
    (16, 64),
    NEW_TOKENS,
  )


if __name__ == '__main__':
  main()
