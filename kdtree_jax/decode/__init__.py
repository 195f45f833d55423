"""The decoding loop: its state, one pure round, and the drivers of rounds."""

from kdtree_jax.decode.drivers import (
  GenerateResult,
  RoundRecord,
  stream,
)
from kdtree_jax.decode.engine import Engine
from kdtree_jax.decode.sampling import SamplingConfig
from kdtree_jax.decode.state import DecodeState, RoundStats, init_state

__all__ = (
  'DecodeState',
  'Engine',
  'GenerateResult',
  'RoundRecord',
  'RoundStats',
  'SamplingConfig',
  'init_state',
  'stream',
)
