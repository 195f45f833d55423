"""`--mode=convert`: a bundle to a checkpoint folder, or the other way."""

import pathlib

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.convert import read_checkpoint
from kdtree_jax.io.export import write_checkpoint
from kdtree_jax.io.files import one_line
from kdtree_jax.io.kdtr import read_bundle, write_bundle
from kdtree_jax.io.tensors import read_json
from kdtree_jax.modes.run_config import RunConfig, required, status

FLAGS = ('target', 'drafter', 'weights', 'output')
GENERATION_FILE = 'generation_config.json'
# Of a folder, what a bundle has no place for.
LEFT_BEHIND = (
  'tokenizer.json',
  'tiktoken.model',
  'tokenizer_config.json',
  'chat_template.jinja',
  GENERATION_FILE,
)
# Keys that say nothing, and the stop ids, which a bundle has.
CARRIED = {'eos_token_id', '_from_model_config', 'transformers_version'}


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
  for line in left_behind(source):
    print(line)
  return 0


def left_behind(source: pathlib.Path) -> list[str]:
  """A line for every file of a folder that is not carried over."""
  lines = []
  for name in LEFT_BEHIND:
    path = source / name
    if not path.is_file():
      continue
    what = ''
    if name == GENERATION_FILE:
      keys = sorted(set(read_json(path)) - CARRIED)
      if not keys:
        continue
      what = f': {one_line(", ".join(keys))}'
    lines.append(f'not carried over: {path}{what}')
  return lines


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
