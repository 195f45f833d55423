"""Flags of the modes that make files: bundles, corpora and trained models."""

import dataclasses

from kdtree_jax.errors import UserError
from kdtree_jax.modes.options.fields import REQUIRED, ModeFlags, flag
from kdtree_jax.modes.options.shared import (
  config_names,
  target_flag,
  weight_forms,
  weights_flag,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectFlags(ModeFlags):
  """Describes a bundle or a checkpoint folder."""

  mode = 'inspect'
  target: str = flag(
    REQUIRED, 'A checkpoint folder or a .kdtr file.', path='input'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertFlags(ModeFlags):
  """Turns a checkpoint folder into a bundle, or a bundle into a folder.

  Folders have the Hugging Face layout. With --drafter and without --target, it
  converts a drafter alone.
  """

  mode = 'convert'
  target: str | None = flag(
    None, 'A checkpoint folder, or a .kdtr file.', path='input'
  )
  drafter: str | None = flag(
    None,
    'A DFlash folder, to put into the bundle of --target or into its own.',
    path='input',
  )
  weights: str = flag(
    'as_stored',
    'For a bundle: as_stored keeps quantised weights; bfloat16 and float32 '
    'dequantise them and round all weights to that type.',
    choices=weight_forms,
  )
  output: str = flag(
    REQUIRED,
    'The .kdtr file for a folder, or the new folder for a bundle.',
    path='output',
  )

  def __post_init__(self):
    super().__post_init__()
    if self.target is None and self.drafter is None:
      raise UserError('--mode=convert needs --target, --drafter or both')


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeBundleFlags(ModeFlags):
  """Makes a bundle of a config with random weights and golden outputs."""

  mode = 'make_bundle'
  variant: str = flag(REQUIRED, 'A file in configs/.', choices=config_names)
  seed: int | None = flag(
    None,
    'Seed of weights and prompt. If it is not given: derived from the name of '
    'the variant.',
  )
  output: str | None = flag(
    None, 'The .kdtr file. If it is not given: VARIANT.kdtr.', path='output'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeCorpusFlags(ModeFlags):
  """Makes a tokenizer and token streams from Python sources and their texts."""

  mode = 'make_corpus'
  corpus_sources: tuple[str, ...] = flag(
    REQUIRED,
    'A folder of sources: site-packages, the standard library or unpacked '
    'source distributions; give the flag once per folder. Only packages with '
    'permissive licences are used.',
    path='input',
  )
  vocab_size: int = flag(4096, 'Tokens of the BPE vocabulary.')
  max_tokens: int | None = flag(
    None, 'Most training tokens. If it is not given: all.'
  )
  output: str = flag(REQUIRED, 'The folder of the corpus.', path='output')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingFlags(ModeFlags):
  """The training."""

  corpus: str = flag(REQUIRED, 'A folder that make_corpus wrote.', path='input')
  recipe: str = flag(
    REQUIRED, 'A file in configs/ with a recipe.', choices=config_names
  )
  train_steps: int | None = flag(
    None,
    'Steps of the schedule. If it is not given: those of the recipe.',
  )
  output: str = flag(
    REQUIRED,
    'The folder of the run, which is continued if it exists.',
    path='output',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTargetFlags(TrainingFlags):
  """Trains the model of a config on a corpus, or continues a run."""

  mode = 'train_target'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainDrafterFlags(TrainingFlags):
  """Trains a DFlash drafter for a target, or continues a run."""

  mode = 'train_drafter'
  target: str = target_flag(REQUIRED)
  weights: str = weights_flag()
