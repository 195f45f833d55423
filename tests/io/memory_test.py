"""Loading a checkpoint of 2 GB holds little more than its parameters."""

import json
import pathlib
import subprocess
import sys

import pytest

from kdtree_jax.config import ModelConfig
from kdtree_jax.io.export import target_json
from kdtree_jax.io.huggingface import num_parameters, tensor_shapes

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

api.load_target('tests/data/deepseek_v3', 'bfloat16')
before = peak()
target = api.load_target(sys.argv[1], 'bfloat16')
size = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
print(size, peak() - before)
"""


def write_zeros(folder):
  """A sparse file: the header, then as many zeros as it announces."""
  header, offset = {}, 0
  for name, shape in tensor_shapes(CONFIG).items():
    size = 2
    for dim in shape:
      size *= dim
    header[name] = {
      'dtype': 'BF16',
      'shape': list(shape),
      'data_offsets': [offset, offset + size],
    }
    offset += size
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  with open(folder / 'model.safetensors', 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    file.truncate(8 + len(text) + offset)
  raw = target_json(CONFIG, 'BF16')
  (folder / 'config.json').write_text(json.dumps(raw))


@pytest.mark.slow
def test_the_host_holds_one_tensor_at_a_time(tmp_path):
  assert 2e9 < 2 * num_parameters(CONFIG) < 2.4e9
  write_zeros(tmp_path)
  done = subprocess.run(
    [sys.executable, '-c', SCRIPT, str(tmp_path)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  size, grown = map(int, done.stdout.split())
  assert size > 2e9
  assert grown < size + LIMIT, f'{grown:,} for {size:,}'
