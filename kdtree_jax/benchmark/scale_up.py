"""Memory of large targets on several devices, computed from their configs.

    python -m kdtree_jax.benchmark.scale_up

prints the tables of docs/SCALE_UP.md; a test compares them.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from kdtree_jax.benchmark.traffic import flat
from kdtree_jax.config import ModelConfig
from kdtree_jax.model import abstract_params
from kdtree_jax.named_configs import load_config

# One H200: its memory, and what a copy reaches (read plus written).
DEVICE_BYTES = 141e9
BYTES_PER_SECOND = 4.3e12
DEVICES = (1, 2, 4, 8)
BUDGETS = (16, 64, 256)
CONTEXT = 8192
# z-lab/Kimi-K2.6-DFlash, bfloat16; the other target has no public drafter.
KIMI_DRAFTER_BYTES = 3_479_277_056 * 2
TRIALS = 200

# Weights that are not split by heads, experts or columns.
REPLICATED = ('q_a_proj', 'kv_a_proj_with_mqa', 'gate')


@dataclasses.dataclass(frozen=True)
class Storage:
  """Bytes a value, scales included, in which a checkpoint stores weights.

  Attributes:
    name: the format's name in tables.
    expert: bytes a value of routed experts.
    linear: bytes a value of other linear maps; `kv_b_proj` is dequantized to
      bfloat16.
  """

  name: str
  expert: float
  linear: float


# Four bits, and a bfloat16 scale for 32 values.
INT4 = Storage('INT4, groups of 32', 0.5 + 2 / 32, 2)
# One byte, and a float32 scale for a block of 128 x 128.
FP8 = Storage('FP8, blocks of 128', 1 + 4 / 128**2, 1 + 4 / 128**2)

MODELS = (
  ('Kimi-K2.6', 'kimi_k2_6', INT4, KIMI_DRAFTER_BYTES),
  ('DeepSeek-V3', 'deepseek_v3', FP8, 0),
)


@dataclasses.dataclass(frozen=True)
class Weights:
  """Bytes of weights by how they are spread over several devices.

  Attributes:
    replicated: stored whole on every device.
    split: split evenly over all devices, and read by every step.
    head: the head, split by vocabulary.
    embedding: the embedding, split by vocabulary; a step reads single rows.
    expert: one routed expert.
    moe_layers: layers that have routed experts.
  """

  replicated: float
  split: float
  head: float
  embedding: float
  expert: float
  moe_layers: int

  def on_device(self, config: ModelConfig, devices: int) -> float:
    """Bytes on each of `devices`."""
    experts = self.expert * self.moe_layers * config.n_routed_experts
    split = self.split + self.head + self.embedding + experts
    return self.replicated + split / devices


def weights_of(config: ModelConfig, storage: Storage) -> Weights:
  """The weights of a config, from their shapes alone."""
  parts = dict.fromkeys(('replicated', 'split', 'head', 'embedding'), 0.0)
  expert = 0.0
  for names, leaf in flat(abstract_params(config, jnp.bfloat16)):
    values = math.prod(leaf.shape)
    if 'experts' in names:
      expert += values * storage.expert
    elif names[0] in ('embed_tokens', 'lm_head'):
      part = 'head' if names[0] == 'lm_head' else 'embedding'
      parts[part] += values * 2
    elif len(leaf.shape) == 1 or names[-2] in REPLICATED:
      # The router computes in float32 and is stored so.
      linear = len(leaf.shape) == 2 and names[-2] != 'gate'
      size = storage.linear if linear else leaf.dtype.itemsize
      parts['replicated'] += values * size
    else:
      kv_b = len(leaf.shape) == 3
      parts['split'] += values * (2 if kv_b else storage.linear)
  layers = sum(map(config.is_moe_layer, range(config.num_hidden_layers)))
  return Weights(
    **parts,
    expert=expert / layers / config.n_routed_experts,
    moe_layers=layers,
  )


def active_experts(config: ModelConfig, rows: int, devices: int) -> float:
  """Active experts of one layer on the busiest device, a mean of trials.

  Rows choose independently and uniformly; each device holds as many consecutive
  experts. With one device this is E (1 - (1 - K / E)^rows).
  """
  rng = np.random.default_rng(0)
  e, k = config.n_routed_experts, config.num_experts_per_tok
  busiest = []
  for _ in range(TRIALS):
    order = rng.random((rows, e)).argpartition(k, axis=1)[:, :k]
    is_active = np.zeros(e, bool)
    is_active[order.ravel()] = True
    busiest.append(is_active.reshape(devices, -1).sum(axis=1).max())
  return float(np.mean(busiest))


def cache_bytes(config: ModelConfig, tokens: int) -> int:
  """Bytes of a bfloat16 cache, whole on every device: latents have no heads."""
  return config.num_hidden_layers * config.latent_dim * 2 * tokens


def step_milliseconds(
  config: ModelConfig,
  weights: Weights,
  devices: int,
  rows: int,
  drafter: float = 0.0,
) -> float:
  """The busiest device's bytes over the copy bandwidth, without collectives.

  Args:
    config: the target's.
    weights: the target's.
    devices: how many devices the weights are split over.
    rows: the root and its nodes; 1 for an AR step.
    drafter: bytes of a drafter, split too; it reads the head once more.
  """
  active = active_experts(config, rows, devices)
  heads = 2 if drafter else 1
  split = weights.split + heads * weights.head + drafter
  moved = weights.replicated + split / devices
  moved += active * weights.expert * weights.moe_layers
  moved += cache_bytes(config, CONTEXT)
  return moved / BYTES_PER_SECOND * 1e3


def tables() -> Iterator[str]:
  """The Markdown tables, line by line."""
  yield (
    '| model, weights | devices | weights on each | + drafter, '
    f'{CONTEXT} tokens | fits 141 GB |'
  )
  yield '|---|---|---|---|---|'
  found = []
  for name, config_name, storage, drafter in MODELS:
    config = load_config(config_name)
    weights = weights_of(config, storage)
    found.append((name, config, weights, drafter))
    for devices in DEVICES:
      own = weights.on_device(config, devices)
      with_rest = own + drafter / devices + cache_bytes(config, CONTEXT)
      fits = 'yes' if with_rest < DEVICE_BYTES else 'no'
      yield (
        f'| {name}, {storage.name} | {devices} | {own / 1e9:.1f} GB | '
        f'{with_rest / 1e9:.1f} GB | {fits} |'
      )
  yield ''
  yield (
    '| model, 8 devices | step | experts of a layer, all devices | on the '
    'busiest | limit |'
  )
  yield '|---|---|---|---|---|'
  for name, config, weights, drafter in found:
    for budget in (None, *BUDGETS):
      rows = 1 + (budget or 0)
      drafted = 0.0 if budget is None else drafter
      limit = step_milliseconds(config, weights, 8, rows, drafted)
      step = 'AR' if budget is None else f'budget {budget}'
      yield (
        f'| {name} | {step} | {active_experts(config, rows, 1):.0f} of '
        f'{config.n_routed_experts} | {active_experts(config, rows, 8):.1f} | '
        f'{limit:.2f} ms |'
      )


if __name__ == '__main__':
  print('\n'.join(tables()))
