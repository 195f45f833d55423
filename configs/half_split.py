"""A small GLM-4.7-Flash with half-split RoPE: wide values, layer types."""

from kdtree_jax.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=211,
  hidden_size=112,
  num_hidden_layers=5,
  num_attention_heads=5,
  q_lora_rank=44,
  kv_lora_rank=36,
  qk_nope_head_dim=18,
  qk_rope_head_dim=10,
  v_head_dim=24,
  intermediate_size=120,
  moe_intermediate_size=32,
  n_routed_experts=6,
  num_experts_per_tok=2,
  n_shared_experts=1,
  mlp_layer_types=('dense', 'sparse', 'dense', 'sparse', 'sparse'),
  routed_scaling_factor=1.8,
  rms_norm_eps=1e-5,
  latent_norm_eps=1e-5,
  rope_theta=1e6,
  rope_interleave=False,
  max_position_embeddings=768,
)
