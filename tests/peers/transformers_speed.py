"""Milliseconds a token of transformers, at the shape of a file in `configs/`.

Needs torch and transformers, which the suite does not; so this is run by hand,
beside `--mode=bench` on the same machine:

    python tests/peers/transformers_speed.py [config] [context] [output.jsonl]

Random bfloat16 weights made on the device, batch 1. Eager: the dynamic cache.
Static: a static cache and torch.compile in mode reduce-overhead, as `generate`
sets it up. A figure is the difference of a long and a short generation over
their difference in tokens, so that prefill and set-up drop out; the median of
several. What fails says why and hides nothing else. Prints JSON lines with the
fields of `--mode=bench`.
"""

import json
import pathlib
import statistics
import sys
import time
import types

import torch
import transformers

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# The configs alone: the package itself would want JAX, which need not be
# installed beside torch, and JAX would take the GPU's memory.
package = types.ModuleType('kdtree_jax')
package.__path__ = [str(ROOT / 'kdtree_jax')]
sys.modules['kdtree_jax'] = package

from kdtree_jax.named_configs import load_config  # noqa: E402

SHORT, LONG, REPETITIONS = 4, 36, 3
# What is left undone after so many seconds is said to be.
BUDGET_SECONDS = 140
STD = 0.02
# Ways through the experts. grouped_mm is transformers' default on a GPU, where
# generate takes batched_mm in its place once the prompt is over.
EAGER_EXPERTS = ('grouped_mm', 'eager')
STATIC_EXPERTS = ('grouped_mm',)


def peer_config(name: str, positions: int) -> transformers.DeepseekV3Config:
  """The config of that name, as transformers spells it."""
  c = load_config(name)
  return transformers.DeepseekV3Config(
    vocab_size=c.vocab_size,
    hidden_size=c.hidden_size,
    intermediate_size=c.intermediate_size,
    moe_intermediate_size=c.moe_intermediate_size,
    num_hidden_layers=c.num_hidden_layers,
    num_attention_heads=c.num_attention_heads,
    num_key_value_heads=c.num_attention_heads,
    n_shared_experts=c.n_shared_experts,
    n_routed_experts=c.n_routed_experts,
    num_experts_per_tok=c.num_experts_per_tok,
    routed_scaling_factor=c.routed_scaling_factor,
    kv_lora_rank=c.kv_lora_rank,
    q_lora_rank=c.q_lora_rank,
    qk_rope_head_dim=c.qk_rope_head_dim,
    qk_nope_head_dim=c.qk_nope_head_dim,
    v_head_dim=c.v_head_dim,
    n_group=c.n_group,
    topk_group=c.topk_group,
    first_k_dense_replace=c.first_k_dense_replace,
    norm_topk_prob=c.norm_topk_prob,
    rms_norm_eps=c.rms_norm_eps,
    max_position_embeddings=max(positions, c.max_position_embeddings),
    rope_parameters={'rope_type': 'default', 'rope_theta': c.rope_theta},
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
  )


def random_model(name: str, positions: int, device: str):
  """The model without any weight on the host."""
  config = peer_config(name, positions)
  torch.set_default_dtype(torch.bfloat16)
  with torch.device('meta'):
    model = transformers.DeepseekV3ForCausalLM(config)
  torch.set_default_dtype(torch.float32)
  model = model.to_empty(device=device).eval()
  torch.manual_seed(0)
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim > 1:
        parameter.normal_(0, STD)
      else:
        parameter.fill_(1)
    for buffer_name, buffer in model.named_buffers():
      if 'bias' in buffer_name:
        buffer.zero_()
  # Frequencies are no parameters: to_empty has left them empty.
  rotary = model.model.rotary_emb
  rotary_class = type(rotary)
  model.model.rotary_emb = rotary_class(config=config).to(device)
  return model


def milliseconds(model, prompt, **options) -> dict:
  """Median, least and most of the milliseconds a token."""

  def seconds(count: int) -> float:
    synchronise(prompt.device)
    begin = time.perf_counter()
    with torch.no_grad():
      model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        **options,
      )
    synchronise(prompt.device)
    return time.perf_counter() - begin

  begin = time.perf_counter()
  # Twice: compilation, and the capture of graphs. The long one first, whose
  # static cache serves the short one too.
  for _ in range(2):
    seconds(LONG)
  first = time.perf_counter() - begin
  values = [
    (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3
    for _ in range(REPETITIONS)
  ]
  return {
    'ms': statistics.median(values),
    'ms_min': min(values),
    'ms_max': max(values),
    'warm_up_seconds': first,
  }


def synchronise(device) -> None:
  """Waits for a GPU."""
  if device.type == 'cuda':
    torch.cuda.synchronize()


def variants():
  """Name, experts' implementation and options of `generate`."""
  for experts in EAGER_EXPERTS:
    yield 'eager, dynamic cache', experts, {}
  for experts in STATIC_EXPERTS:
    compiled = transformers.CompileConfig(
      mode='reduce-overhead', fullgraph=False, dynamic=False
    )
    static = {'cache_implementation': 'static', 'compile_config': compiled}
    yield 'static cache, compiled', experts, static


def main(name: str = 'moonlight', context: str = '2048', output: str = ''):
  """See the module."""
  begin = time.perf_counter()
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  kind = torch.cuda.get_device_name() if device == 'cuda' else 'cpu'
  records = []

  def emit(record: dict) -> None:
    print(json.dumps(record), flush=True)
    records.append(record)

  emit(
    {
      'kind': 'run',
      'settings': {'name': name, 'weights': 'random weights'},
      'hardware': {'device': kind},
      'versions': {
        'torch': torch.__version__,
        'transformers': transformers.__version__,
      },
    }
  )
  model = random_model(name, int(context) + LONG, device)
  vocab = model.config.vocab_size
  prompt = torch.randint(0, vocab, (1, int(context)), device=device)
  for method, experts, options in variants():
    record = {
      'kind': 'peer',
      'method': f'transformers {method}, experts {experts}',
      'context': int(context),
      'tree_budget': 0,
    }
    if time.perf_counter() - begin > BUDGET_SECONDS:
      emit(record | {'failure': f'not run: {BUDGET_SECONDS} s are over'})
      continue
    try:
      model.set_experts_implementation(experts)
      emit(record | {'measured': milliseconds(model, prompt, **options)})
    except Exception as error:  # noqa: BLE001
      reason = f'{type(error).__name__}: {error}'[:300]
      emit(record | {'failure': ' '.join(reason.split())})
    if device == 'cuda':
      torch.cuda.empty_cache()
  if output:
    text = ''.join(json.dumps(record) + '\n' for record in records)
    pathlib.Path(output).write_text(text)


if __name__ == '__main__':
  main(*sys.argv[1:])
