"""Loading for modes: a progress bar, and warnings about a drafter."""

import contextlib
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence

import rich.console
import rich.progress

from kdtree_jax import api
from kdtree_jax.decode import GenerateResult
from kdtree_jax.io.huggingface import Progress
from kdtree_jax.modes.options.shared import DrafterFlags, TargetFlags
from kdtree_jax.modes.status import status
from kdtree_jax.named_configs import load_config
from kdtree_jax.training.corpus import Corpus

# Rounds in a row without an accepted token, after which the drafter is
# probably one for another target.
PATIENCE = 32


@contextlib.contextmanager
def loading(path: str) -> Iterator[Progress | None]:
  """A progress bar of bytes on a terminal, nothing elsewhere.

  Args:
    path: a file, or a folder of safetensors files.

  Yields:
    A function of the number of bytes just read, or None.
  """
  if not sys.stderr.isatty():
    yield None
    return
  columns = (
    rich.progress.TextColumn('loading {task.description}'),
    rich.progress.BarColumn(),
    rich.progress.DownloadColumn(),
    rich.progress.TransferSpeedColumn(),
    rich.progress.TimeRemainingColumn(),
  )
  console = rich.console.Console(stderr=True)
  bar = rich.progress.Progress(*columns, console=console, transient=True)
  with bar:
    task = bar.add_task(path, total=_size(pathlib.Path(path)))
    yield lambda count: bar.advance(task, count)


def _size(path: pathlib.Path) -> int | None:
  try:
    files = path.glob('*.safetensors') if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files) or None
  except OSError:
    return None


def load_target(path: str, dtype: str, weights: str) -> api.Target:
  """`api.load_target` with a progress bar."""
  with loading(path) as progress:
    return api.load_target(path, dtype, weights, progress)


def target_of(flags: TargetFlags, dtype: str) -> api.Target:
  """The target of `--target` or `--config`."""
  if flags.target is not None:
    return load_target(flags.target, dtype, flags.weights)
  with status('making random weights'):
    assert flags.config is not None  # Checked by TargetFlags.
    return api.random_target(flags.config, dtype, flags.layers)


def check_config(flags: TargetFlags) -> None:
  """Checks the file of `--config` before other work."""
  if flags.config is not None:
    load_config(flags.config)


def load_drafter(
  flags: DrafterFlags,
  name: str,
  target: api.Target,
  acceptance_rate: float | None = None,
) -> api.LoadedDrafter:
  """The drafter of `--drafter`, with a message on a terminal."""
  with status('loading the drafter'):
    return api.load_drafter(
      name,
      target,
      flags.block_size,
      flags.drafter_attention_factor,
      acceptance_rate,
    )


def check_pair(corpus: Corpus, target: api.Target) -> None:
  """Checks that a corpus is in the target's tokens.

  Warns if the target has no tokenizer to compare.

  Raises:
    UserError: it is not; names both.
  """
  corpus.check_vocabulary(target.config.vocab_size)
  corpus.check_tokenizer(target.tokenizer, target.name)
  if not target.tokenizer:
    print(
      f'warning: the target {target.name} has no tokenizer, so it is '
      f'not checked that --corpus={corpus.folder} is in its tokens',
      file=sys.stderr,
    )


def mismatch(
  drafter: api.LoadedDrafter | None, results: Sequence[GenerateResult]
) -> str | None:
  """A warning if no draft was accepted in `PATIENCE` rounds in a row.

  None for stubs and untrained drafters, which have names instead of paths.
  """
  if drafter is None or not pathlib.Path(drafter.name).exists():
    return None
  for result in results:
    drafted = [
      length
      for length, nodes in zip(
        result.acceptance_lengths, result.num_nodes, strict=True
      )
      if nodes > 1
    ]
    for length, run in itertools.groupby(drafted):
      rounds = len(list(run))
      if length == 1 and rounds >= PATIENCE:
        return (
          f'warning: not one token of drafter {drafter.name} was accepted in '
          f'{rounds} rounds; was it trained for this target?'
        )
  return None


def ends_early(
  target: api.Target,
  drafter: api.LoadedDrafter | None,
  results: Sequence[GenerateResult],
) -> str | None:
  """A warning if texts are longer than the drafter's positions.

  None if the target has no more positions than the drafter.
  """
  if drafter is None:
    return None
  positions = drafter.drafter.max_positions
  if positions is None or positions >= target.config.max_position_embeddings:
    return None
  alone = sum(
    result.target_forwards - drafted_rounds(drafter, result)
    for result in results
  )
  if not alone:
    return None
  return (
    f'warning: drafter {drafter.name} drafts within its first {positions} '
    f'positions (max_position_embeddings); {alone} tokens beyond them were '
    'decoded by the target alone'
  )


def drafted_rounds(
  drafter: api.LoadedDrafter | None, result: GenerateResult
) -> int:
  """The number of rounds that drafted."""
  if drafter is None:
    return 0
  if result.prices:
    # While drafting pauses, a step costs what AR's does.
    return sum(price.ms != price.ar_ms for price in result.prices)
  positions, lengths = drafter.drafter.max_positions, result.acceptance_lengths
  if positions is None:
    return len(lengths)
  starts = itertools.accumulate(lengths, initial=len(result.prompt_ids))
  pairs = zip(starts, lengths, strict=False)
  return sum(start + drafter.block_size <= positions for start, _ in pairs)
