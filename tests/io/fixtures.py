"""Tiny models and files that the tests of this folder share."""

import hashlib
import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors.numpy
from hypothesis import settings

from kdtree_jax.config import DrafterConfig, ModelConfig, RopeScaling
from kdtree_jax.io.huggingface import drafter_shapes, tensor_shapes
from kdtree_jax.io.kdtr import Bundle

DATA = pathlib.Path(__file__).parents[1] / 'data'
TARGETS = (
  'deepseek_v3',
  'deepseek_v3_nine_tokens',
  'deepseek_v3_trained_drafter',
  'moonlight',
  'deepseek_v2_lite',
  'glm4_moe_lite',
)
DRAFTERS = tuple(name for name in TARGETS if name != 'deepseek_v2_lite')

# Examples are the same in every run, and nothing is left on the disk.
deterministic = settings(
  derandomize=True, database=None, deadline=None, max_examples=60
)

CONFIG = ModelConfig(
  vocab_size=11,
  hidden_size=16,
  num_hidden_layers=2,
  num_attention_heads=2,
  q_lora_rank=6,
  kv_lora_rank=8,
  qk_nope_head_dim=4,
  qk_rope_head_dim=2,
  v_head_dim=3,
  intermediate_size=10,
  moe_intermediate_size=5,
  n_routed_experts=4,
  num_experts_per_tok=2,
  n_shared_experts=1,
  first_k_dense_replace=1,
  rope_scaling=RopeScaling(
    factor=4.0, original_max_position_embeddings=32, mscale=1.0
  ),
  eos_token_id=(1, 3),
)
DRAFTER_CONFIG = DrafterConfig(
  hidden_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=4,
  intermediate_size=6,
  vocab_size=11,
  block_size=4,
  mask_token_id=10,
  target_layer_ids=(0, 1),
  num_target_layers=2,
)


def random_tensors(shapes, seed=0, dtype=np.float32):
  """Normal values for a table of shapes."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal(shape).astype(dtype)
    for name, shape in shapes.items()
  }


def make_bundle(**changes) -> Bundle:
  """A valid bundle with a drafter and golden answers."""
  fields = {
    'name': 'toy',
    'config': CONFIG,
    'target': random_tensors(tensor_shapes(CONFIG)),
    'golden': {
      'prompt': np.array([2, 5, 7], np.int32),
      'ar_tokens': np.array([0, 10], np.int32),
      'layer_0': np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2),
    },
    'drafter_config': DRAFTER_CONFIG,
    'drafter': random_tensors(
      drafter_shapes(DRAFTER_CONFIG), 1, ml_dtypes.bfloat16
    ),
    'recipe': {'seed': 7, 'note': 'made by a test'},
  }
  return Bundle(**fields | changes)


def raw_config(name: str, **changes) -> dict:
  """A fixture's config.json, changed; None removes a key."""
  raw = json.loads((DATA / name / 'config.json').read_text())
  raw |= changes
  return {k: v for k, v in raw.items() if k not in changes or v is not None}


def load(name: str) -> dict[str, np.ndarray]:
  """All tensors of a fixture."""
  return safetensors.numpy.load_file(DATA / name / 'model.safetensors')


def write_shards(folder: pathlib.Path, shards, weight_map=None) -> None:
  """Writes `{file name: tensors}` and an index, true unless given."""
  for name, tensors in shards.items():
    safetensors.numpy.save_file(tensors, folder / name)
  if weight_map is None:
    weight_map = {t: name for name, ts in shards.items() for t in ts}
  index = {'metadata': {}, 'weight_map': weight_map}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))


def compact(value) -> str:
  return json.dumps(value, sort_keys=True, separators=(',', ':'))


def seal(manifest: dict) -> dict:
  """A manifest with the digest that it needs to be believed."""
  rest = {k: v for k, v in manifest.items() if k != 'sha256'}
  digest = hashlib.sha256(compact(rest).encode()).hexdigest()
  return rest | {'sha256': digest}


def table(tensors) -> dict:
  """The manifest's table for these tensors."""
  names = {'float32': 'F32', 'bfloat16': 'BF16', 'int32': 'I32'}
  return {
    name: {
      'dtype': names.get(value.dtype.name, value.dtype.name),
      'shape': list(value.shape),
      'sha256': hashlib.sha256(value.tobytes()).hexdigest(),
    }
    for name, value in tensors.items()
  }


def forge(path: pathlib.Path, tensors, manifest: dict | str) -> None:
  """Writes what claims to be a bundle."""
  text = manifest if isinstance(manifest, str) else compact(manifest)
  safetensors.numpy.save_file(tensors, path, metadata={'kdtr': text})


def unpack(path: pathlib.Path) -> tuple[dict, dict]:
  """The tensors and the manifest of a bundle, by public means only."""
  with safetensors.safe_open(path, 'numpy') as file:
    tensors = {name: file.get_tensor(name) for name in file.keys()}
    return tensors, json.loads(file.metadata()['kdtr'])
