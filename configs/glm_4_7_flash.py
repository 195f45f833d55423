"""GLM-4.7-Flash at full size, without the multi-token-prediction layer."""

from kdtree_jax.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=154880,
  hidden_size=2048,
  num_hidden_layers=47,
  num_attention_heads=20,
  q_lora_rank=768,
  kv_lora_rank=512,
  qk_nope_head_dim=192,
  qk_rope_head_dim=64,
  v_head_dim=256,
  intermediate_size=10240,
  moe_intermediate_size=1536,
  n_routed_experts=64,
  num_experts_per_tok=4,
  n_shared_experts=1,
  first_k_dense_replace=1,
  routed_scaling_factor=1.8,
  rms_norm_eps=1e-5,
  rope_theta=1e6,
  max_position_embeddings=202752,
)
