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
  budget: int | str
  batch: int


# The vocabularies of reduced variants have at most 61 tokens. Budgets that are
# usual come first: `pairwise` takes the first of cases that are equal to it.
AXES = (
  config_names(),
  registry.names('drafter'),
  registry.names('tree_policy'),
  (7, 97, 64, 1, 0, 'auto'),
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

  But every policy meets every budget, while a variant and a drafter meet one
  budget whose nodes have a word of bits for their ancestors, and one with
  several; a tree of the root alone is AR's own step, where neither differs.
  And stub drafters do not look at the target: of drafters and variants, the
  oracle and dflash alone meet each of the others.

  Greedy: each pick is the combination with the most pairs not met so far,
  the first of those that are equal. By variant, so that one process meets
  all cases of a target. Real models, reduced, are near copies of the variants:
  `each_once` and `whole` have them.
  """
  remaining = [c for c in combinations() if c.variant in support.SMALL]
  axes = list(itertools.combinations(range(len(AXES)), 2))

  def pairs(case):
    words = case.budget
    if words not in (0, 'auto'):
      words = min(-(-(1 + case.budget) // 32), 2)
    alike = case._replace(budget=words)
    met = {(i, j, alike[i], alike[j]) for i, j in axes}
    met.add(('exactly', case.policy, case.budget))
    if not case.budget:
      met -= {(i, 3, case[i], words) for i in (0, 1)}
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
  return sorted(chosen, key=lambda case: tuple(map(str, case)))


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
