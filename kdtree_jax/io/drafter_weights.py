"""Tensors of a drafter to parameters on the device."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import DrafterConfig
from kdtree_jax.io.checkpoint_tensors import Match, match_drafter
from kdtree_jax.io.checkpoint_weights import Progress, Reader, insert
from kdtree_jax.io.tensors import CheckpointError, TensorSource


def drafter_params(
  config: DrafterConfig,
  source: TensorSource,
  dtype: Any,
  *,
  source_name: str,
  progress: Progress | None = None,
) -> dict[str, Any]:
  """Loads a DFlash drafter; see `target_params`.

  Returns:
    Nested dict of arrays: `fc`, `hidden_norm`, `norm`, `layers_i`; where they
    are its own, `embed_tokens`, `lm_head` and `d2t`.

  Raises:
    CheckpointError: see `match_drafter`; a weight that is not finite; or a
      `d2t` that leads nowhere or elsewhere than `t2d` says.
  """
  match = match_drafter(config, source, source_name=source_name)
  reader = Reader(source, match, None, np.dtype(dtype), None, source_name)
  reader.progress = progress
  params: dict[str, Any] = {}
  for name in match.names:
    if name not in ('d2t', 't2d'):
      insert(params, name, reader.plain(name))
  if config.draft_vocab_size is not None:
    params['d2t'] = jnp.asarray(_offsets(config, source, match, source_name))
  return params


def _offsets(
  config: DrafterConfig, source: TensorSource, match: Match, source_name: str
) -> np.ndarray:
  """`d2t [draft_vocab_size]` int32: a draft id plus its offset is the target's.

  Every draft id must be another id of the target, of those in the mask `t2d`
  where there is one.
  """
  offsets = np.zeros(config.draft_vocab_size, np.int32)
  if 'd2t' in match.names:
    offsets = source.read(match.names['d2t'])
  ids = np.arange(len(offsets)) + offsets
  inside = 0 <= ids.min() and ids.max() < config.vocab_size
  if not inside or len(np.unique(ids)) != len(ids):
    raise CheckpointError(
      f"{source_name}: tensor 'd2t' does not lead to different ids of the "
      f'{config.vocab_size}'
    )
  if 't2d' in match.names:
    mask = source.read(match.names['t2d'])
    if not np.array_equal(mask, np.isin(np.arange(len(mask)), ids)):
      raise CheckpointError(
        f"{source_name}: tensor 't2d' does not mark the ids that 'd2t' leads to"
      )
  return offsets.astype(np.int32)
