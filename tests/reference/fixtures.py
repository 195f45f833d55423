"""Reads the checkpoints of `tests/data` for the reference.

On purpose not the engine's loader: a shared mistake would go unseen.
"""

import functools
import json
import pathlib
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import load_file

from kdtree_jax.reference import ReferenceDrafter, ReferenceModel

DATA = pathlib.Path(__file__).parent.parent / 'data'
TARGETS = (
  'deepseek_v3',
  'deepseek_v3_nine_tokens',
  'deepseek_v3_trained_drafter',
  'moonlight',
  'deepseek_v2_lite',
  'glm4_moe_lite',
)
WITH_DRAFTER = tuple(name for name in TARGETS if name != 'deepseek_v2_lite')

_SAME_NAME = (
  'vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank '
  'kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim '
  'intermediate_size moe_intermediate_size n_routed_experts '
  'num_experts_per_tok n_shared_experts n_group topk_group norm_topk_prob '
  'routed_scaling_factor rms_norm_eps attention_bias tie_word_embeddings'
).split()


def flat_config(config: Mapping) -> dict:
  """Maps a Hugging Face config, old or new spelling, to the reference's."""
  softmax = config['model_type'] == 'deepseek_v2'
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  return {name: config[name] for name in _SAME_NAME} | {
    'first_k_dense_replace': config.get('first_k_dense_replace', 1),
    'moe_layer_freq': config.get('moe_layer_freq', 1),
    'mlp_layer_types': config.get('mlp_layer_types'),
    'topk_method': config.get(
      'topk_method', 'greedy' if softmax else 'noaux_tc'
    ),
    'scoring_func': config.get(
      'scoring_func', 'softmax' if softmax else 'sigmoid'
    ),
    'latent_norm_eps': 1e-6,
    'rope_theta': rope.get('rope_theta', config.get('rope_theta')),
    'rope_scaling': rope if kind == 'yarn' else None,
    'rope_interleave': config.get('rope_interleave', True),
  }


def _json(path: pathlib.Path) -> dict:
  return json.loads(path.read_text())


@functools.cache
def load_model(name: str) -> ReferenceModel:
  config = flat_config(_json(DATA / name / 'config.json'))
  return ReferenceModel(config, load_file(DATA / name / 'model.safetensors'))


@functools.cache
def load_drafter(name: str) -> ReferenceDrafter:
  folder = DATA / name / 'dflash'
  return ReferenceDrafter(
    _json(folder / 'config.json'),
    load_file(folder / 'model.safetensors'),
    load_model(name),
  )


def load_expected(name: str) -> dict[str, np.ndarray]:
  return load_file(DATA / name / 'expected.safetensors')


def load_trace(name: str) -> dict:
  return _json(DATA / name / 'ddtree_trace.json')


def load_first_draft_logits(name: str) -> np.ndarray:
  path = DATA / name / 'ddtree_first_draft_logits.safetensors'
  return load_file(path)['draft_logits']


def tiny_config(**changes) -> dict:
  """A flat config that needs no file; `changes` override its fields."""
  return {
    'vocab_size': 64,
    'hidden_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'q_lora_rank': 24,
    'kv_lora_rank': 16,
    'qk_nope_head_dim': 12,
    'qk_rope_head_dim': 8,
    'v_head_dim': 10,
    'intermediate_size': 64,
    'moe_intermediate_size': 24,
    'n_routed_experts': 8,
    'num_experts_per_tok': 2,
    'n_shared_experts': 1,
    'first_k_dense_replace': 1,
    'moe_layer_freq': 1,
    'mlp_layer_types': None,
    'n_group': 1,
    'topk_group': 1,
    'topk_method': 'noaux_tc',
    'scoring_func': 'sigmoid',
    'norm_topk_prob': True,
    'routed_scaling_factor': 2.5,
    'rms_norm_eps': 1e-6,
    'latent_norm_eps': 1e-6,
    'rope_theta': 10000.0,
    'rope_scaling': None,
    'rope_interleave': True,
    'attention_bias': False,
    'tie_word_embeddings': False,
  } | changes
