"""What `run.py --mode=NAME` does: one module a mode.

Each has `FLAGS`, the names of the flags that it uses, and `run(config) -> int`,
the exit status.
"""

from kdtree_jax.modes import (
  audit,
  bench,
  bench_acceptance,
  convert,
  demo,
  generate,
  inspect,
  make_bundle,
  make_corpus,
  train_drafter,
  train_target,
)

MODES = {
  'audit': audit,
  'bench': bench,
  'bench_acceptance': bench_acceptance,
  'convert': convert,
  'demo': demo,
  'generate': generate,
  'inspect': inspect,
  'make_bundle': make_bundle,
  'make_corpus': make_corpus,
  'train_drafter': train_drafter,
  'train_target': train_target,
}
