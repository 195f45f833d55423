"""The first token at which an engine differs from AR, and its judgement."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from kdtree_jax import api, generation
from kdtree_jax.config import ModelConfig
from kdtree_jax.observation import Observation


@dataclasses.dataclass(frozen=True)
class Divergence:
  """The first token that differs from AR's, and whether it is a near-tie.

  Attributes:
    position: index into prompt and output.
    ar_token: AR's token there.
    ddtree_token: the engine's token there.
    gap: AR's logit of its own token minus that of the engine's token.
    noise: twice the largest change of a logit by padding AR's rows.
    layer: the first MoE layer (counted from 0 among those) in which the two
      choose different experts at or before the position, or None.
    router_margin: AR's margin between the experts (or groups) exchanged there.
    router_noise: twice the largest change of a router score by padding.
    near_tie: the gap, or the margin if experts differ, is within its noise.
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


def judge(
  target: api.Target,
  prompt: list[int],
  ar: Observation,
  other: Observation,
  padded: Observation,
) -> Divergence | None:
  """The first divergence of `other` from `ar`, or None.

  `padded` is AR with padded rows on AR's output: what it changes is noise.
  """
  pairs = zip(ar.output_ids, other.output_ids, strict=False)
  differs = [i for i, (a, b) in enumerate(pairs) if a != b]
  if not differs:
    return None
  index = differs[0]
  ar_token, other_token = ar.output_ids[index], other.output_ids[index]
  if index == 0:
    logits, change = _first_logits(target, prompt)
  else:
    # Token i is chosen by the row of token i - 1.
    logits = ar.logits[index - 1]
    change = np.abs(ar.logits[:index] - padded.logits[:index])
  gap = float(logits[ar_token] - logits[other_token])
  noise = 2 * float(change.max())
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
    change = np.abs(ar.choice[: row + 1] - padded.choice[: row + 1])
    router_noise = 2 * float(change.max())
    near_tie = margin <= router_noise
  return Divergence(
    position=len(prompt) + index,
    ar_token=ar_token,
    ddtree_token=other_token,
    gap=gap,
    noise=noise,
    layer=layer,
    router_margin=margin,
    router_noise=router_noise,
    near_tie=near_tie,
  )


def _first_logits(
  target: api.Target, prompt: list[int]
) -> tuple[Float[np.ndarray, ' V'], Float[np.ndarray, ' V']]:
  """The logits of the first new token, and how much chunks change them."""
  usual = generation.forward_logits(target, prompt)[-1]
  whole = generation.forward_logits(target, prompt, prefill_chunk=len(prompt))
  return usual, np.abs(usual - whole[-1])


def _first_swap(
  a: Int[np.ndarray, 'tokens moe_layers K'],
  b: Int[np.ndarray, 'tokens moe_layers K'],
) -> tuple[int, int] | None:
  """The first token, and its first layer, with different sets of experts."""
  rows = min(len(a), len(b))
  same = np.sort(a[:rows], axis=2) == np.sort(b[:rows], axis=2)
  swaps = np.argwhere(~same.all(axis=2))
  return None if len(swaps) == 0 else (int(swaps[0, 0]), int(swaps[0, 1]))


def _router_margin(
  config: ModelConfig,
  choice: Float[np.ndarray, ' E'],
  ar: set[int],
  other: set[int],
) -> float:
  """The margin of AR's scores between its experts, or groups, and the others.

  Args:
    config: the target's.
    choice: AR's scores.
    ar: AR's experts.
    other: the other engine's experts.
  """
  groups = config.n_group
  size = len(choice) // groups
  ar_groups, other_groups = ({e // size for e in ids} for ids in (ar, other))
  out, new = ar_groups - other_groups, other_groups - ar_groups
  if groups > 1 and out and new:
    best = 2 if config.topk_method == 'noaux_tc' else 1
    scores = np.sort(choice.reshape(groups, size), axis=1)[:, -best:].sum(1)
    margin = max(scores[g] for g in out) - min(scores[g] for g in new)
    # Noise changes a sum of two scores twice as much as one score.
    return abs(float(margin)) / best
  out, new = ar - other, other - ar
  return float(max(choice[e] for e in out) - min(choice[e] for e in new))
