"""DDTree speculative decoding for MLA+MoE language models.

A drafter proposes a tree of tokens, and the target verifies it in one forward.
The output is that of autoregressive (AR) decoding, in fewer target forwards.

To begin with:

  python run.py
      The demo, in a minute and without downloads.

  python run.py --mode=generate --target=DIR --drafter=DIR --prompt='def add('
      Continues a prompt by AR, DFlash chain and DDTree; one JSON line a run.

  python run.py --mode=audit --target=DIR --drafter=DIR --prompt_ids=1,2,3
      Checks that DDTree's output is that of AR, and judges a divergence.

  python run.py --mode=bench --config=moonlight --output=moonlight.jsonl
      Times AR and rounds on random weights of a config's shape.

Compiled programs are kept in ~/.cache/kdtree_jax, by JAX, for the next time.
JAX_ENABLE_COMPILATION_CACHE=false keeps none, JAX_COMPILATION_CACHE_DIR=DIR
keeps them elsewhere.
"""

import importlib
import sys
from collections.abc import Sequence

from absl import logging

from kdtree_jax.modes import flags, help_pages
from kdtree_jax.modes.ending import exit_status


def main(argv: Sequence[str]) -> int:
  """Runs a command line.

  Args:
    argv: the program's name, then its arguments.

  Returns:
    The exit status.
  """
  return exit_status(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
  mode = flags.help_mode(argv)
  if mode is not None:
    print(help_pages.page(mode, __doc__))
    return 0
  options = flags.parse(argv)
  flags.check_paths(options)
  # Imported here because both import JAX, which help and typos do not need.
  from kdtree_jax.modes.program_cache import keep_compiled_programs

  module = importlib.import_module(f'kdtree_jax.modes.{options.mode}')
  keep_compiled_programs()
  return module.run(options)


if __name__ == '__main__':
  logging.use_absl_handler()
  sys.exit(main(sys.argv))
