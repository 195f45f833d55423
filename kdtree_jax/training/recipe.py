"""How a model is trained, as one frozen value in `configs/`."""

import dataclasses
import math
from collections.abc import Callable

from kdtree_jax.decode.sampling import SamplingConfig
from kdtree_jax.errors import UserError
from kdtree_jax.schema import check_types

# The range of a value: a test, and the message if it fails.
Range = tuple[Callable[[float], bool], str]
_COUNT: Range = (lambda x: x >= 1, 'is below 1')
_NOT_NEGATIVE: Range = (lambda x: 0 <= x < math.inf, 'is below 0 or not finite')
_POSITIVE: Range = (lambda x: 0 < x < math.inf, 'is not positive and finite')
_DECAY: Range = (lambda x: 0 <= x < 1, 'is not in 0..1, without 1')
_RANGES: dict[str, Range] = {
  **dict.fromkeys(
    'steps batch_size sequence_length log_every validate_every '
    'validation_sequences checkpoint_every'.split(),
    _COUNT,
  ),
  **dict.fromkeys(('learning_rate', 'clip_norm'), _POSITIVE),
  **dict.fromkeys(
    'final_learning_rate weight_decay router_bias_step seed'.split(),
    _NOT_NEGATIVE,
  ),
  **dict.fromkeys(('beta1', 'beta2'), _DECAY),
}
_DRAFTER_RANGES: dict[str, Range] = {
  **dict.fromkeys(
    'num_hidden_layers num_attention_heads num_key_value_heads head_dim '
    'intermediate_size block_size anchors rollout_tokens'.split(),
    _COUNT,
  ),
  'rollouts': (lambda x: 0 <= x <= 1 << 30, 'is not in 0..1073741824'),
  'validation_rollouts': (lambda x: 1 <= x <= 1 << 20, 'is not in 1..1048576'),
  'gamma': _POSITIVE,
  'prefix_power': _NOT_NEGATIVE,
  'hard_weight': (lambda x: 0 <= x <= 1, 'is not in 0..1'),
  'rollout_share': (lambda x: 0 <= x <= 0.99, 'is not in 0..0.99'),
}


