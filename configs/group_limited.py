"""A small DeepSeek-V2: expert groups scored by their best expert."""

from kdtree_jax.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=149,
  hidden_size=80,
  num_hidden_layers=2,
  num_attention_heads=8,
  q_lora_rank=36,
  kv_lora_rank=28,
  qk_nope_head_dim=8,
  qk_rope_head_dim=4,
  v_head_dim=8,
  intermediate_size=100,
  moe_intermediate_size=18,
  n_routed_experts=20,
  num_experts_per_tok=5,
  n_shared_experts=2,
  first_k_dense_replace=1,
  n_group=5,
  topk_group=3,
  topk_method='group_limited_greedy',
  scoring_func='softmax',
  norm_topk_prob=False,
  routed_scaling_factor=16.0,
  max_position_embeddings=512,
)
