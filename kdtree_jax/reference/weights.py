"""Random checkpoints with varied greedy output, and their golden answers."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from kdtree_jax.reference.decode import greedy
from kdtree_jax.reference.layers import Config
from kdtree_jax.reference.model import ReferenceModel, is_sparse

# Standard deviations, in units of 1 / sqrt(fan_in) for matrices. Residual
# branches are as large as the embedding, so that the output depends on more
# than the last token, and the head sets the spread of the logits.
_EMBEDDING_STD = 1.0
_MATRIX_GAIN = 1.0
_BRANCH_GAIN = 2.0
_QUERY_GAIN = 2.0
_HEAD_GAIN = 4.0
_NORM_NOISE = 0.1
_BIAS_STD = 0.05


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
  """The shape of every tensor of a checkpoint, by Hugging Face name."""
  hidden, vocab = config['hidden_size'], config['vocab_size']
  shapes: dict[str, tuple[int, ...]] = {
    'model.embed_tokens.weight': (vocab, hidden),
    'model.norm.weight': (hidden,),
  }
  if not config['tie_word_embeddings']:
    shapes['lm_head.weight'] = (vocab, hidden)
  for layer in range(config['num_hidden_layers']):
    prefix = f'model.layers.{layer}.'
    shapes[prefix + 'input_layernorm.weight'] = (hidden,)
    shapes[prefix + 'post_attention_layernorm.weight'] = (hidden,)
    shapes |= _attention_shapes(config, prefix + 'self_attn.')
    if is_sparse(config, layer):
      shapes |= _moe_shapes(config, prefix + 'mlp.')
    else:
      width = config['intermediate_size']
      shapes |= _swiglu_shapes(prefix + 'mlp.', hidden, width)
  return shapes


def _attention_shapes(
  config: Config, prefix: str
) -> dict[str, tuple[int, ...]]:
  hidden, heads = config['hidden_size'], config['num_attention_heads']
  nope, rope = config['qk_nope_head_dim'], config['qk_rope_head_dim']
  q_rank, kv_rank = config['q_lora_rank'], config['kv_lora_rank']
  v_dim, biased = config['v_head_dim'], config['attention_bias']
  compressed = 'kv_a_proj_with_mqa'
  shapes: dict[str, tuple[int, ...]] = {
    f'{compressed}.weight': (kv_rank + rope, hidden),
    'kv_a_layernorm.weight': (kv_rank,),
    'kv_b_proj.weight': (heads * (nope + v_dim), kv_rank),
    'o_proj.weight': (hidden, heads * v_dim),
  }
  if q_rank is None:
    shapes['q_proj.weight'] = (heads * (nope + rope), hidden)
  else:
    shapes['q_a_proj.weight'] = (q_rank, hidden)
    shapes['q_a_layernorm.weight'] = (q_rank,)
    shapes['q_b_proj.weight'] = (heads * (nope + rope), q_rank)
  for name in ('q_a_proj', compressed, 'o_proj') if biased else ():
    if f'{name}.weight' in shapes:
      shapes[f'{name}.bias'] = shapes[f'{name}.weight'][:1]
  return {prefix + name: shape for name, shape in shapes.items()}


def _moe_shapes(config: Config, prefix: str) -> dict[str, tuple[int, ...]]:
  hidden, experts = config['hidden_size'], config['n_routed_experts']
  width, shared = config['moe_intermediate_size'], config['n_shared_experts']
  shapes: dict[str, tuple[int, ...]] = {
    prefix + 'gate.weight': (experts, hidden)
  }
  if config['topk_method'] == 'noaux_tc':
    shapes[prefix + 'gate.e_score_correction_bias'] = (experts,)
  for expert in range(experts):
    shapes |= _swiglu_shapes(f'{prefix}experts.{expert}.', hidden, width)
  if shared:
    shapes |= _swiglu_shapes(prefix + 'shared_experts.', hidden, width * shared)
  return shapes


def _swiglu_shapes(
  prefix: str, hidden: int, width: int
) -> dict[str, tuple[int, ...]]:
  return {
    prefix + 'gate_proj.weight': (width, hidden),
    prefix + 'up_proj.weight': (width, hidden),
    prefix + 'down_proj.weight': (hidden, width),
  }


def _embedding_std(config: Config) -> float:
  # A tied embedding is also the head. As large as a separate one, it would make
  # every token predict itself.
  if config['tie_word_embeddings']:
    return _HEAD_GAIN / config['hidden_size'] ** 0.5
  return _EMBEDDING_STD


def _gain(name: str) -> float:
  if name == 'lm_head.weight':
    return _HEAD_GAIN
  if name.endswith(('o_proj.weight', 'down_proj.weight')):
    return _BRANCH_GAIN
  if name.endswith(('q_proj.weight', 'q_b_proj.weight')):
    return _QUERY_GAIN
  return _MATRIX_GAIN


def random_tensors(config: Config, seed: int) -> dict[str, np.ndarray]:
  """The tensors of a random checkpoint, experts one by one.

  Args:
    config: the model's flat configuration.
    seed: for `np.random.default_rng`.

  Returns:
    Hugging Face names to arrays: bfloat16, but the router's selection bias
    (present if `topk_method` is `noaux_tc`) is float32.
  """
  rng = np.random.default_rng(seed)
  tensors = {}
  for name, shape in tensor_shapes(config).items():
    value = rng.standard_normal(shape, np.float32)
    if name.endswith('norm.weight'):
      value = 1 + _NORM_NOISE * value
    elif name.endswith('bias'):
      value *= _BIAS_STD
    elif name == 'model.embed_tokens.weight':
      value *= _embedding_std(config)
    else:
      value *= _gain(name) / shape[-1] ** 0.5
    is_selection_bias = name.endswith('e_score_correction_bias')
    dtype = np.float32 if is_selection_bias else ml_dtypes.bfloat16
    tensors[name] = value.astype(dtype)
  return tensors


def make_golden(
  config: Config,
  tensors: Mapping[str, np.ndarray],
  prompt_length: int,
  num_tokens: int,
  seed: int,
) -> dict[str, np.ndarray]:
  """The golden answers that an implementation is checked with.

  Args:
    config: the model's flat configuration.
    tensors: its weights, under the names of `random_tensors`.
    prompt_length: tokens in the random prompt.
    num_tokens: greedy tokens after it.
    seed: seeds the prompt.

  Returns:
    `prompt` and `ar_tokens`, int32, and at every token of the prompt `layers`
    float32 `[L, T, M]`, the residual stream after every layer, and `logits`
    float32 `[T, V]`.
  """
  model = ReferenceModel(config, tensors)
  rng = np.random.default_rng(seed)
  prompt = rng.integers(config['vocab_size'], size=prompt_length)
  out = model.forward(prompt, range(prompt_length))
  return {
    'prompt': prompt.astype(np.int32),
    'ar_tokens': np.asarray(greedy(model, prompt, num_tokens), np.int32),
    'layers': np.stack(out.layers),
    'logits': out.logits,
  }