def _check_ranges(recipe: 'TrainRecipe', ranges: dict[str, Range]) -> None:
  for name, (is_valid, problem) in ranges.items():
    value = getattr(recipe, name)
    if not is_valid(value):
      raise UserError(f'recipe: {name}={value} {problem}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRecipe:
  """Schedule, optimiser and data order of one run.

  AdamW on float32 parameters with gradients clipped by their global norm; the
  learning rate rises linearly and falls along a cosine.

  Attributes:
    steps: steps of the optimiser in the whole schedule.
    batch_size: sequences a step.
    sequence_length: tokens a sequence; one more is read, as the last label.
    learning_rate: learning rate at the end of the warm-up.
    final_learning_rate: learning rate at the last step.
    warmup_steps: steps in which the learning rate rises.
    weight_decay: weight decay of matrices; vectors have none.
    beta1: Adam's decay rate of first moments.
    beta2: Adam's decay rate of second moments.
    clip_norm: the largest global norm of a gradient.
    router_bias_step: u of the balancing without auxiliary loss (DeepSeek-V3,
      arXiv 2412.19437, sec. 2.1.2).
    compute_dtype: dtype of a forward; parameters and optimiser are float32.
    seed: seed of parameters and data order.
    log_every: steps between two records of metrics.
    validate_every: steps between two validations.
    validation_sequences: number of sequences of a validation, always the first
      ones of the split.
    checkpoint_every: steps between two checkpoints.
  """

  steps: int
  batch_size: int
  sequence_length: int
  learning_rate: float
  final_learning_rate: float
  warmup_steps: int
  weight_decay: float = 0.1
  beta1: float = 0.9
  beta2: float = 0.95
  clip_norm: float = 1.0
  router_bias_step: float = 1e-3
  compute_dtype: str = 'bfloat16'
  seed: int = 0
  log_every: int = 20
  validate_every: int = 500
  validation_sequences: int = 256
  checkpoint_every: int = 1000

  def __post_init__(self):
    check_types(self)
    _check_ranges(self, _RANGES)
    if self.final_learning_rate > self.learning_rate:
      raise UserError(
        f'recipe: final_learning_rate={self.final_learning_rate} exceeds '
        f'learning_rate={self.learning_rate}'
      )
    if not 0 <= self.warmup_steps <= self.steps:
      raise UserError(
        f'recipe: warmup_steps={self.warmup_steps} is not in '
        f'0..steps={self.steps}'
      )
    if self.compute_dtype not in ('float32', 'bfloat16'):
      raise UserError(
        f'recipe: compute_dtype={self.compute_dtype!r} is neither float32 nor '
        'bfloat16'
      )

  @property
  def tokens_per_step(self) -> int:
    return self.batch_size * self.sequence_length

  def with_steps(self, steps: int | None) -> 'TrainRecipe':
    """The same recipe with another number of steps.

    The warm-up is at most a tenth, rounded up, and ends before the last step.
    """
    if steps is None:
      return self
    if steps < 1:
      raise UserError(f'--train_steps={steps} is below 1')
    warmup = min(self.warmup_steps, -(-steps // 10), steps - 1)
    return dataclasses.replace(self, steps=steps, warmup_steps=warmup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRecipe(TrainRecipe):
  """A drafter's shape and how it is trained; widths are the target's.

  Attributes:
    num_hidden_layers: layers of the drafter.
    num_attention_heads: its heads of queries.
    num_key_value_heads: its heads of keys and values.
    head_dim: width of a head.
    intermediate_size: width of its MLP.
    block_size: 1 + positions drafted.
    target_layer_ids: taps; None: one for each layer of the drafter, by z-lab's
      rule.
    anchors: blocks of a sequence, at most its length.
    gamma: gamma of the weights exp(-(k - 1) / gamma) of the depths k.
    prefix_power: how much a slot's weight depends on the drafter's probability
      of the tokens before it; 0: not at all; see `drafting.draft_loss`.
    hard_weight: weight of the target's most probable token in what a slot is
      trained on; see `drafting.draft_loss`.
    rollouts: prompts from the corpus that the target continues before the
      training starts, so that drafts are trained on its own text; 0 for none.
    rollout_share: share of rollouts in the training tokens; they are repeated
      or cut to reach it.
    rollout_tokens: new tokens of each rollout.
    prompt_tokens: lengths of the prompts, each for an equal share of them; the
      validation uses the first.
    temperatures: temperatures of the rollouts in turn.
    validation_rollouts: number of greedy rollouts of the last validation.
  """

  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  intermediate_size: int
  block_size: int
  target_layer_ids: tuple[int, ...] | None = None
  anchors: int = 64
  gamma: float = 4.0
  prefix_power: float = 0.0
  hard_weight: float = 0.5
  rollouts: int = 0
  rollout_share: float = 0.5
  rollout_tokens: int = 192
  prompt_tokens: tuple[int, ...] = (64,)
  temperatures: tuple[float, ...] = (0.0, 1.0)
  validation_rollouts: int = 128

  def __post_init__(self):
    super().__post_init__()
    _check_ranges(self, _DRAFTER_RANGES)
    for name, least, most in (
      ('anchors', 1, self.sequence_length),
      ('block_size', 2, self.sequence_length),
      ('rollout_tokens', 1, self.sequence_length - 1),
    ):
      if not least <= getattr(self, name) <= most:
        raise UserError(
          f'recipe: {name}={getattr(self, name)} is not in {least}..{most}'
        )
    if self.num_attention_heads % self.num_key_value_heads:
      raise UserError(
        f'recipe: num_key_value_heads={self.num_key_value_heads} does not '
        f'divide num_attention_heads={self.num_attention_heads}'
      )
    if self.head_dim % 2:
      raise UserError(f'recipe: head_dim={self.head_dim} is odd')
    self._check_taps()
    self._check_rollouts()

  def _check_taps(self) -> None:
    if self.target_layer_ids is None:
      return
    if not self.target_layer_ids:
      raise UserError('recipe: target_layer_ids is empty')
    if min(self.target_layer_ids) < 0:
      raise UserError(
        f'recipe: target_layer_ids={self.target_layer_ids} holds a layer below '
        '0'
      )

  def _check_rollouts(self) -> None:
    if not self.prompt_tokens:
      raise UserError('recipe: prompt_tokens is empty')
    most = self.sequence_length - self.rollout_tokens
    for tokens in self.prompt_tokens:
      if not 1 <= tokens <= most:
        raise UserError(
          f'recipe: prompt_tokens={tokens} and rollout_tokens='
          f'{self.rollout_tokens} do not fit sequence_length='
          f'{self.sequence_length}'
        )
    if self.rollouts and not self.temperatures:
      raise UserError('recipe: temperatures is empty')
    for temperature in self.temperatures:
      try:
        SamplingConfig(temperature=temperature)
      except UserError as e:
        raise UserError(f'recipe: temperatures: {e}') from e
