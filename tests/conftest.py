"""Strict JAX for every test, and programs that are compiled once."""

import os
import pathlib
import tempfile

# Most of the suite's time is compilation. Without LLVM's optimisations, and
# with XLA's older emitters of fusions, it takes an eighth of the time; XLA's
# passes and IEEE arithmetic are the same, and the demo is tested as users run
# it. Splitting each program for 32 threads costs more than a worker's core
# gives back. And what one worker, run or subprocess has compiled, another need
# not: JAX finds it by its HLO; small programs as well, for they are many and
# forgotten with the large ones.
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_backend_optimization_level=0',
    '--xla_cpu_parallel_codegen_split_count=1',
    '--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters',
  ]
).strip()
CACHE = pathlib.Path(tempfile.gettempdir()) / f'kdtree_jax-xla-{os.getuid()}'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
# Threads of XLA's CPU client; by default one a core. The interpreter of Mosaic
# kernels blocks one for each warpgroup that waits for another, all blocks of a
# cluster at once: with two cores the one that they wait for never starts.
os.environ.setdefault('NPROC', '32')

import gc  # noqa: E402
import itertools  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import shapes  # noqa: E402

shapes.install()

# A compiled program holds some hundred memory maps, of which Linux allows a
# process 65530: a worker that compiled the whole matrix crashed at the limit.
MAPS_AT_ONCE = 35_000
MAPS = pathlib.Path('/proc/self/maps')
# Counting takes milliseconds.
TESTS_BETWEEN = 5
_tests = itertools.count(1)

# JAX keeps millions of small objects while it traces, none of them garbage:
# to look through all of them now and then is a tenth of the suite.
gc.freeze()
gc.set_threshold(100_000, 20, 100)

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True)
def few_programs():
  """Forgets what was compiled, now and then, between two tests."""
  yield
  if next(_tests) % TESTS_BETWEEN or not MAPS.exists():
    return
  if MAPS.read_bytes().count(b'\n') > MAPS_AT_ONCE:
    jax.clear_caches()
    gc.collect()
