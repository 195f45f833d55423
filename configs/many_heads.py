"""48 heads and no experts: every layer is dense."""

from kdtree_jax.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=256,
  hidden_size=96,
  num_hidden_layers=2,
  num_attention_heads=48,
  q_lora_rank=40,
  kv_lora_rank=24,
  qk_nope_head_dim=10,
  qk_rope_head_dim=6,
  v_head_dim=4,
  intermediate_size=144,
  max_position_embeddings=1024,
  rope_theta=50000.0,
)
