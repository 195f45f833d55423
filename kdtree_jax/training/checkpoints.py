"""The folder of a training run: checkpoints and metrics."""

import contextlib
import errno
import json
import logging
import os
import pathlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import (
  JsonObject,
  canonical_json,
  one_line,
  parse_json,
  show,
  write_atomically,
)
from kdtree_jax.io.results import read_jsonl, write_jsonl

METRICS, RUN, CHECKPOINTS = 'metrics.jsonl', 'run.json', 'checkpoints'


class TrainingRun:
  """The folder of one training run: its identity, latest state and metrics.

  An existing folder is continued, if model, recipe and data are the same.

  Attributes:
    folder: holds `run.json`, `metrics.jsonl` and `checkpoints/`.
    records: the records of `metrics.jsonl`, in order.
  """

  def __init__(self, folder: pathlib.Path, identity: JsonObject):
    """Opens or makes the folder.

    Args:
      folder: the run's folder.
      identity: model, recipe and data, as JSON.

    Raises:
      UserError: the folder holds another run or cannot be made.
    """
    self.folder = folder
    self.records: list[JsonObject] = []
    logging.getLogger('absl').setLevel(logging.WARNING)
    text = canonical_json(json.loads(json.dumps(identity)))
    path = folder / RUN
    try:
      folder.mkdir(parents=True, exist_ok=True)
      if path.exists() and path.read_text() != text:
        raise UserError(
          f'--output={folder}: holds a run of another model, recipe or '
          f'corpus{_differences(path.read_bytes(), text)}; choose another '
          'folder'
        )
      write_atomically(path, [text.encode()])
      if (folder / METRICS).exists():
        lines = read_jsonl(folder / METRICS)
        self.records = [_record(line, number) for number, line in lines]
    except UserError:
      raise
    except (OSError, ValueError) as e:
      raise UserError(f'--output={folder}: {one_line(e)}') from e
    options = ocp.CheckpointManagerOptions(
      max_to_keep=1, enable_async_checkpointing=False
    )
    self._manager = ocp.CheckpointManager(
      (folder / CHECKPOINTS).absolute(), options=options
    )

  def restore(self, state: Any) -> Any:
    """The latest saved state, or the given one if there is none.

    Drops metrics of steps that will be done again.
    """
    step = self._manager.latest_step()
    if step is None:
      self.records = []
      return state
    self.records = [r for r in self.records if r['step'] <= step]
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with self._one_line_errors(step, 'read'):
      found = self._manager.restore(
        step, args=ocp.args.StandardRestore(abstract)
      )
    # By way of the host: committed to no device, as a new state is, the state
    # fits the programs that are compiled already.
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), found)

  def save(self, step: int, state: Any) -> None:
    """Writes a checkpoint; older ones are then removed."""
    if self._manager.latest_step() != step:
      with self._one_line_errors(step, 'written'):
        self._manager.save(step, args=ocp.args.StandardSave(state))
        self._manager.wait_until_finished()

  @contextlib.contextmanager
  def _one_line_errors(self, step: int, done: str) -> Generator[None]:
    """Turns what orbax raises and logs into one line."""
    logger = logging.getLogger('absl')
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
      yield
    except Exception as e:  # Orbax raises many types.
      text, full = one_line(e), os.strerror(errno.ENOSPC)
      reason = full if full in text else show(text, 200)
      raise UserError(
        f'{self.folder / CHECKPOINTS / str(step)}: cannot be {done}: {reason}'
      ) from e
    finally:
      logger.setLevel(level)

  def log(self, record: JsonObject) -> None:
    """Adds a record, which has a `step`, and rewrites `metrics.jsonl`.

    Raises:
      UserError: a value is not finite, or the file cannot be written.
    """
    check_metrics(int(record['step']), record)
    plain = {key: _number(value) for key, value in record.items()}
    self.records.append(plain)
    write_jsonl(self.folder / METRICS, self.records)

  def close(self) -> None:
    """Ends the threads of orbax."""
    with contextlib.suppress(Exception):
      self._manager.close()


def _record(record: object, number: int) -> JsonObject:
  if not isinstance(record, dict) or type(record.get('step')) is not int:
    raise ValueError(f'{METRICS}: line {number} is no record of a step')
  return record


def check_metrics(step: int, record: JsonObject) -> None:
  """Refuses metrics of a run that diverged.

  Raises:
    UserError: names the step and the value.
  """
  for key, value in record.items():
    value = np.asarray(value)
    if value.dtype.kind == 'f' and not np.isfinite(value).all():
      odd = value[~np.isfinite(value)].reshape(-1)[0]
      raise UserError(
        f'the run diverged: {key} is {odd} at step {step}; lower the '
        "recipe's learning_rate or raise its warmup_steps"
      )


def _differences(there: bytes, text: str) -> str:
  """The differences of two identities, in brackets."""
  theirs, ours = _flat(parse_json(there)), _flat(json.loads(text))
  parts = [
    f'{key} is {show(theirs.get(key), 20)} there and '
    f'{show(ours.get(key), 20)} here'
    for key in sorted({*theirs, *ours})
    if theirs.get(key) != ours.get(key)
  ]
  shown = ', '.join(parts[:4] + ['...'] * (len(parts) > 4))
  return f' ({shown})' if parts else ''


def _flat(value: object) -> JsonObject:
  """The keys of an object, those of objects in it as `key.inner`."""
  flat: JsonObject = {}
  for key, item in value.items() if isinstance(value, dict) else ():
    inner = item.items() if isinstance(item, dict) else [('', item)]
    flat |= {f'{key}.{k}'.rstrip('.'): v for k, v in inner}
  return flat


def _number(value: object) -> object:
  """A value as JSON, floats rounded to six digits."""
  value = np.asarray(value)
  if value.dtype.kind != 'f':
    return value.tolist()
  digits = [float(f'{x:.6g}') for x in value.reshape(-1).tolist()]
  return digits[0] if value.ndim == 0 else digits
