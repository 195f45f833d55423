"""The losslessness matrix and a pairwise selection of it."""

import itertools
from typing import NamedTuple

from kdtree_jax import registry
from kdtree_jax.named_configs import config_names
from tests import support


class Case(NamedTuple):
  variant: str
  drafter: str
  policy: str
  budget: int
  batch: int


# The vocabularies of reduced variants have at most 61 tokens.
AXES = (
  config_names(),
  registry.names('drafter'),
  registry.names('tree_policy'),
  (0, 1, 7, 64, 97),
  (1, 3),
)


def combinations() -> list[Case]:
  """Every combination of all axes."""
  return [Case(*values) for values in itertools.product(*AXES)]


def whole() -> list[Case]:
  """Every variant, drafter, policy and budget; three prompts at once.

  The rows of a batch are of different lengths: each is a run of its own.
  """
  return [case for case in combinations() if case.batch == 3]


def pairwise() -> list[Case]:
  """Combinations in which every two values of two axes meet somewhere.

  But for stub drafters, which do not look at the target: of drafters and
  variants, the oracle and dflash alone meet each of the others.

  Greedy: each pick is the combination with the most pairs not met so far,
  the first of those that are equal. By variant, so that one process meets
  all cases of a target. Real models, reduced, are near copies of the variants:
  `each_once` and `whole` have them.
  """
  remaining = [c for c in combinations() if c.variant in support.SMALL]
  axes = list(itertools.combinations(range(len(AXES)), 2))

  def pairs(case):
    met = {(i, j, case[i], case[j]) for i, j in axes}
    if case.drafter not in ('oracle', 'dflash'):
      met.discard((0, 1, case.variant, case.drafter))
    return met

  missing = set().union(*(pairs(case) for case in remaining))
  chosen = []
  while missing:
    best = max(remaining, key=lambda case: len(pairs(case) & missing))
    missing -= pairs(best)
    remaining.remove(best)
    chosen.append(best)
  return sorted(chosen)


def each_once() -> list[Case]:
  """One case for every variant, drafter and policy, the rest being usual."""
  usual = Case('tiny', 'random', 'best_first', 7, 3)
  named = zip(Case._fields[:3], AXES[:3], strict=True)
  return [
    usual._replace(**{field: value})
    for field, values in named
    for value in values
    if value != getattr(usual, field)
  ]
