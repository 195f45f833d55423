"""DeepSeek-V2-Lite at full size: softmax routing, no groups."""

from kdtree_jax.config import ModelConfig, RopeScaling

CONFIG = ModelConfig(
  vocab_size=102400,
  hidden_size=2048,
  num_hidden_layers=27,
  num_attention_heads=16,
  q_lora_rank=None,
  kv_lora_rank=512,
  qk_nope_head_dim=128,
  qk_rope_head_dim=64,
  v_head_dim=128,
  intermediate_size=10944,
  moe_intermediate_size=1408,
  n_routed_experts=64,
  num_experts_per_tok=6,
  n_shared_experts=2,
  first_k_dense_replace=1,
  topk_method='greedy',
  scoring_func='softmax',
  norm_topk_prob=False,
  rope_scaling=RopeScaling(
    factor=40.0,
    original_max_position_embeddings=4096,
    mscale=0.707,
    mscale_all_dim=0.707,
  ),
  max_position_embeddings=163840,
  eos_token_id=(100001,),
)
