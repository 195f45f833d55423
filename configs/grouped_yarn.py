"""A small DeepSeek-V3: grouped sigmoid routing, YaRN with mscale."""

from kdtree_jax.config import ModelConfig, RopeScaling

CONFIG = ModelConfig(
  vocab_size=130,
  hidden_size=64,
  num_hidden_layers=3,
  num_attention_heads=6,
  q_lora_rank=28,
  kv_lora_rank=16,
  qk_nope_head_dim=16,
  qk_rope_head_dim=12,
  v_head_dim=10,
  intermediate_size=88,
  moe_intermediate_size=24,
  n_routed_experts=16,
  num_experts_per_tok=4,
  n_shared_experts=1,
  first_k_dense_replace=1,
  n_group=4,
  topk_group=2,
  routed_scaling_factor=2.5,
  rope_scaling=RopeScaling(
    factor=40.0,
    original_max_position_embeddings=64,
    mscale=1.0,
    mscale_all_dim=1.0,
  ),
  max_position_embeddings=2560,
)
