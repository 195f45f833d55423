"""Checkpoints of a run, and the line of metrics beside them."""

import contextlib
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import canonical_json, one_line, write_atomically
from kdtree_jax.io.results import write_jsonl

METRICS, RUN, CHECKPOINTS = 'metrics.jsonl', 'run.json', 'checkpoints'


class Run:
  """The folder of one run: what it is, its latest state, its metrics.

  An existing folder is continued, if it is one of the same run: same model,
  recipe and data.

  Attributes:
    folder: `run.json`, `metrics.jsonl`, `checkpoints/`.
    records: of `metrics.jsonl`, in order.
  """

  def __init__(self, folder: pathlib.Path, identity: Mapping[str, Any]):
    """Opens or makes the folder.

    Args:
      folder: of the run.
      identity: JSON that says what is trained on what.

    Raises:
      UserError: the folder holds another run or cannot be made.
    """
    self.folder, self.records = folder, []
    logging.getLogger('absl').setLevel(logging.WARNING)
    text = canonical_json(json.loads(json.dumps(identity)))
    path = folder / RUN
    try:
      folder.mkdir(parents=True, exist_ok=True)
      if path.exists() and path.read_text() != text:
        raise UserError(
          f'--output={folder}: holds a run of another model, recipe or '
          'corpus; choose another folder'
        )
      write_atomically(path, [text.encode()])
      if (folder / METRICS).exists():
        lines = (folder / METRICS).read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as e:
      raise UserError(f'--output={folder}: {one_line(e)}') from e
    options = ocp.CheckpointManagerOptions(
      max_to_keep=1, enable_async_checkpointing=False
    )
    self._manager = ocp.CheckpointManager(
      (folder / CHECKPOINTS).absolute(), options=options
    )

  def restore(self, state: Any) -> Any:
    """The latest state, or the one given where there is none.

    Drops metrics of steps that will be done again.
    """
    step = self._manager.latest_step()
    if step is None:
      self.records = []
      return state
    self.records = [r for r in self.records if r['step'] <= step]
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

  def save(self, step: int, state: Any) -> None:
    """Writes a checkpoint; older ones go when it is whole."""
    if self._manager.latest_step() != step:
      self._manager.save(step, args=ocp.args.StandardSave(state))
      self._manager.wait_until_finished()

  def log(self, record: Mapping[str, Any]) -> None:
    """Adds a record, which has a `step`, and rewrites `metrics.jsonl`."""
    plain = {key: _number(value) for key, value in record.items()}
    self.records.append(plain)
    write_jsonl(self.folder / METRICS, self.records)

  def close(self) -> None:
    """Ends what orbax runs beside the program."""
    with contextlib.suppress(Exception):
      self._manager.close()


def _number(value: Any) -> Any:
  """A JSON value; numbers with what float32 can tell, no more."""
  value = np.asarray(value)
  if value.dtype.kind != 'f':
    return value.tolist()
  digits = [float(f'{x:.6g}') for x in value.reshape(-1).tolist()]
  return digits[0] if value.ndim == 0 else digits
