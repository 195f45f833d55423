"""Tensors of a checkpoint that are skipped, and the reason for each."""

import collections
import dataclasses
import re

from kdtree_jax.config import ModelConfig
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
# Modules that only a multi-token prediction (MTP) layer has, and all of its
# modules.
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
  """Parts of a checkpoint that its config announces and that are skipped.

  Attributes:
    mtp_layers: multi-token prediction layers after those of the model.
    vision: whether the model is multimodal.
  """

  mtp_layers: int = 0
  vision: bool = False


NO_EXTRAS = Extras()


def read_extras(raw: object, source_name: str = 'config.json') -> Extras:
  """The skipped parts that a target's config.json announces.

  An absent `num_nextn_predict_layers` is 1, the default of the family's own
  class; DeepSeek-V2 has no such layers.

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


class SkipRules:
  """Which tensors of a target are skipped, and why others are not."""

  def __init__(
    self, config: ModelConfig, extras: Extras, canonical: dict[str, str]
  ):
    """Looks at the names of all tensors.

    Args:
      config: the architecture.
      extras: the skipped parts that the config announces.
      canonical: canonical name to the source's own.
    """
    self._config, self._extras, self._own = config, extras, canonical
    self._modules: dict[int, set[str]] = collections.defaultdict(set)
    for name in canonical:
      if layer := _LAYER.match(name):
        self._modules[int(layer[1])].add(layer[2])

  def reason(self, name: str) -> str | None:
    """Why a tensor that is no parameter is skipped; None: it is not."""
    layers = self._config.num_hidden_layers
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= layers:
      announced = int(layer[1]) < layers + self._extras.mtp_layers
      is_mtp = self._modules[int(layer[1])] >= _MTP_ONLY
      if announced and is_mtp and layer[2] in _MTP:
        return 'multi-token prediction'
      return None
    if self._extras.vision and self._own[name].startswith(_VISION):
      return 'vision'
    if name == 'lm_head.weight' and self._config.tie_word_embeddings:
      return TIED_HEAD
    return rotary_reason(name.removeprefix('model.'), layers)

  def hint(self, name: str) -> str:
    """What would have to change for a tensor to be skipped; may be empty."""
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


def rotary_reason(name: str, layers: int) -> str | None:
  """Why a rotary buffer of one of so many layers is skipped; else None."""
  found = _ROTARY.fullmatch(name)
  return 'rotary buffer' if found and int(found[1]) < layers else None
