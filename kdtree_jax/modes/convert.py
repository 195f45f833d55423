"""`--mode=convert`: a bundle to a checkpoint folder, or back."""

import pathlib

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.convert import read_checkpoint, read_drafter
from kdtree_jax.io.export import (
  check_new_folder,
  read_extra,
  write_checkpoint,
)
from kdtree_jax.io.files import file_kind, one_line
from kdtree_jax.io.kdtr import read_bundle, write_bundle
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.tensors import read_json
from kdtree_jax.modes.options import ConvertFlags
from kdtree_jax.modes.status import status

GENERATION_FILE = 'generation_config.json'
# Stop ids, which a bundle has, and keys without an effect.
CARRIED = {'eos_token_id', '_from_model_config', 'transformers_version'}


def run(flags: ConvertFlags) -> int:
  """Converts a folder to a `.kdtr` file, or a bundle to a folder.

  Without `--target` the file has the drafter alone.
  """
  flag = 'drafter' if flags.target is None else 'target'
  source = pathlib.Path(getattr(flags, flag))
  output = pathlib.Path(flags.output)
  kind = file_kind(source)
  if kind is None:
    raise UserError(f'--{flag}={source}: no such file or folder')
  with status(f'converting {source}'):
    if kind == 'folder':
      _to_bundle(flags, source, output)
    else:
      _to_folder(flags, source, output)
  print(f'wrote {output}')
  for line in left_behind(source):
    print(line)
  return 0


def left_behind(source: pathlib.Path) -> list[str]:
  """A line that names settings of a folder that are not carried over."""
  path = source / GENERATION_FILE
  if file_kind(path) != 'file':
    return []
  keys = sorted(set(read_json(path)) - CARRIED)
  text = f'not carried over: {path}: {one_line(", ".join(keys))}'
  return [text] if keys else []


def _to_bundle(
  flags: ConvertFlags, source: pathlib.Path, output: pathlib.Path
) -> None:
  if output.suffix != '.kdtr':
    raise UserError(f'--output={output}: a bundle is a .kdtr file')
  check_output(str(output))
  dtype = api.DTYPES.get(flags.weights)
  if flags.target is None:
    bundle = read_drafter(source, dtype=dtype)
  else:
    _check_pair(flags.drafter, source)
    bundle = read_checkpoint(source, expanded=dtype, drafter=flags.drafter)
  write_bundle(output, bundle)


def _check_pair(drafter: str | None, source: pathlib.Path) -> None:
  """Refuses a drafter whose recipe names another target."""
  if drafter is None:
    return
  _, recipe, _ = read_extra(pathlib.Path(drafter), drafter)
  if 'target' in recipe:
    api.load_drafter(drafter, api.load_target(source))


def _to_folder(
  flags: ConvertFlags, source: pathlib.Path, output: pathlib.Path
) -> None:
  unused = ['weights'] if flags.target is None else ['weights', 'drafter']
  flags.refuse(unused, 'is not used to convert a bundle')
  if output.suffix == '.kdtr':
    raise UserError(f'--output={output}: a bundle is converted to a folder')
  check_new_folder(output)
  check_output(str(output), folder=True)
  write_checkpoint(output, read_bundle(source))
