"""A small DeepSeek-V2-Lite: softmax routing, unequal mscales."""

from kdtree_jax.config import ModelConfig, RopeScaling

CONFIG = ModelConfig(
  vocab_size=101,
  hidden_size=72,
  num_hidden_layers=3,
  num_attention_heads=3,
  q_lora_rank=None,
  kv_lora_rank=32,
  qk_nope_head_dim=12,
  qk_rope_head_dim=16,
  v_head_dim=14,
  intermediate_size=80,
  moe_intermediate_size=20,
  n_routed_experts=12,
  num_experts_per_tok=3,
  n_shared_experts=2,
  first_k_dense_replace=1,
  topk_method='greedy',
  scoring_func='softmax',
  norm_topk_prob=False,
  rope_scaling=RopeScaling(
    factor=8.0,
    original_max_position_embeddings=32,
    beta_fast=8.0,
    mscale=1.2,
    mscale_all_dim=0.707,
  ),
  max_position_embeddings=256,
)
