"""Tied embeddings, attention biases, every second layer sparse."""

from kdtree_jax.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=1021,
  hidden_size=60,
  num_hidden_layers=6,
  num_attention_heads=2,
  q_lora_rank=30,
  kv_lora_rank=40,
  qk_nope_head_dim=22,
  qk_rope_head_dim=14,
  v_head_dim=26,
  intermediate_size=64,
  moe_intermediate_size=36,
  n_routed_experts=7,
  num_experts_per_tok=3,
  n_shared_experts=3,
  moe_layer_freq=2,
  rms_norm_eps=1e-5,
  attention_bias=True,
  tie_word_embeddings=True,
  max_position_embeddings=640,
)
