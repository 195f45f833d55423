"""Loading a checkpoint of 1 or 2 GB holds little more than its parameters."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from kdtree_jax.config import ModelConfig
from kdtree_jax.io.export import target_json
from kdtree_jax.io.huggingface import num_parameters, tensor_shapes
from kdtree_jax.io.tensors import ITEM_BYTES
from tests.io import fixtures

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ModelConfig(
  vocab_size=32000,
  hidden_size=2048,
  num_hidden_layers=6,
  num_attention_heads=16,
  q_lora_rank=512,
  kv_lora_rank=512,
  qk_nope_head_dim=64,
  qk_rope_head_dim=64,
  v_head_dim=64,
  intermediate_size=8192,
  moe_intermediate_size=1024,
  n_routed_experts=24,
  num_experts_per_tok=4,
  n_shared_experts=1,
  first_k_dense_replace=1,
)
LIMIT = 400e6

# In a process of its own: peaks are never forgotten. The highest resident set,
# less what JAX and the programs that loading compiles take by themselves.
SCRIPT = """
import resource, sys
from kdtree_jax import api
import jax

def peak():
  return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

api.load_target(sys.argv[2], 'bfloat16')
before = peak()
target = api.load_target(sys.argv[1], 'bfloat16')
size = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
print(size, peak() - before)
"""


def stored(name, shape, fp8):
  """Name, dtype and shape of what stands for a weight in a file."""
  if fp8 and name.endswith(('_proj.weight', '_with_mqa.weight')):
    blocks = [-(-dim // 128) for dim in shape]
    return [
      (name, 'F8_E4M3', list(shape)),
      (name + '_scale_inv', 'F32', blocks),
    ]
  return [(name, 'BF16', list(shape))]


def write_zeros(folder, fp8):
  """A sparse file: the header, then as many zeros as it announces."""
  header, offset = {}, 0
  for weight, dims in tensor_shapes(CONFIG).items():
    for name, dtype, shape in stored(weight, dims, fp8):
      size = math.prod(shape) * ITEM_BYTES[dtype]
      header[name] = {
        'dtype': dtype,
        'shape': shape,
        'data_offsets': [offset, offset + size],
      }
      offset += size
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  with open(folder / 'model.safetensors', 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    file.truncate(8 + len(text) + offset)
  raw = target_json(CONFIG, 'BF16')
  if fp8:
    quantised = fixtures.raw_config('deepseek_v3_fp8')
    raw['quantization_config'] = quantised['quantization_config']
  (folder / 'config.json').write_text(json.dumps(raw))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('alike', 'least', 'most'),
  [('deepseek_v3', 2e9, 2.4e9), ('deepseek_v3_fp8', 1e9, 1.5e9)],
)
def test_the_host_holds_one_tensor_at_a_time(tmp_path, alike, least, most):
  """Quantised weights stay so: FP8 is half as large as bfloat16."""
  assert 2e9 < 2 * num_parameters(CONFIG) < 2.4e9
  write_zeros(tmp_path, alike == 'deepseek_v3_fp8')
  done = subprocess.run(
    [sys.executable, '-c', SCRIPT, str(tmp_path), f'tests/data/{alike}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert done.returncode == 0, done.stderr
  size, grown = map(int, done.stdout.split())
  assert least < size < most
  assert grown < size + LIMIT, f'{grown:,} for {size:,}'
