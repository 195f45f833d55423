"""Acceptance lengths of a drafter on given text, without decoding.

The text's tokens are taken for the target's choices. On a greedy continuation
by the target this gives the rounds of decoding; on other text, the rounds of
sampling in which the target happens to choose that text.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from kdtree_jax import registry
from kdtree_jax.drafters.dflash import DFlashDrafter
from kdtree_jax.io.checkpoint_weights import Params
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
  logits: Float32[Array, 'A D V'],
  following: Int32[Array, 'A D'],
  budgets: tuple[int, ...],
) -> Int32[Array, 'A walks']:
  """Acceptance lengths of the chain and of trees at several roots.

  Args:
    logits: the drafter's logits after each root.
    following: the text's tokens after each root.
    budgets: tree budgets.

  Returns:
    1..D + 1 for each root: of the chain, then of the trees.
  """
  rows, depth, _ = logits.shape
  right = jnp.argmax(logits, axis=-1) == following
  lengths = [1 + lax.cummin(right.astype(jnp.int32), axis=1).sum(axis=1)]
  # One more token, after the deepest nodes, which have no children.
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


def walk_rounds(
  lengths: Int32[Array, 'T walks'], allowed: Bool[Array, ' T'], first: int
) -> tuple[Float32[Array, ' walks'], Float32[Array, ' walks']]:
  """Sums of acceptance lengths over the rounds that decoding would take.

  Args:
    lengths: what a round with its root at this token accepts, for the chain and
      each tree. Each walks through the sequence by its own lengths.
    allowed: whether a round at this token counts.
    first: index of the first root.

  Returns:
    Accepted tokens and the number of rounds.
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


def measure_acceptance(
  drafter: DFlashDrafter,
  params: Params,
  target: Transformer,
  target_params: Params,
  out: ForwardOutput,
  batch: PackedBatch,
  *,
  budgets: tuple[int, ...],
  first: int,
) -> dict[str, jax.Array]:
  """Sums over the sequences of a batch.

  Args:
    drafter: the drafter's architecture.
    params: the drafter's parameters, in the dtype to compute in.
    target: the target, with the drafter's taps.
    target_params: the target's parameters.
    out: `frozen_forward` of the batch.
    batch: B sequences of T tokens; those without a counted token are skipped.
    budgets: tree budgets.
    first: index of the first root; the tokens before it are the prompt.

  Returns:
    `accepted` and `rounds`, `[1 + len(budgets)]` each: tokens and number of the
    rounds with text for the whole block, by the chain and by trees. And over
    all anchors followed by text: `right [D]`, how often the most probable token
    is the text's, and `slots [D]`, of how many.
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
    # At the first token of a document the drafter has no context.
    allowed = has_text.all(axis=1) & (one.positions[0] > 0)
    accepted, count = walk_rounds(lengths, allowed, first)
    return {
      'accepted': accepted,
      'rounds': count,
      'right': right.sum(axis=0).astype(jnp.float32),
      'slots': has_text.sum(axis=0).astype(jnp.float32),
    }

  sums = lax.map(of_sequence, (out.features, batch))
  return jax.tree.map(lambda x: x.sum(axis=0), sums)
