"""DFlash in training: blocks at many roots of a sequence in one forward.

The modules are those of decoding, with another `View` for the attention. An
anchor is the root of a block; its context are the tokens before it in its
document, as after a commit.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kdtree_jax.drafters.attention import View
from kdtree_jax.drafters.base import TargetHead
from kdtree_jax.drafters.dflash import DFlashDrafter, DFlashModel
from kdtree_jax.io.checkpoint_weights import Params
from kdtree_jax.model import ForwardOutput, Transformer
from kdtree_jax.training.packing import PackedBatch
from kdtree_jax.training.target import packed_forward
from pallas_kernels.quantized import QuantizedArray

# The most float32 logits held at once by the loss: 2 GiB.
LOGITS_AT_ONCE = 1 << 29
# With more experts, running all of them on all rows is slower than sorting.
FEW_EXPERTS = 32


class Anchors(flax.struct.PyTreeNode):
  """Roots of blocks.

  Attributes:
    index: index in the sequence.
    valid: false for padding, from which nothing is learnt.
  """

  index: Int32[Array, 'B A']
  valid: Bool[Array, 'B A']


class DraftLoss(flax.struct.PyTreeNode):
  """The loss, and sums over slots for means; D = block_size - 1.

  Attributes:
    loss: the mean that is minimised.
    divergence: sum of KL(target || drafter) in nats.
    matches: how often both have the same most probable token.
    count: slots that have a target.
  """

  loss: Float32[Array, '']
  divergence: Float32[Array, ' D']
  matches: Float32[Array, ' D']
  count: Float32[Array, ' D']


def sample_anchors(key: jax.Array, batch: PackedBatch, count: int) -> Anchors:
  """Different random anchors of every sequence.

  An anchor has a token before and a token after it in its document.

  Args:
    key: random key, used up.
    batch: the sequences.
    count: anchors a sequence, at most its length.
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
  """The rows that a block attends to: those before its root in its document."""
  index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
  document = jnp.take_along_axis(batch.segments, anchors.index, axis=1)
  seen = index[None, None, :] < anchors.index[:, :, None]
  seen &= batch.segments[:, None, :] == document[:, :, None]
  start = jnp.take_along_axis(batch.positions, anchors.index, axis=1)
  return View(start=start, positions=batch.positions, seen=seen)


def frozen_forward(
  model: Transformer, params: Params, batch: PackedBatch
) -> ForwardOutput:
  """The target's forward on packed documents, without gradients.

  Args:
    model: the target, with the drafter's taps.
    params: the target's parameters, as stored; quantised weights are
      dequantised where they are used.
    batch: the sequences.
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


def _is_quantised(value: object) -> bool:
  return isinstance(value, QuantizedArray)


def target_head(model: Transformer, params: Params) -> TargetHead:
  """The frozen target's embedding and head, without gradients into them."""
  variables = {'params': lax.stop_gradient(params)}

  apply: Any = functools.partial(model.apply, variables)
  return TargetHead(
    functools.partial(apply, method='embed'),
    functools.partial(apply, method='unembed'),
  )


def draft_hidden(
  drafter: DFlashDrafter,
  params: Params,
  head: TargetHead,
  features: Float[Array, 'B T F'],
  batch: PackedBatch,
  anchors: Anchors,
) -> Float[Array, 'B A D M']:
  """The drafter's normed hidden states of slots 1..D.

  Args:
    drafter: the drafter's architecture.
    params: the drafter's parameters, in the dtype to compute in.
    head: the target's embedding and head.
    features: the target's taps, in the same dtype.
    batch: the sequences.
    anchors: the roots.
  """
  model = DFlashModel(drafter.config)
  embed = drafter.ends(params, head).embed
  roots = jnp.take_along_axis(batch.tokens, anchors.index, axis=1)
  embedded = embed(drafter.block(roots)).astype(features.dtype)
  apply: Any = functools.partial(model.apply, {'params': params})
  context = apply(features, batch.positions, method='project')
  view = view_of(batch, anchors)
  hidden = apply(embedded, context, view, method='blocks')
  return hidden[:, :, 1 : drafter.block_size]


def draft_logits(
  drafter: DFlashDrafter,
  params: Params,
  head: TargetHead,
  features: Float[Array, 'B T F'],
  batch: PackedBatch,
  anchors: Anchors,
) -> Float32[Array, 'B A D V']:
  """The logits that `drafter.draft` gives at every anchor."""
  hidden = draft_hidden(drafter, params, head, features, batch, anchors)
  return drafter.ends(params, head).unembed(hidden)


