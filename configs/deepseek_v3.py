"""DeepSeek-V3 and R1 at full size, without the multi-token-prediction layer."""

from kdtree_jax.config import ModelConfig, RopeScaling

CONFIG = ModelConfig(
  vocab_size=129280,
  hidden_size=7168,
  num_hidden_layers=61,
  num_attention_heads=128,
  q_lora_rank=1536,
  kv_lora_rank=512,
  qk_nope_head_dim=128,
  qk_rope_head_dim=64,
  v_head_dim=128,
  intermediate_size=18432,
  moe_intermediate_size=2048,
  n_routed_experts=256,
  num_experts_per_tok=8,
  n_shared_experts=1,
  first_k_dense_replace=3,
  n_group=8,
  topk_group=4,
  routed_scaling_factor=2.5,
  rope_scaling=RopeScaling(
    factor=40.0,
    original_max_position_embeddings=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
  ),
  max_position_embeddings=163840,
  eos_token_id=(1,),
)
