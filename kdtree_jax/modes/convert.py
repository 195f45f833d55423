"""`--mode=convert`: a bundle to a checkpoint folder, or the other way."""

import pathlib

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.convert import read_checkpoint
from kdtree_jax.io.export import write_checkpoint
from kdtree_jax.io.kdtr import read_bundle, write_bundle
from kdtree_jax.modes.run_config import RunConfig, required, status

FLAGS = ('target', 'drafter', 'weights', 'output')


def run(config: RunConfig) -> int:
  """Writes `--output`: a `.kdtr` file of a folder, a folder of a bundle."""
  source = pathlib.Path(required(config.target, 'target', 'convert'))
  output = pathlib.Path(required(config.output, 'output', 'convert'))
  if not source.exists():
    raise UserError(f'--target={source}: no such file or folder')
  with status(f'converting {source}'):
    if source.is_dir():
      _to_bundle(config, source, output)
    else:
      _to_folder(config, source, output)
  print(f'wrote {output}')
  return 0


def _to_bundle(
  config: RunConfig, source: pathlib.Path, output: pathlib.Path
) -> None:
  if output.suffix != '.kdtr':
    raise UserError(f'--output={output}: a bundle is a .kdtr file')
  expanded = api.DTYPES.get(config.weights or 'as_stored')
  bundle = read_checkpoint(source, expanded=expanded, drafter=config.drafter)
  write_bundle(output, bundle)


def _to_folder(
  config: RunConfig, source: pathlib.Path, output: pathlib.Path
) -> None:
  for flag in ('weights', 'drafter'):
    if getattr(config, flag) is not None:
      raise UserError(f'--{flag} is not used to convert a bundle')
  if output.suffix == '.kdtr':
    raise UserError(f'--output={output}: a bundle is converted to a folder')
  write_checkpoint(output, read_bundle(source))
