"""One layer, one head, no q_lora, no dense layer, no shared expert."""

from kdtree_jax.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=97,
  hidden_size=48,
  num_hidden_layers=1,
  num_attention_heads=1,
  q_lora_rank=None,
  kv_lora_rank=20,
  qk_nope_head_dim=12,
  qk_rope_head_dim=8,
  v_head_dim=20,
  intermediate_size=72,
  moe_intermediate_size=28,
  n_routed_experts=5,
  num_experts_per_tok=1,
  max_position_embeddings=512,
)
