"""The language model of Kimi-K2.5 and K2.6 at full size."""

from kdtree_jax.config import ModelConfig, RopeScaling

CONFIG = ModelConfig(
  vocab_size=163840,
  hidden_size=7168,
  num_hidden_layers=61,
  num_attention_heads=64,
  q_lora_rank=1536,
  kv_lora_rank=512,
  qk_nope_head_dim=128,
  qk_rope_head_dim=64,
  v_head_dim=128,
  intermediate_size=18432,
  moe_intermediate_size=2048,
  n_routed_experts=384,
  num_experts_per_tok=8,
  n_shared_experts=1,
  first_k_dense_replace=1,
  routed_scaling_factor=2.827,
  rms_norm_eps=1e-5,
  rope_theta=50000.0,
  rope_scaling=RopeScaling(
    factor=64.0,
    original_max_position_embeddings=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
  ),
  max_position_embeddings=262144,
  eos_token_id=(163585, 163586),
)
