"""Where an engine first differs from AR, and a fair judge of it."""

import dataclasses
from typing import NamedTuple

import numpy as np

from kdtree_jax import api, generation
from kdtree_jax.config import ModelConfig
from kdtree_jax.decode import DecodeState


@dataclasses.dataclass(frozen=True)
class Divergence:
  """The first token that differs, and how it is judged.

  Attributes:
    position: index into prompt and output.
    ar_token: what AR says there.
    ddtree_token: what the engine says.
    gap: by how much AR's logits prefer its own token.
    noise: twice the largest change of a logit that padding AR makes.
    layer: MoE layer (counted from 0 among those) where the two first route
      differently at or before the position, or None.
    router_margin: AR's margin between the experts (or groups) exchanged there.
    router_noise: twice the largest change of a router score by padding.
    near_tie: the gap, or the margin where experts differ, is within its noise.
  """

  position: int
  ar_token: int
  ddtree_token: int
  gap: float
  noise: float
  layer: int | None
  router_margin: float | None
  router_noise: float | None
  near_tie: bool


class Seen(NamedTuple):
  """One decoded row; index i belongs to the i-th committed new token.

  Attributes:
    output_ids: n tokens.
    logits: `[n, V]` after each of them.
    choice: `[n, layers, E]` router scores; likewise `experts [n, layers, K]`.
    experts: see `choice`.
    accepted: of every round.
    state: the last one.
  """

  output_ids: list[int]
  logits: np.ndarray
  choice: np.ndarray
  experts: np.ndarray
  accepted: list[int]
  state: DecodeState


def judge(
  target: api.Target, prompt: list[int], ar: Seen, other: Seen, padded: Seen
) -> Divergence | None:
  """The first divergence of `other` from `ar`, or None."""
  pairs = zip(ar.output_ids, other.output_ids, strict=False)
  differs = [i for i, (a, b) in enumerate(pairs) if a != b]
  if not differs:
    return None
  index = differs[0]
  mine, theirs = ar.output_ids[index], other.output_ids[index]
  if index == 0:
    logits, change = _first_logits(target, prompt)
  else:
    # Token i is chosen by the row of token i - 1.
    logits = ar.logits[index - 1]
    change = np.abs(ar.logits[:index] - padded.logits[:index])
  gap, noise = float(logits[mine] - logits[theirs]), 2 * float(change.max())
  layer = margin = router_noise = None
  near_tie = gap <= noise
  swap = _first_swap(ar.experts[:index], other.experts[:index])
  if swap is not None:
    row, layer = swap
    margin = _router_margin(
      target.config,
      ar.choice[row, layer],
      set(ar.experts[row, layer].tolist()),
      set(other.experts[row, layer].tolist()),
    )
    moved = np.abs(ar.choice[: row + 1] - padded.choice[: row + 1])
    router_noise = 2 * float(moved.max())
    near_tie = margin <= router_noise
  return Divergence(
    position=len(prompt) + index,
    ar_token=mine,
    ddtree_token=theirs,
    gap=gap,
    noise=noise,
    layer=layer,
    router_margin=margin,
    router_noise=router_noise,
    near_tie=near_tie,
  )


def _first_logits(
  target: api.Target, prompt: list[int]
) -> tuple[np.ndarray, np.ndarray]:
  """What prefill chooses the first token by, and how chunks change it."""
  usual = generation.forward_logits(target, prompt)[-1]
  whole = generation.forward_logits(target, prompt, prefill_chunk=len(prompt))
  return usual, np.abs(usual - whole[-1])


def _first_swap(a: np.ndarray, b: np.ndarray) -> tuple[int, int] | None:
  """The first row and in it the first layer with other sets of experts."""
  rows = min(len(a), len(b))
  same = np.sort(a[:rows], axis=2) == np.sort(b[:rows], axis=2)
  swaps = np.argwhere(~same.all(axis=2))
  return None if len(swaps) == 0 else (int(swaps[0, 0]), int(swaps[0, 1]))


def _router_margin(
  config: ModelConfig, choice: np.ndarray, ours: set[int], theirs: set[int]
) -> float:
  """By how much AR prefers its experts, or groups, to the others'.

  Args:
    config: grouping.
    choice: `[E]` AR's scores.
    ours: AR's experts.
    theirs: the other engine's.
  """
  groups = config.n_group
  size = len(choice) // groups
  kept, others = ({e // size for e in ids} for ids in (ours, theirs))
  out, new = kept - others, others - kept
  if groups > 1 and out and new:
    best = 2 if config.topk_method == 'noaux_tc' else 1
    scores = np.sort(choice.reshape(groups, size), axis=1)[:, -best:].sum(1)
    margin = max(scores[g] for g in out) - min(scores[g] for g in new)
    # A sum of two scores moves twice as far as one.
    return abs(float(margin)) / best
  lost, won = ours - theirs, theirs - ours
  return float(max(choice[e] for e in lost) - min(choice[e] for e in won))
