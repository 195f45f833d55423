"""The options of generation.

Does not import JAX, since flags take their defaults from here.
"""

import dataclasses
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, TypedDict

from kdtree_jax import registry
from kdtree_jax.checks import integer
from kdtree_jax.config import MAX_TREE_BUDGET
from kdtree_jax.errors import UserError, show
from kdtree_jax.schema import MAX_INT, check_types

if TYPE_CHECKING:
  from kdtree_jax.decode import SamplingConfig

PREFILL_CHUNK = 64
# The tree budget that each round chooses by cost.
AUTO = 'auto'


class GenerateKeywords(TypedDict, total=False):
  """The fields of `GenerateOptions`, as keywords of public functions."""

  max_new_tokens: int
  tree_budget: int | str
  costs: str | None
  calibration: str | None
  tree_policy: str
  keep_top1_chain: bool
  stop_ids: tuple[int, ...] | None
  capacity: int | None
  prefill_chunk: int
  kernels: str
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
  """How to generate.

  Attributes:
    max_new_tokens: tokens of the output, unless a stop token or the capacity
      ends it earlier; at least 1.
    tree_budget: draft nodes per round, without the root; `auto` chooses them
      each round by what they cost.
    costs: for `auto`: a table of what steps cost, by file or by the name of one
      that ships (then prices are of that table's model and device); `bytes`
      computes one from the bytes that steps move. None: the table that was
      measured here before, or a short measurement now.
    calibration: for `auto`: a file of `--mode=bench_acceptance` with a
      correction of the drafter's probabilities to start from.
    tree_policy: `best_first` (DDTree) or `chain` (DFlash); see the registry.
    keep_top1_chain: keep the most probable chain in the tree, whatever its
      score.
    stop_ids: tokens that end the output; None: the checkpoint's.
    capacity: most tokens of prompt and output; None: the next power of two
      that holds both. Prompts of one capacity share a program.
    prefill_chunk: prompt tokens per prefill step.
    kernels: `auto` or one implementation for all.
    temperature: 0 is greedy; `SamplingConfig` explains this and the next four.
    top_k: likewise.
    top_p: likewise.
    min_p: likewise.
    seed: seed of the first prompt; prompt i of a batch has seed + i.
  """

  max_new_tokens: int = 128
  tree_budget: int | str = AUTO
  costs: str | None = None
  calibration: str | None = None
  tree_policy: str = 'best_first'
  keep_top1_chain: bool = False
  stop_ids: tuple[int, ...] | None = None
  capacity: int | None = None
  prefill_chunk: int = PREFILL_CHUNK
  kernels: str = 'auto'
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def __post_init__(self):
    if isinstance(self.stop_ids, Set):
      object.__setattr__(self, 'stop_ids', tuple(self.stop_ids))
    check_types(self)
    counts = (
      ('max_new_tokens', 1, MAX_INT),
      ('capacity', 1, MAX_INT),
      ('prefill_chunk', 1, MAX_INT),
    )
    for name, least, most in counts:
      value = getattr(self, name)
      if value is not None:
        integer(value, name, least, most)
    if isinstance(self.tree_budget, int):
      integer(self.tree_budget, 'tree_budget', 0, MAX_TREE_BUDGET)
    elif self.tree_budget != AUTO:
      raise UserError(
        f'tree_budget={show(self.tree_budget)} is neither a number nor {AUTO}'
      )
    self.sampling([self.seed])
    # After sampling(), whose import registers the policies.
    registry.get('tree_policy', self.tree_policy)

  def sampling(self, seeds: Sequence[int]) -> list['SamplingConfig']:
    """The sampling of each row, one per seed."""
    from kdtree_jax.decode import SamplingConfig  # It imports JAX.

    return [
      SamplingConfig(
        temperature=self.temperature,
        top_k=self.top_k,
        top_p=self.top_p,
        min_p=self.min_p,
        seed=seed,
      )
      for seed in seeds
    ]

  def further(self, block_size: int) -> int:
    """Number of new tokens up to the last one that a round drafts."""
    return min(self.max_new_tokens + block_size, MAX_INT)
