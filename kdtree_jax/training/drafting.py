"""DFlash in parallel: the blocks of many anchors of a sequence at once.

Everything here goes through the modules that decode: the same layers, one
attention, another `View`. An anchor is the root of a block; its context is
what stands before it in its own document, as after a commit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdtree_jax.drafters.attention import View
from kdtree_jax.drafters.base import TargetHead
from kdtree_jax.drafters.dflash import DFlashDrafter, DFlashModel
from kdtree_jax.model import ForwardOutput, Transformer
from kdtree_jax.training.packing import PackedBatch
from kdtree_jax.training.target import packed_forward
from pallas_kernels.quantized import QuantizedArray

# float32 logits that one piece of the loss may hold: 2 GiB.
LOGITS_AT_ONCE = 1 << 29
# With more experts, all of them on all rows is slower than sorting rows.
FEW_EXPERTS = 32


class Anchors(NamedTuple):
  """Roots of blocks.

  Attributes:
    index: `[B, A]` int32, where in the sequence.
    valid: `[B, A]` bool; the others fill up and teach nothing.
  """

  index: jax.Array
  valid: jax.Array


class DraftLoss(NamedTuple):
  """Sums over slots, from which means are taken; D = block_size - 1.

  Attributes:
    loss: scalar, the mean that is trained.
    divergence: `[D]`, sum of KL(target || drafter) in nats.
    matches: `[D]`, how often both have the same most probable token.
    count: `[D]`, slots that have a target.
  """

  loss: jax.Array
  divergence: jax.Array
  matches: jax.Array
  count: jax.Array


def sample_anchors(key: jax.Array, batch: PackedBatch, count: int) -> Anchors:
  """Different anchors of every sequence, each as likely as another.

  An anchor has a token before and a token behind it in its document.

  Args:
    key: consumed.
    batch: B sequences of T tokens.
    count: A, at most T.
  """
  rows, length = batch.tokens.shape
  follows = batch.segments[:, 1:] == batch.segments[:, :-1]
  edge = jnp.zeros((rows, 1), jnp.bool_)
  inside = jnp.concatenate([follows, edge], axis=1)
  inside &= jnp.concatenate([edge, follows], axis=1)
  draws = jnp.where(inside, jax.random.uniform(key, (rows, length)), -1.0)
  best, chosen = lax.top_k(draws, count)
  return Anchors(chosen.astype(jnp.int32), best >= 0)


def every_anchor(batch: PackedBatch) -> Anchors:
  """All T indices of each sequence, the first of a document included."""
  index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None, :]
  index = jnp.broadcast_to(index, batch.tokens.shape)
  return Anchors(index, jnp.ones_like(index, jnp.bool_))


def view_of(batch: PackedBatch, anchors: Anchors) -> View:
  """What each block sees: the rows before its root, of the same document."""
  index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
  document = jnp.take_along_axis(batch.segments, anchors.index, axis=1)
  seen = index[None, None, :] < anchors.index[:, :, None]
  seen &= batch.segments[:, None, :] == document[:, :, None]
  start = jnp.take_along_axis(batch.positions, anchors.index, axis=1)
  return View(start=start, positions=batch.positions, seen=seen)


def frozen_forward(
  model: Transformer, params: Any, batch: PackedBatch
) -> ForwardOutput:
  """The target on packed sequences: every document by itself, no cache.

  Args:
    model: with the drafter's taps.
    params: of the target, as stored; quantised weights are expanded where
      they are used.
    batch: B sequences of T tokens.
  """
  leaves = jax.tree.leaves(params, is_leaf=_is_quantised)
  dense = model.config.n_routed_experts <= FEW_EXPERTS
  dense &= not any(map(_is_quantised, leaves))
  out = packed_forward(
    model.config,
    params,
    batch,
    tap_layers=model.tap_layers,
    implementation='training' if dense else None,
  )
  return lax.stop_gradient(out)


def _is_quantised(value: Any) -> bool:
  return isinstance(value, QuantizedArray)


def target_head(model: Transformer, params: Any) -> TargetHead:
  """The frozen target's embedding and head, without gradients into them."""
  variables = {'params': lax.stop_gradient(params)}

  def embed(tokens: jax.Array) -> jax.Array:
    return model.apply(variables, tokens, method='embed')

  def unembed(hidden: jax.Array) -> jax.Array:
    return model.apply(variables, hidden, method='unembed')

  return TargetHead(embed, unembed)


