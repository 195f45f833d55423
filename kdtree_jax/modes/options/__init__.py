"""The flags of every mode, one frozen dataclass per mode."""

from kdtree_jax.modes.options.fields import Flag, ModeFlags, flags_of
from kdtree_jax.modes.options.files import (
  ConvertFlags,
  InspectFlags,
  MakeBundleFlags,
  MakeCorpusFlags,
  TrainDrafterFlags,
  TrainTargetFlags,
)
from kdtree_jax.modes.options.generating import (
  AuditFlags,
  DemoFlags,
  GenerateFlags,
)
from kdtree_jax.modes.options.measuring import BenchAcceptanceFlags, BenchFlags

# In the order of the help page; `kdtree_jax/modes/NAME.py` implements each.
MODES: dict[str, type[ModeFlags]] = {
  options.mode: options
  for options in (
    DemoFlags,
    GenerateFlags,
    AuditFlags,
    BenchFlags,
    BenchAcceptanceFlags,
    InspectFlags,
    ConvertFlags,
    MakeBundleFlags,
    MakeCorpusFlags,
    TrainTargetFlags,
    TrainDrafterFlags,
  )
}

__all__ = (
  'MODES',
  'AuditFlags',
  'BenchAcceptanceFlags',
  'BenchFlags',
  'ConvertFlags',
  'DemoFlags',
  'Flag',
  'GenerateFlags',
  'InspectFlags',
  'MakeBundleFlags',
  'MakeCorpusFlags',
  'ModeFlags',
  'TrainDrafterFlags',
  'TrainTargetFlags',
  'flags_of',
)
