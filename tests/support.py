"""Models and prompts that several test files share."""

import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from kdtree_jax import api, reference
from kdtree_jax.benchmark.cost_measurement import resolve_costs
from kdtree_jax.config import ModelConfig
from kdtree_jax.decode.budget import init_budget
from kdtree_jax.io import huggingface
from kdtree_jax.io.tensors import MappingSource
from kdtree_jax.modes.make_bundle import can_generate
from kdtree_jax.named_configs import config_names, load_config, recipe_names

DATA = pathlib.Path(__file__).parent / 'data'
FIXTURES = tuple(sorted(p.name for p in DATA.iterdir() if p.is_dir()))
# Of configs/: what is trained here, the variants of bundles, real models.
TRAINED = recipe_names()
SMALL = tuple(
  name
  for name in config_names()
  if name not in TRAINED and can_generate(load_config(name))
)
TRACED = tuple(
  name for name in FIXTURES if (DATA / name / 'ddtree_trace.json').exists()
)


def target_of(
  config: ModelConfig, seed: int = 0, dtype: str = 'float32'
) -> api.Target:
  """A target with random weights from the NumPy generator."""
  tensors = reference.random_tensors(config.to_dict(), seed)
  params = huggingface.target_params(
    config, MappingSource(tensors), api.DTYPES[dtype], source_name='test'
  )
  return api.Target('test', config, params, api.DTYPES[dtype], (), {})


@functools.cache
def variant(name: str) -> api.Target:
  """`configs/<name>.py`, reduced, with random weights."""
  return target_of(load_config(name).reduced(), seed=len(name))


def reference_of(config: ModelConfig, seed: int) -> reference.ReferenceModel:
  """The NumPy model with the weights of `target_of(config, seed)`."""
  fields = config.to_dict()
  return reference.ReferenceModel(
    fields, reference.random_tensors(fields, seed)
  )


@functools.cache
def fixture(name: str) -> api.Target:
  return api.load_target(DATA / name)


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
  return load_file(DATA / name / 'expected.safetensors')


@functools.cache
def trace(name: str) -> dict:
  return json.loads((DATA / name / 'ddtree_trace.json').read_text())


def prompt_of(config: ModelConfig, length: int, seed: int = 0) -> list[int]:
  rng = np.random.default_rng(seed)
  return rng.integers(0, config.vocab_size, length).tolist()


def tree_bytes(tree: Any) -> int:
  """The size of all leaves, which are arrays or their shapes."""
  leaves = jax.tree.leaves(tree)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def relative_error(actual: np.ndarray, wanted: np.ndarray) -> float:
  """Largest difference over the largest magnitude wanted."""
  return float(np.abs(actual - wanted).max() / np.abs(wanted).max())


_COMPILED: list[str] = []


def _count(event: str, seconds: float, **fields: object) -> None:
  del seconds
  if event == '/jax/core/compile/backend_compile_duration':
    name = str(fields.get('fun_name'))
    _COMPILED.append(name.removeprefix('jit(').removesuffix(')'))


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations(*names: str) -> int:
  """Programs that JAX has compiled, or loaded from disk, in this process.

  Args:
    *names: functions to count; default: all.
  """
  return sum(not names or name in names for name in _COMPILED)


def with_costs(engine, params, state):
  """Parameters and state for an engine that chooses, with costs from bytes."""
  if not engine.chooses:
    return params, state
  costs = resolve_costs('bytes', engine, params, state)
  return params | {'costs': costs}, state.replace(budget=init_budget(costs))
