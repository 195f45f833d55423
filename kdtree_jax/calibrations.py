"""Files with a correction of a drafter's probabilities to start from."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np

from kdtree_jax.api import LoadedDrafter
from kdtree_jax.decode.calibration import Calibration, neutral
from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import short, weights_digest
from kdtree_jax.io.files import (
  StrPath,
  parse_json,
  reason,
  write_atomically,
)

FORMAT = 'kdtree_jax calibration 1'


def drafter_digest(drafter: LoadedDrafter) -> str:
  """The digest of a drafter's weights, the same for every dtype."""
  return weights_digest(drafter.params, rounded=True)


def read_calibration(path: StrPath, drafter: LoadedDrafter) -> Calibration:
  """A drafter's correction from a file.

  Raises:
    UserError: the file is none, or is of another drafter.
  """
  try:
    content = parse_json(pathlib.Path(path).read_bytes())
  except (OSError, ValueError) as error:
    raise UserError(f'calibration={path}: {reason(error)}') from None
  if not isinstance(content, dict) or content.get('format') != FORMAT:
    raise UserError(
      f'calibration={path} is no calibration of --mode=bench_acceptance'
    )
  digest = drafter_digest(drafter)
  if content.get('drafter') != digest:
    raise UserError(
      f'calibration={path} is of another drafter, '
      f'{short(str(content.get("drafter")))}, not {short(digest)}'
    )
  found = {}
  for field in dataclasses.fields(Calibration):
    wanted = getattr(neutral(), field.name).shape
    try:
      values = np.array(content[field.name], np.float32)
    except (KeyError, ValueError, TypeError):
      values = np.zeros(())
    if values.shape != wanted or not np.isfinite(values).all():
      raise UserError(
        f'calibration={path}: {field.name} is not of finite numbers in the '
        f'shape {list(wanted)}'
      )
    found[field.name] = jnp.asarray(values)
  return Calibration(**found)


def write_calibration(
  path: StrPath,
  calibration: Calibration,
  drafter: LoadedDrafter,
  errors: dict[str, float],
) -> None:
  """Writes a correction, whole or not at all.

  Args:
    path: the file.
    calibration: the correction.
    drafter: the drafter that it corrects.
    errors: expected calibration errors, for people who read the file.
  """
  content = {
    'format': FORMAT,
    'drafter': drafter_digest(drafter),
    'name': pathlib.Path(drafter.name).name,
    'expected_calibration_error': errors,
  }
  for field in dataclasses.fields(Calibration):
    content[field.name] = np.asarray(getattr(calibration, field.name)).tolist()
  write_atomically(path, [(json.dumps(content, indent=1) + '\n').encode()])
