"""The demo's target: small enough to ship, with every main feature."""

from kdtree_jax.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=512,
  hidden_size=256,
  num_hidden_layers=4,
  num_attention_heads=4,
  q_lora_rank=96,
  kv_lora_rank=64,
  qk_nope_head_dim=32,
  qk_rope_head_dim=16,
  v_head_dim=32,
  intermediate_size=512,
  moe_intermediate_size=96,
  n_routed_experts=8,
  num_experts_per_tok=2,
  n_shared_experts=1,
  first_k_dense_replace=1,
  routed_scaling_factor=2.5,
  max_position_embeddings=2048,
)
