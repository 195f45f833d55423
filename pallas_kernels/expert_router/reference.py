"""The router in plain jnp: what is correct."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dense


@dataclasses.dataclass(frozen=True)
class Rules:
  """How experts are chosen (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2).

  Attributes:
    choices: K, experts a row.
    sigmoid: whether scores are the logits' sigmoid, not their softmax.
    normalize: whether a row's weights are made to sum to 1.
    scale: what the weights are multiplied with in the end.
    groups: parts of equal size that the experts come in.
    open_groups: how many of them, the best ones, a row may choose from.
    group_best: a group is scored by the sum of so many of its best experts.
    closed: the score of experts in other groups.
  """

  choices: int
  sigmoid: bool
  normalize: bool
  scale: float
  groups: int = 1
  open_groups: int = 1
  group_best: int = 1
  closed: float = 0.0


class Routing(NamedTuple):
  """Where T rows go.

  Attributes:
    ids: `[T, K]` int32, ties to the lowest expert.
    weights: `[T, K]` float32.
    choice: `[T, E]` float32, the scores by which experts and groups are
      chosen: biased, before groups are masked.
  """

  ids: jax.Array
  weights: jax.Array
  choice: jax.Array


def expert_router(
  x: jax.Array,
  gate: jax.Array,
  bias: jax.Array | None,
  valid: jax.Array | None,
  rules: Rules,
) -> tuple[Routing, jax.Array]:
  """See `pallas_kernels.expert_router.api.expert_router`."""
  routing = route(dense.matmul(x.astype(jnp.float32), gate), bias, rules)
  return routing, sent(routing.ids, valid, gate.shape[0])


def sent(ids: jax.Array, valid: jax.Array | None, experts: int) -> jax.Array:
  """`ids [T, K]`, but no expert's (E) for rows that are not `valid [T]`."""
  return ids if valid is None else jnp.where(valid[:, None], ids, experts)


def choice_scores(
  logits: jax.Array, bias: jax.Array | None, rules: Rules
) -> tuple[jax.Array, jax.Array]:
  """The scores by which rows are mixed and chosen, `[T, E]` float32."""
  if rules.sigmoid:
    scores = jax.nn.sigmoid(logits)
  else:
    scores = jax.nn.softmax(logits, axis=-1)
  return scores, scores if bias is None else scores + bias[None, :]


def route(logits: jax.Array, bias: jax.Array | None, rules: Rules) -> Routing:
  """Chooses experts and mixing weights.

  Args:
    logits: `[T, E]` float32.
    bias: `[E]` float32, used for the choice only, never for the weights; or
      None.
    rules: scoring, grouping and scaling.
  """
  scores, choice = choice_scores(logits, bias, rules)
  _, ids = lax.top_k(_keep_best_groups(choice, rules), rules.choices)
  weights = jnp.take_along_axis(scores, ids, axis=-1)
  if rules.normalize:
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
  return Routing(ids, weights * rules.scale, choice)


def _keep_best_groups(scores: jax.Array, rules: Rules) -> jax.Array:
  """Closes all but the `open_groups` best groups."""
  rows, groups = scores.shape[0], rules.groups
  if groups == 1:
    return scores
  grouped = scores.reshape(rows, groups, -1)
  group_scores = lax.top_k(grouped, rules.group_best)[0].sum(axis=-1)
  _, kept = lax.top_k(group_scores, rules.open_groups)
  keep = jax.nn.one_hot(kept, groups, dtype=jnp.bool_).any(axis=1)
  return jnp.where(keep[:, :, None], grouped, rules.closed).reshape(
    scores.shape
  )
