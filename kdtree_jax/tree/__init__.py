"""Draft trees: the pytree, the policies that build it, the accepted walk."""

from kdtree_jax.tree.accept import Acceptance, accept
from kdtree_jax.tree.draft_tree import (
  NO_PARENT,
  ROOT_INDEX,
  DraftTree,
  check_invariants,
  format_tree,
  prefix,
  root_only,
)
from kdtree_jax.tree.policies import TreePolicy, keep_top1_chain

__all__ = (
  'NO_PARENT',
  'ROOT_INDEX',
  'Acceptance',
  'DraftTree',
  'TreePolicy',
  'accept',
  'check_invariants',
  'format_tree',
  'prefix',
  'root_only',
  'keep_top1_chain',
)
