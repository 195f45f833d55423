"""Acceptance lengths of a drafter on given text, measured as decoding would.

The text plays the target: its tokens are those that the target chooses. On a
greedy continuation by the target that is what decoding does, round by round;
on other text it is what sampling does if the target is right about the text.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kdtree_jax import registry
from kdtree_jax.drafters.dflash import DFlashDrafter
from kdtree_jax.model import ForwardOutput, Transformer
from kdtree_jax.training.drafting import (
  draft_logits,
  every_anchor,
  has_target,
  target_head,
)
from kdtree_jax.training.packing import PackedBatch
from kdtree_jax.tree import accept


def acceptance_lengths(
  logits: jax.Array, following: jax.Array, budgets: tuple[int, ...]
) -> jax.Array:
  """What the chain and trees of several budgets accept at R roots.

  Args:
    logits: `[R, D, V]`, the drafter's behind each root.
    following: `[R, D]` int32, the tokens that do follow.
    budgets: of the trees.

  Returns:
    `[R, 1 + len(budgets)]` int32, 1..D + 1: of the chain, then of the trees.
  """
  rows, depth, _ = logits.shape
  right = jnp.argmax(logits, axis=-1) == following
  lengths = [1 + lax.cummin(right.astype(jnp.int32), axis=1).sum(axis=1)]
  # One more, which no node at the deepest level can have for a child.
  padded = jnp.pad(following, ((0, 0), (0, 1)))
  root = jnp.zeros((rows,), jnp.int32)
  nothing = jnp.full((1,), -1, jnp.int32)
  best_first = registry.get('tree_policy', 'best_first')
  for budget in budgets:
    tree = best_first(logits, root, budget, None)
    chosen = jnp.take_along_axis(padded, tree.depths, axis=1)
    walk = accept(tree, chosen, nothing, max_depth=min(depth, budget))
    lengths.append(walk.acceptance_length)
  return jnp.stack(lengths, axis=1).astype(jnp.int32)


def rounds(
  lengths: jax.Array, allowed: jax.Array, first: int
) -> tuple[jax.Array, jax.Array]:
  """Walks a sequence by its acceptance lengths, as decoding does.

  Args:
    lengths: `[T, P]` int32: what the round whose root stands there accepts,
      by P policies, each with a walk of its own.
    allowed: `[T]` bool: whether a round there counts.
    first: where the first root stands.

  Returns:
    `[P]` float32 sums of the lengths of the rounds that count, and their
    number.
  """

  def step(carry, operands):
    root, total, count = carry
    index, here, counts = operands
    taken = root == index
    counted = (taken & counts).astype(jnp.float32)
    total = total + counted * here.astype(jnp.float32)
    return (jnp.where(taken, root + here, root), total, count + counted), None

  zeros = jnp.zeros((lengths.shape[1],), jnp.float32)
  begin = (jnp.full_like(zeros, first, jnp.int32), zeros, zeros)
  index = jnp.arange(len(lengths), dtype=jnp.int32)
  (_, total, count), _ = lax.scan(step, begin, (index, lengths, allowed))
  return total, count


def measure(
  drafter: DFlashDrafter,
  params: Any,
  target: Transformer,
  target_params: Any,
  out: ForwardOutput,
  batch: PackedBatch,
  *,
  budgets: tuple[int, ...],
  first: int,
) -> dict[str, jax.Array]:
  """Sums over the sequences of a batch, one after the other.

  Args:
    drafter: the architecture.
    params: of the drafter, in the dtype to compute in.
    target: with the drafter's taps.
    target_params: of the target.
    out: `frozen_forward` of the batch.
    batch: B sequences of T tokens; those with nothing `counted` are left out.
    budgets: of the trees.
    first: index of the first root. What is before it is the prompt.

  Returns:
    `accepted` and `rounds`, `[1 + len(budgets)]` each: tokens and number of
    the rounds whose whole block has text, by the chain and by trees. And over
    all anchors that have text behind them `right [D]`, how often the best
    token of a slot is the text's, and `slots [D]`.
  """
  head = target_head(target, target_params)
  depth = drafter.block_size - 1

  def of_sequence(operands):
    features, one = jax.tree.map(lambda x: x[None], operands)
    anchors = every_anchor(one)
    logits = draft_logits(drafter, params, head, features, one, anchors)[0]
    has_text = has_target(one, anchors, depth)[0] & one.counted.any()
    ahead = jnp.arange(1, depth + 1, dtype=jnp.int32)
    index = anchors.index[0, :, None] + ahead[None, :]
    last = one.tokens.shape[1] - 1
    following = one.tokens[0][jnp.minimum(index, last)]
    right = (jnp.argmax(logits, axis=-1) == following) & has_text
    lengths = acceptance_lengths(logits, following, budgets)
    # At its first token a document gives the drafter nothing to go by.
    allowed = has_text.all(axis=1) & (one.positions[0] > 0)
    accepted, count = rounds(lengths, allowed, first)
    return {
      'accepted': accepted,
      'rounds': count,
      'right': right.sum(axis=0).astype(jnp.float32),
      'slots': has_text.sum(axis=0).astype(jnp.float32),
    }

  sums = lax.map(of_sequence, (out.features, batch))
  return jax.tree.map(lambda x: x.sum(axis=0), sums)