def position_weights(depth: int, gamma: float) -> np.ndarray:
  """The weights `[depth]` float32 exp(-(k - 1) / gamma), k = 1..depth (DFlash).

  A token at depth k counts only if all before it were accepted.
  """
  return np.exp(-np.arange(depth) / gamma).astype(np.float32)


def draft_loss(
  drafter: DFlashDrafter,
  params: Params,
  target: Transformer,
  target_params: Params,
  out: ForwardOutput,
  batch: PackedBatch,
  anchors: Anchors,
  *,
  gamma: float,
  prefix_power: float | Float32[Array, ''],
  hard_weight: float | Float32[Array, ''],
) -> DraftLoss:
  """The drafter's divergence from the frozen target, teacher-forced.

  Slot k of the block at index a learns the target's distribution p after token
  a + k - 1, or rather what a request samples from: p itself at temperature 1,
  the most probable token of p at temperature 0. The slot is trained on the
  mixture of both, with weight `hard_weight` of the second. So that q stays as
  calibrated as a best-first tree needs, its divergence is

    (1 - hard_weight) KL(p || q) - hard_weight log q(argmax p).

  The loss is the mean over slots with the weights

    exp(-(k - 1) / gamma) (q(t_1) .. q(t_{k-1}))^prefix_power

  for the text's tokens t after the anchor, without gradients through them: a
  slot counts as far as the drafter would get there. At prefix_power 1 the
  products are how often a draft sampled from q is accepted so far.

  Args:
    drafter: the drafter's architecture.
    params: the drafter's parameters, in the dtype to compute in.
    target: the target, with the drafter's taps.
    target_params: the target's parameters; no gradient flows into them.
    out: `frozen_forward` of the batch.
    batch: the sequences.
    anchors: the roots.
    gamma: see `position_weights`.
    prefix_power: at least 0; 0 weights by depth alone.
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
    logits: Any = target.apply(frozen, hidden[index], method='logits')
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
    # In pieces, recomputed in the backward pass, to save the logits' memory.
    sums = lax.map(jax.checkpoint(of_sequence), operands, batch_size=at_once)
  slots, weights, divergence, matches, count = (x.sum(axis=0) for x in sums)
  # An anchor's first slot has weight 1, so the sum is below 1 only if empty.
  loss = slots.sum() / jnp.maximum(weights.sum(), 1.0)
  return DraftLoss(loss, divergence, matches, count)


def _slot_terms(
  log_p: Float32[Array, 'A D V'],
  log_q: Float32[Array, 'A D V'],
  text: Int32[Array, 'A D'],
  by_depth: Float32[Array, ' D'],
  prefix_power: float | Float32[Array, ''],
  hard_weight: float | Float32[Array, ''],
) -> tuple[Float32[Array, 'A D'], ...]:
  """The terms that `draft_loss` sums over slots.

  Args:
    log_p: the target's log-probabilities.
    log_q: the drafter's log-probabilities.
    text: the text's own tokens.
    by_depth: weights of the depths.
    prefix_power: see `draft_loss`.
    hard_weight: see `draft_loss`.

  Returns:
    Weighted divergence, weight, KL divergence, whether the most probable tokens
    are the same, and 1.
  """
  best = jnp.argmax(log_p, axis=-1)
  ids = lax.broadcasted_iota(best.dtype, log_p.shape, log_p.ndim - 1)

  def log_q_of(chosen):
    # A masked sum instead of a gather, whose gradient would be a scatter.
    return jnp.where(ids == chosen[..., None], log_q, 0.0).sum(axis=-1)

  divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
  slots = (1 - hard_weight) * divergence
  slots = slots - hard_weight * log_q_of(best)
  prefix = lax.stop_gradient(log_q_of(text.astype(best.dtype)))
  before = jnp.cumsum(prefix, axis=-1) - prefix
  weights = by_depth[None, :] * jnp.exp(prefix_power * before)
  matches = best == jnp.argmax(log_q, axis=-1)
  return (
    weights * slots,
    weights,
    divergence,
    matches.astype(jnp.float32),
    jnp.ones_like(divergence),
  )


def has_target(
  batch: PackedBatch, anchors: Anchors, depth: int
) -> Bool[Array, 'B A D']:
  """Whether a slot's token is in the same sequence and document."""
  ahead = jnp.arange(1, depth + 1, dtype=jnp.int32)
  index = anchors.index[:, :, None] + ahead[None, None, :]
  length = batch.tokens.shape[1]
  reached = jnp.take_along_axis(
    batch.segments[:, None, :], jnp.minimum(index, length - 1), axis=2
  )
  own = jnp.take_along_axis(batch.segments, anchors.index, axis=1)
  same = reached == own[:, :, None]
  return (index < length) & same & anchors.valid[:, :, None]
