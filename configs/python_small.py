"""The trained target that ships: Python source code, seven million parameters.

It is deep and thin, which suits small models. Embeddings are tied, because a
vocabulary of 4096 would otherwise take a quarter of the parameters.
"""

from kdtree_jax.config import ModelConfig
from kdtree_jax.training.recipe import DrafterRecipe, TrainRecipe

CONFIG = ModelConfig(
  vocab_size=4096,
  hidden_size=256,
  num_hidden_layers=8,
  num_attention_heads=8,
  q_lora_rank=None,
  kv_lora_rank=64,
  qk_nope_head_dim=32,
  qk_rope_head_dim=16,
  v_head_dim=32,
  intermediate_size=512,
  moe_intermediate_size=48,
  n_routed_experts=16,
  num_experts_per_tok=4,
  n_shared_experts=1,
  first_k_dense_replace=1,
  tie_word_embeddings=True,
  max_position_embeddings=4096,
  # End of text in the tokenizers that --mode=make_corpus trains.
  eos_token_id=(0,),
)

RECIPE = TrainRecipe(
  steps=9000,
  batch_size=32,
  sequence_length=1024,
  learning_rate=3e-3,
  final_learning_rate=3e-5,
  warmup_steps=300,
  checkpoint_every=2000,
)

# A third of the target's parameters. The taps span its whole depth: in so small
# a model no layer is far from the output. Sequences are as long as the
# target's: beyond the positions that it was trained on, a drafter's acceptance
# length falls by half.
DRAFTER_RECIPE = DrafterRecipe(
  steps=8000,
  batch_size=32,
  sequence_length=1024,
  learning_rate=2e-3,
  final_learning_rate=2e-5,
  warmup_steps=200,
  validate_every=1000,
  validation_sequences=64,
  num_hidden_layers=4,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=32,
  intermediate_size=464,
  block_size=16,
  target_layer_ids=(1, 3, 5, 7),
  anchors=128,
  # A slot is weighted by how probable it is that the drafter's tokens are
  # accepted up to it, instead of by its depth.
  gamma=100.0,
  prefix_power=0.5,
  hard_weight=1.0,
  rollouts=49152,
  rollout_share=0.5,
  rollout_tokens=192,
  prompt_tokens=(128, 448),
  temperatures=(0.0, 0.8),
)