def draft_hidden(
  drafter: DFlashDrafter,
  params: Any,
  head: TargetHead,
  features: jax.Array,
  batch: PackedBatch,
  anchors: Anchors,
) -> jax.Array:
  """The drafter's normed states of slots 1..D: `[B, A, D, H]`.

  Args:
    drafter: which architecture.
    params: its parameters, in the dtype to compute in.
    head: of the target.
    features: `[B, T, F]`, the target's taps, in the same dtype.
    batch: the sequences.
    anchors: A in each.
  """
  model, variables = DFlashModel(drafter.config), {'params': params}
  embed = drafter.ends(params, head).embed
  roots = jnp.take_along_axis(batch.tokens, anchors.index, axis=1)
  embedded = embed(drafter.block(roots)).astype(features.dtype)
  context = model.apply(variables, features, batch.positions, method='project')
  hidden = model.apply(
    variables, embedded, context, view_of(batch, anchors), method='blocks'
  )
  return hidden[:, :, 1 : drafter.block_size]


def draft_logits(
  drafter: DFlashDrafter,
  params: Any,
  head: TargetHead,
  features: jax.Array,
  batch: PackedBatch,
  anchors: Anchors,
) -> jax.Array:
  """`[B, A, D, V]` float32, what `drafter.draft` gives at every anchor."""
  hidden = draft_hidden(drafter, params, head, features, batch, anchors)
  return drafter.ends(params, head).unembed(hidden)


def position_weights(depth: int, gamma: float) -> np.ndarray:
  """`[depth]` float32: exp(-(k - 1) / gamma) for k = 1..depth (DFlash).

  A token at depth k counts only if all before it were accepted.
  """
  return np.exp(-np.arange(depth) / gamma).astype(np.float32)


