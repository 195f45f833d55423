"""The machine that figures are measured on, and its ceilings."""

import importlib.metadata
import platform
import shlex
import sys

import jax
import jax.numpy as jnp

from kdtree_jax.benchmark import Record
from pallas_kernels import bench


def ceilings() -> bench.Ceilings:
  """Copy bandwidth and product rate, measured now.

  On a CPU the sizes are those of a quick test, and the figures mean nothing.
  """
  if jax.default_backend() == 'gpu':
    return bench.measure_ceilings()
  x = jnp.ones((1 << 20,), jnp.float32)
  a = jnp.ones((128, 128), jnp.float32)
  copy = bench.seconds_per_call(lambda x: x + 1, (x,), 4, in_place=True)
  product = bench.seconds_per_call(lambda a, b: a @ b, (a, a), 4)
  kind = jax.devices()[0].device_kind
  return bench.Ceilings(kind, 2 * x.nbytes / copy, 2 * 128**3 / product, 0.0)


def describe(found: bench.Ceilings) -> Record:
  """Hardware, versions, command and ceilings, for the head of results."""
  device = jax.devices()[0]
  packages = ('jax', 'jaxlib', 'flax', 'numpy')
  return {
    'hardware': {
      'device': device.device_kind,
      'platform': device.client.platform_version,
      'memory_bytes': memory('bytes_limit'),
      'host': f'{platform.system()} {platform.machine()}',
    },
    'versions': {
      'python': platform.python_version(),
      **{name: importlib.metadata.version(name) for name in packages},
    },
    'command': shlex.join(['python', 'run.py', *sys.argv[1:]]),
    'measured': {
      'copy_bytes_per_second': found.copy_bytes_per_second,
      'product_flops_per_second': found.product_flops_per_second,
      'loop_seconds': found.loop_seconds,
    },
  }


def memory(key: str) -> int | None:
  """One of the device's memory statistics; None if it keeps none."""
  return (jax.devices()[0].memory_stats() or {}).get(key)
