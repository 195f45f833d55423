"""What `run.py --mode=NAME` does: one module a mode.

Each has `FLAGS`, the names of the flags that it uses, and `run(config) -> int`,
the exit status.
"""

from kdtree_jax.modes import (
  audit,
  bench,
  convert,
  demo,
  generate,
  inspect,
  make_bundle,
)

MODES = {
  'audit': audit,
  'bench': bench,
  'convert': convert,
  'demo': demo,
  'generate': generate,
  'inspect': inspect,
  'make_bundle': make_bundle,
}