def draft_loss(
  drafter: DFlashDrafter,
  params: Any,
  target: Transformer,
  target_params: Any,
  out: ForwardOutput,
  batch: PackedBatch,
  anchors: Anchors,
  *,
  gamma: float,
  prefix_power: float,
  hard_weight: float,
) -> DraftLoss:
  """How far the drafter is from the frozen target, teacher-forced.

  Slot k of the block at index a is held to the target's distribution p after
  token a + k - 1, or rather to what a request draws its token from: p itself
  at temperature 1, all of it on p's best token at temperature 0. The target of
  the slot is the mixture of both, `hard_weight` of it the second. Its
  divergence from the drafter, as calibrated as a best-first tree needs, is

    (1 - hard_weight) KL(p || q) - hard_weight log q(argmax p).

  The loss is the mean over slots by the weights

    exp(-(k - 1) / gamma) (q(t_1) .. q(t_{k-1}))^prefix_power

  with the text's own tokens t behind the anchor, and no gradient through them:
  a slot matters as far as the drafter would get there. At prefix_power 1 the
  products are how often a draft that is drawn from q is accepted so far.

  Args:
    drafter: the architecture.
    params: of the drafter, in the dtype to compute in.
    target: with the drafter's taps.
    target_params: of the target; no gradient flows into them.
    out: `frozen_forward` of the batch.
    batch: B sequences of T tokens.
    anchors: A in each.
    gamma: of `position_weights`.
    prefix_power: at least 0; 0 weighs by depth alone.
    hard_weight: 0..1.
  """
  head = target_head(target, target_params)
  drafted = draft_hidden(drafter, params, head, out.features, batch, anchors)
  unembed = drafter.ends(params, head).unembed
  depth = drafter.block_size - 1
  ahead = jnp.arange(depth, dtype=jnp.int32)
  index = anchors.index[:, :, None] + ahead[None, None, :]
  valid = has_target(batch, anchors, depth)
  last = batch.tokens.shape[1] - 1
  index = jnp.minimum(index, last)
  by_depth = jnp.asarray(position_weights(depth, gamma))
  frozen = {'params': lax.stop_gradient(target_params)}

  def of_sequence(operands):
    hidden, tokens, index, drafted, valid = operands
    logits = target.apply(frozen, hidden[index], method='logits')
    terms = _slot_terms(
      jax.nn.log_softmax(lax.stop_gradient(logits), axis=-1),
      jax.nn.log_softmax(unembed(drafted), axis=-1),
      tokens[jnp.minimum(index + 1, last)],
      by_depth,
      prefix_power,
      hard_weight,
    )
    return [jnp.where(valid, x, 0.0).sum(axis=0) for x in terms]

  per_sequence = anchors.index.shape[1] * depth * target.config.vocab_size
  at_once = max(1, LOGITS_AT_ONCE // per_sequence)
  operands = (out.hidden, batch.tokens, index, drafted, valid)
  if at_once >= len(out.hidden):
    sums = jax.vmap(of_sequence)(operands)
  else:
    # In pieces, and again in the backward pass: the logits fill no memory.
    sums = lax.map(jax.checkpoint(of_sequence), operands, batch_size=at_once)
  slots, weights, divergence, matches, count = (x.sum(axis=0) for x in sums)
  # The first slot of an anchor weighs 1: no less, unless there is none.
  loss = slots.sum() / jnp.maximum(weights.sum(), 1.0)
  return DraftLoss(loss, divergence, matches, count)


def _slot_terms(
  log_p: jax.Array,
  log_q: jax.Array,
  text: jax.Array,
  by_depth: jax.Array,
  prefix_power: float,
  hard_weight: float,
) -> tuple[jax.Array, ...]:
  """What `draft_loss` sums over the slots of blocks, `[A, D]` float32 each.

  Args:
    log_p: `[A, D, V]`, of the target.
    log_q: likewise, of the drafter.
    text: `[A, D]`, the text's own tokens.
    by_depth: `[D]` weights.
    prefix_power: see `draft_loss`.
    hard_weight: likewise.

  Returns:
    Weighted divergence, weight, KL divergence, whether the best tokens are the
    same, and 1.
  """
  best = jnp.argmax(log_p, axis=-1)
  ids = lax.broadcasted_iota(best.dtype, log_p.shape, log_p.ndim - 1)

  def log_q_of(chosen):
    # A sum, not a gather: its gradient is no scatter, and both fuse.
    return jnp.where(ids == chosen[..., None], log_q, 0.0).sum(axis=-1)

  divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
  slots = (1 - hard_weight) * divergence
  slots = slots - hard_weight * log_q_of(best)
  said = lax.stop_gradient(log_q_of(text.astype(best.dtype)))
  before = jnp.cumsum(said, axis=-1) - said
  weights = by_depth[None, :] * jnp.exp(prefix_power * before)
  matches = best == jnp.argmax(log_q, axis=-1)
  return (
    weights * slots,
    weights,
    divergence,
    matches.astype(jnp.float32),
    jnp.ones_like(divergence),
  )


def has_target(batch: PackedBatch, anchors: Anchors, depth: int) -> jax.Array:
  """`[B, A, D]`: the slot's position is in the sequence and the document."""
  ahead = jnp.arange(1, depth + 1, dtype=jnp.int32)
  index = anchors.index[:, :, None] + ahead[None, None, :]
  length = batch.tokens.shape[1]
  inside = index < length

  def at(documents, index):
    return documents[index]

  reached = jax.vmap(at)(batch.segments, jnp.minimum(index, length - 1))
  own = jax.vmap(at)(batch.segments, anchors.index)
  same = reached == own[:, :, None]
  return inside & same & anchors.valid[:, :, None]
