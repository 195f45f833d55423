"""Frozen, hashable, validated configurations, with Hugging Face field names."""

import dataclasses
import itertools
import math
from typing import Any

from kdtree_jax.errors import UserError
from kdtree_jax.schema import check_types, from_json

# More layers than any model has: a config must not make us count for hours.
MAX_LAYERS = 4096


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise UserError(message)


def _require_positive(config: object, names: str, prefix: str = '') -> None:
  for name in names.split():
    value = getattr(config, name)
    _require(value > 0, f'{prefix}{name} is {value}, not positive')


def _check_theta(config: 'ModelConfig | DrafterConfig') -> None:
  # YaRN divides by its logarithm.
  theta = config.rope_theta
  _require(theta > 1, f'rope_theta - 1 is {theta - 1}, not positive')


def _require_few_layers(config: 'ModelConfig | DrafterConfig') -> None:
  _require(
    config.num_hidden_layers <= MAX_LAYERS,
    f'num_hidden_layers is {config.num_hidden_layers}, above {MAX_LAYERS}',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """YaRN. `None` in the three optional fields means "not in the config"."""

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float | None = None
  mscale_all_dim: float | None = None
  attention_factor: float | None = None

  def __post_init__(self):
    check_types(self)
    _require(self.factor >= 1, f'rope_scaling.factor={self.factor} is below 1')
    _require_positive(
      self,
      'beta_fast beta_slow original_max_position_embeddings',
      'rope_scaling.',
    )
    # An mscale of 0 means none; an amplitude of 0 would erase the positions.
    for name in ('mscale', 'mscale_all_dim'):
      value = getattr(self, name)
      _require(
        value is None or value >= 0, f'rope_scaling.{name} is {value}, below 0'
      )
    if self.attention_factor is not None:
      _require_positive(self, 'attention_factor', 'rope_scaling.')


def yarn_mscale(factor: float, mscale: float) -> float:
  """YaRN's magnitude correction `0.1 * mscale * ln(factor) + 1`."""
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A DeepSeek-V2/V3 type target: MLA attention, dense or MoE layers.

  Field names and meanings are those of Hugging Face configs. Three differ:
  `latent_norm_eps` is the eps of `q_a_layernorm` and `kv_a_layernorm`, which
  transformers fixes at 1e-6 whatever `rms_norm_eps` says; `rope_scaling` is
  YaRN or None; `eos_token_id` is always a tuple. `n_routed_experts=0` makes
  every layer dense. `mlp_layer_types`, where given, wins over
  `first_k_dense_replace` and `moe_layer_freq`.
  """

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  q_lora_rank: int | None
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  intermediate_size: int
  moe_intermediate_size: int = 0
  n_routed_experts: int = 0
  num_experts_per_tok: int = 0
  n_shared_experts: int = 0
  first_k_dense_replace: int = 0
  moe_layer_freq: int = 1
  mlp_layer_types: tuple[str, ...] | None = None
  n_group: int = 1
  topk_group: int = 1
  topk_method: str = 'noaux_tc'
  scoring_func: str = 'sigmoid'
  norm_topk_prob: bool = True
  routed_scaling_factor: float = 1.0
  rms_norm_eps: float = 1e-6
  latent_norm_eps: float = 1e-6
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  rope_interleave: bool = True
  attention_bias: bool = False
  tie_word_embeddings: bool = False
  max_position_embeddings: int = 4096
  eos_token_id: tuple[int, ...] = ()

  def __post_init__(self):
    check_types(self)
    _require_positive(
      self,
      'vocab_size hidden_size num_hidden_layers num_attention_heads '
      'kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim '
      'intermediate_size max_position_embeddings moe_layer_freq '
      'rms_norm_eps latent_norm_eps',
    )
    _require_few_layers(self)
    _require(
      self.q_lora_rank is None or self.q_lora_rank > 0,
      'q_lora_rank must be positive or null',
    )
    _require(
      self.qk_rope_head_dim % 2 == 0,
      f'qk_rope_head_dim={self.qk_rope_head_dim} must be even',
    )
    _check_theta(self)
    for token in self.eos_token_id:
      _require(
        0 <= token < self.vocab_size,
        f'eos_token_id {token} is outside the vocabulary of {self.vocab_size}',
      )
    if self.mlp_layer_types is not None:
      _require(
        len(self.mlp_layer_types) == self.num_hidden_layers,
        f'mlp_layer_types has {len(self.mlp_layer_types)} entries for '
        f'{self.num_hidden_layers} layers',
      )
      _require(
        set(self.mlp_layer_types) <= {'dense', 'sparse'},
        "mlp_layer_types may hold 'dense' and 'sparse' only",
      )
    if any(self.is_moe_layer(i) for i in range(self.num_hidden_layers)):
      self._check_experts()

  def _check_experts(self) -> None:
    experts, groups = self.n_routed_experts, self.n_group
    _require_positive(self, 'moe_intermediate_size')
    _require(self.n_shared_experts >= 0, 'n_shared_experts is negative')
    _require(
      self.scoring_func in ('sigmoid', 'softmax'),
      f'scoring_func={self.scoring_func!r} is neither sigmoid nor softmax',
    )
    methods = ('noaux_tc', 'greedy', 'group_limited_greedy')
    _require(
      self.topk_method in methods,
      f'topk_method={self.topk_method!r} is none of {", ".join(methods)}',
    )
    _require(
      groups >= 1 and experts % groups == 0,
      f'n_group={groups} does not divide n_routed_experts={experts}',
    )
    _require(
      1 <= self.topk_group <= groups,
      f'topk_group={self.topk_group} is not in 1..n_group={groups}',
    )
    reachable = experts
    if self.topk_method != 'greedy':
      reachable = experts // groups * self.topk_group
    _require(
      1 <= self.num_experts_per_tok <= reachable,
      f'num_experts_per_tok={self.num_experts_per_tok} is not in '
      f'1..{reachable}, the experts that the router can reach',
    )
    _require(
      self.topk_method != 'noaux_tc' or groups == 1 or experts // groups >= 2,
      'noaux_tc scores a group by its two best experts; groups have one',
    )

  @property
  def qk_head_dim(self) -> int:
    return self.qk_nope_head_dim + self.qk_rope_head_dim

  @property
  def latent_dim(self) -> int:
    """Values cached per token and layer: the latent and the shared k_rope."""
    return self.kv_lora_rank + self.qk_rope_head_dim

  @property
  def softmax_scale(self) -> float:
    """`qk_head_dim ** -0.5`, times YaRN's mscale squared if it is set."""
    scale = self.qk_head_dim**-0.5
    yarn = self.rope_scaling
    if yarn is not None and yarn.mscale_all_dim:
      scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale

  def is_moe_layer(self, layer: int) -> bool:
    if self.n_routed_experts == 0:
      return False
    if self.mlp_layer_types is not None:
      return self.mlp_layer_types[layer] == 'sparse'
    return (
      layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
    )

  def reduced(self) -> 'ModelConfig':
    """The same switches at sizes that a CPU test can afford.

    Every feature that is on stays on: q_lora, groups, shared experts, YaRN,
    dense and sparse layers, and which of two head dims is the larger.
    """
    layers = min(self.num_hidden_layers, 2)
    types = tuple(
      'sparse' if self.is_moe_layer(i) else 'dense'
      for i in range(self.num_hidden_layers)
    )
    # The first dense layers and the first sparse ones, in the model's order.
    first_sparse = types.index('sparse') if 'sparse' in types else 0
    start = max(0, min(first_sparse - 1, self.num_hidden_layers - layers))
    groups = min(self.n_group, 4)
    experts = groups * min(self.n_routed_experts // self.n_group, 4)
    order = sorted({self.qk_nope_head_dim, self.v_head_dim})
    head_dims = {dim: 8 + 4 * order.index(dim) for dim in order}
    return dataclasses.replace(
      self,
      vocab_size=min(self.vocab_size, 61),
      hidden_size=min(self.hidden_size, 32),
      num_hidden_layers=layers,
      num_attention_heads=min(self.num_attention_heads, 3),
      q_lora_rank=self.q_lora_rank and min(self.q_lora_rank, 12),
      kv_lora_rank=min(self.kv_lora_rank, 12),
      qk_nope_head_dim=head_dims[self.qk_nope_head_dim],
      qk_rope_head_dim=min(self.qk_rope_head_dim, 8),
      v_head_dim=head_dims[self.v_head_dim],
      intermediate_size=min(self.intermediate_size, 40),
      moe_intermediate_size=min(self.moe_intermediate_size, 20),
      n_routed_experts=experts,
      num_experts_per_tok=min(self.num_experts_per_tok, 2),
      n_shared_experts=min(self.n_shared_experts, 2),
      mlp_layer_types=types[start : start + layers],
      n_group=groups,
      topk_group=min(self.topk_group, groups),
      max_position_embeddings=min(self.max_position_embeddings, 512),
      eos_token_id=(),
    )

  def to_dict(self) -> dict[str, Any]:
    """JSON-ready fields; `from_dict` is the inverse."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, fields: dict[str, Any]) -> 'ModelConfig':
    """Rebuilds a config from `to_dict`.

    Raises:
      UserError: an unknown, missing or ill-typed field, by name.
    """
    return from_json(cls, fields)


SLIDING = 'sliding_attention'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
  """A DFlash drafter: Qwen3-type layers over a block of masks.

  `target_layer_ids` are 0-based decoder layers whose raw output is tapped.
  `layer_types` and `sliding_window` are those of Hugging Face; a query sees a
  key that is less than a window behind it, or behind the root if
  `window_from_root`. `causal` says whether a slot of the block sees the later
  ones; None: it does except in sliding layers. `draft_vocab_size` is the size
  of a head of its own, with a table `d2t` from its ids to the target's; None
  is the target's head. Likewise `own_embedding`.
  """

  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  intermediate_size: int
  vocab_size: int
  block_size: int
  mask_token_id: int
  target_layer_ids: tuple[int, ...]
  num_target_layers: int
  rms_norm_eps: float = 1e-6
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  attention_bias: bool = False
  max_position_embeddings: int = 4096
  layer_types: tuple[str, ...] | None = None
  sliding_window: int | None = None
  window_from_root: bool = False
  causal: bool | None = None
  draft_vocab_size: int | None = None
  own_embedding: bool = False

  def __post_init__(self):
    check_types(self)
    _require_positive(
      self,
      'hidden_size num_hidden_layers num_attention_heads num_key_value_heads '
      'head_dim intermediate_size vocab_size block_size '
      'max_position_embeddings rms_norm_eps',
    )
    _require_few_layers(self)
    _check_theta(self)
    _require(
      self.num_attention_heads % self.num_key_value_heads == 0,
      f'num_key_value_heads={self.num_key_value_heads} does not divide '
      f'num_attention_heads={self.num_attention_heads}',
    )
    _require(self.head_dim % 2 == 0, f'head_dim={self.head_dim} must be even')
    _require(len(self.target_layer_ids) > 0, 'target_layer_ids is empty')
    for layer in self.target_layer_ids:
      _require(
        0 <= layer < self.num_target_layers,
        f'target_layer_ids holds {layer}, but the target has '
        f'{self.num_target_layers} layers',
      )
    _require(
      0 <= self.mask_token_id < self.vocab_size,
      f'mask_token_id={self.mask_token_id} is outside the vocabulary of '
      f'{self.vocab_size}',
    )
    self._check_layer_types()
    if self.draft_vocab_size is not None:
      _require(
        1 <= self.draft_vocab_size <= self.vocab_size,
        f'draft_vocab_size={self.draft_vocab_size} is not in '
        f'1..{self.vocab_size}',
      )

  def _check_layer_types(self) -> None:
    types = self.layer_types or ()
    if self.layer_types is not None:
      _require(
        len(types) == self.num_hidden_layers,
        f'layer_types has {len(types)} entries for '
        f'{self.num_hidden_layers} layers',
      )
    known = {'full_attention', SLIDING}
    for kind in types:
      _require(
        kind in known,
        f'layer_types holds {kind!r}, none of {", ".join(sorted(known))}',
      )
    if SLIDING in types:
      _require(
        self.sliding_window is not None and self.sliding_window > 0,
        f'sliding_window={self.sliding_window} must be positive where '
        f'layer_types holds {SLIDING}',
      )

  def window(self, layer: int) -> int | None:
    """Positions that a query of this layer looks back, itself included."""
    sliding = (
      self.layer_types is not None and self.layer_types[layer] == SLIDING
    )
    return self.sliding_window if sliding else None

  def is_causal(self, layer: int) -> bool:
    """Whether a slot of the block is hidden from the earlier ones."""
    if self.causal is not None:
      return self.causal
    return self.window(layer) is not None

  def to_dict(self) -> dict[str, Any]:
    """JSON-ready fields; `from_dict` is the inverse."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, fields: dict[str, Any]) -> 'DrafterConfig':
    """Rebuilds a config from `to_dict`.

    Raises:
      UserError: an unknown, missing or ill-typed field, by name.
    """
    return from_json(cls, fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """The static shape of a decoding program.

  Attributes:
    tree_budget: most draft nodes verified a round, the root not counted.
    widths: empty for a round that always verifies `tree_budget` nodes. Else
      each round chooses its number of nodes by cost; there is a program for
      each of these numbers, ascending, the last one `tree_budget`.
    draft_depth: D, the positions drafted a round: block_size - 1.
    tree_policy: name in the registry of kind `tree_policy`.
    capacity: most tokens (prompt and output) that a row may hold.
    prefill_chunk: prompt tokens a prefill step takes.
    kernels: `auto`, or the implementation that every kernel must use.
    sample: draw tokens; False is the greedy program.
    keep_top1_chain: the most probable chain is always in the tree.
  """

  tree_budget: int
  draft_depth: int
  widths: tuple[int, ...] = ()
  tree_policy: str = 'best_first'
  capacity: int = 512
  prefill_chunk: int = 64
  kernels: str = 'auto'
  sample: bool = False
  keep_top1_chain: bool = False

  def __post_init__(self):
    check_types(self)
    _require(
      0 <= self.tree_budget <= MAX_TREE_BUDGET,
      f'tree_budget={self.tree_budget} is not in 0..{MAX_TREE_BUDGET}',
    )
    _require(
      0 <= self.draft_depth <= MAX_DRAFT_DEPTH,
      f'block_size={self.draft_depth + 1} is not in 1..{MAX_DRAFT_DEPTH + 1}',
    )
    ordered = all(a < b for a, b in itertools.pairwise((0, *self.widths)))
    _require(ordered, f'widths={self.widths} are not positive and ascending')
    _require(
      not self.widths or self.tree_budget in (0, self.widths[-1]),
      f'widths={self.widths} do not end in tree_budget={self.tree_budget}',
    )
    _require(self.capacity >= 1, f'capacity={self.capacity} is below 1')
    _require(
      1 <= self.prefill_chunk, f'prefill_chunk={self.prefill_chunk} is below 1'
    )

  @property
  def cache_rows(self) -> int:
    """S: the capacity and slack for one write of fixed width behind it.

    A multiple of 8 rows, which is what the attention kernel loads at a time.
    """
    rows = self.capacity + max(self.draft_depth + 1, self.prefill_chunk)
    return -(-rows // 8) * 8

  @property
  def implementation(self) -> str | None:
    """`kernels` in the words of `pallas_kernels`."""
    return None if self.kernels == 'auto' else self.kernels


# A verify of more rows fits no memory: ancestor bits alone are quadratic.
MAX_TREE_BUDGET = 1 << 14

# Path scores are sums in fixed point that fit 32 bits up to this depth.
MAX_DRAFT_DEPTH = 31
