"""Tensors of a checkpoint that are not run, and what justifies each of them."""

import collections
import dataclasses
import re
from typing import Any

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.io.checkpoint_config import WRAPPER_TYPES
from kdtree_jax.io.fields import REQUIRED, Fields

TIED_HEAD = 'tied to the embedding'

_VISION = (
  'vision_tower.',
  'mm_projector.',
  'model.vision_tower.',
  'model.mm_projector.',
)
_LAYER = re.compile(r'model\.layers\.([0-9]{1,9})\.([^.]*)(?:\.|$)')
_ROTARY = re.compile(r'layers\.([0-9]{1,9})\.self_attn\.rotary_emb\.inv_freq')
# What tells a multi-token prediction layer from a layer of the model, and
# what else it holds.
_MTP_ONLY = frozenset(('eh_proj', 'enorm', 'hnorm'))
_MTP = _MTP_ONLY | {
  'embed_tokens',
  'shared_head',
  'input_layernorm',
  'self_attn',
  'post_attention_layernorm',
  'mlp',
}


@dataclasses.dataclass(frozen=True)
class Extras:
  """Parts of a checkpoint that its config announces and that are not run.

  Attributes:
    mtp_layers: multi-token prediction layers after the model's own.
    vision: the model is multimodal.
  """

  mtp_layers: int = 0
  vision: bool = False


NO_EXTRAS = Extras()


def read_extras(raw: Any, source_name: str = 'config.json') -> Extras:
  """What a target's config.json announces beyond what `model_config` reads.

  Where `num_nextn_predict_layers` is absent it is 1, the default of the
  family's own class; DeepSeek-V2 has no such layers.

  Raises:
    CheckpointError: an ill-typed value.
  """
  fields, vision = Fields(raw, source_name), False
  if fields.get('model_type') in WRAPPER_TYPES:
    vision = fields.get('vision_config') is not None
    text = fields.get('text_config', REQUIRED)
    fields = Fields(text, f'{source_name}: text_config')
  default = 0 if fields.get('model_type') == 'deepseek_v2' else 1
  layers = fields.integer('num_nextn_predict_layers', default)
  return Extras(layers, vision)


class TargetRules:
  """Which tensors of a target are skipped, and why others are not."""

  def __init__(
    self, config: ModelConfig, extras: Extras, canonical: dict[str, str]
  ):
    """Looks at all names of a checkpoint.

    Args:
      config: the architecture.
      extras: what else the config announces.
      canonical: canonical name to the source's own.
    """
    self._config, self._extras, self._own = config, extras, canonical
    self._parts = collections.defaultdict(set)
    for name in canonical:
      if layer := _LAYER.match(name):
        self._parts[int(layer[1])].add(layer[2])

  def reason(self, name: str) -> str | None:
    """Why a tensor that is no parameter is skipped; None: it is not."""
    layers = self._config.num_hidden_layers
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= layers:
      announced = int(layer[1]) < layers + self._extras.mtp_layers
      marked = self._parts[int(layer[1])] >= _MTP_ONLY
      if announced and marked and layer[2] in _MTP:
        return 'multi-token prediction'
      return None
    if self._extras.vision and self._own[name].startswith(_VISION):
      return 'vision'
    if _is_rotary(name.removeprefix('model.'), layers):
      return 'rotary buffer'
    if name == 'lm_head.weight' and self._config.tie_word_embeddings:
      return TIED_HEAD
    return None

  def hint(self, name: str) -> str:
    """What would have to be different for a tensor to be skipped."""
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= self._config.num_hidden_layers:
      return (
        f': num_hidden_layers is {self._config.num_hidden_layers}, and what '
        f'follows is none of {self._extras.mtp_layers} multi-token prediction '
        'layers (num_nextn_predict_layers), which hold eh_proj, enorm, hnorm'
      )
    if self._own[name].startswith(_VISION) and not self._extras.vision:
      return ': the config has no vision_config'
    return ''


class DrafterRules:
  """Which tensors of a drafter are skipped."""

  def __init__(self, config: DrafterConfig):
    self._layers = config.num_hidden_layers

  def reason(self, name: str) -> str | None:
    """See `TargetRules`."""
    rotary = name == 'rotary_emb.inv_freq' or _is_rotary(name, self._layers)
    return 'rotary buffer' if rotary else None

  def hint(self, name: str) -> str:
    """See `TargetRules`."""
    del name
    return ''


def _is_rotary(name: str, layers: int) -> bool:
  """Whether a name is that of the buffer of one of so many layers."""
  found = _ROTARY.fullmatch(name)
  return found is not None and int(found[1]) < layers
