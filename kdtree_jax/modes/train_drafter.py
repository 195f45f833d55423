"""`--mode=train_drafter`: trains a DFlash drafter for a target."""

import dataclasses
import pathlib
import shutil
import sys
import time
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kdtree_jax import api, generation
from kdtree_jax.config import DrafterConfig
from kdtree_jax.decode import SamplingConfig
from kdtree_jax.decode.drivers import decode_to_end
from kdtree_jax.decode.sampling import Sampling
from kdtree_jax.errors import UserError
from kdtree_jax.io.bundle import Bundle
from kdtree_jax.io.digests import weights_digest
from kdtree_jax.io.export import write_checkpoint
from kdtree_jax.io.huggingface import drafter_shapes
from kdtree_jax.io.paths import check_output
from kdtree_jax.modes.loading import check_pair, load_target
from kdtree_jax.modes.options import TrainDrafterFlags
from kdtree_jax.modes.status import status
from kdtree_jax.named_configs import load_recipe
from kdtree_jax.training.checkpoints import Run
from kdtree_jax.training.corpus import Corpus, read_corpus
from kdtree_jax.training.drafter import DraftTask, drafter_config
from kdtree_jax.training.loop import Data, Evaluation, fit
from kdtree_jax.training.packing import check_windows, window_starts
from kdtree_jax.training.recipe import DrafterRecipe
from kdtree_jax.training.rollouts import (
  choose_prompts,
  cut_loops,
  mix,
  num_added,
)
from kdtree_jax.training.streams import (
  as_ids,
  id_dtype,
  read_arrays,
  write_arrays,
)

# Name of the drafter's recipe in its file.
ATTRIBUTE = 'DRAFTER_RECIPE'
DRAFTER_FOLDER, ROLLOUTS = 'drafter', 'rollouts.npz'
# Most rollouts in one decoding loop.
ROWS = 1024


def run(flags: TrainDrafterFlags) -> int:
  """Trains in the folder `--output`, or continues its run."""
  output = pathlib.Path(flags.output)
  check_output(flags.output, folder=True)
  _, recipe = load_recipe(flags.recipe, ATTRIBUTE)
  recipe = recipe.with_steps(flags.train_steps)
  corpus = read_corpus(flags.corpus)
  prompts(recipe, corpus)
  target = load_target(flags.target, recipe.compute_dtype, flags.weights)
  records = train(target, corpus, recipe, output)
  for key, value in records[-1].items():
    if isinstance(value, float):
      print(f'{key}: {value:.4g}')
  print(f'wrote {output / DRAFTER_FOLDER}')
  return 0


def train(
  target: api.Target,
  corpus: Corpus,
  recipe: DrafterRecipe,
  output: pathlib.Path,
  stop_after: int | None = None,
) -> list[dict[str, Any]]:
  """Trains a drafter and writes it to `output/drafter`.

  Args:
    target: the target, in the recipe's dtype.
    corpus: a corpus in the target's tokens.
    recipe: the recipe of the training.
    output: folder of the run; continues an interrupted one.
    stop_after: total number of steps after which to end without a drafter.

  Returns:
    The records of `metrics.jsonl`. The last one is measured on the target's
    greedy continuations of prompts of the validation split.

  Raises:
    UserError: corpus, target and recipe do not fit, or the folder has another
      run.
  """
  check_pair(corpus, target)
  begins = prompts(recipe, corpus)
  config = drafter_config(recipe, target.config, corpus.mask)
  identity = {
    'mode': 'train_drafter',
    'target': target.config.to_dict(),
    'weights': weights_digest(target.params),
    'recipe': dataclasses.asdict(recipe),
    'corpus': corpus.identity('train', 'validation'),
  }
  folder = Run(output, identity)
  try:
    rollouts, greedy = _rollouts(target, begins, recipe, output)
    data = Data(
      train=mix(
        # Rollouts may have ids that the corpus lacks.
        corpus.tokens('train').astype(id_dtype(target.config.vocab_size)),
        [row for rows in rollouts for row in cut_loops(rows)],
        recipe.rollout_share,
        corpus.end_of_text,
        recipe.seed,
      ),
      validation=corpus.tokens('validation'),
      end_of_text=corpus.end_of_text,
    )
    task = DraftTask(recipe, target.config, config)
    state = fit(
      task,
      recipe,
      data,
      folder,
      constants=target.params,
      stop_after=stop_after,
      title='train_drafter',
    )
    measured = any('greedy_divergence' in r for r in folder.records)
    if int(state.step) == recipe.steps and not measured:
      validate = Evaluation(task, recipe, data.end_of_text)
      stream = _windows(greedy, recipe.sequence_length, data)
      found = validate(state.params, stream, target.params, limit=len(greedy))
      found = {f'greedy_{key}': value for key, value in found.items()}
      write_drafter(
        output / DRAFTER_FOLDER, config, state.params, recipe, target
      )
      folder.log({'step': recipe.steps, **found})
    return folder.records
  finally:
    folder.close()


def _windows(greedy: np.ndarray, length: int, data: Data) -> np.ndarray:
  """A stream of rollouts `[N, T]`, each padded to a window of `length` tokens.

  The stream has a label after the last window, and the length of the validation
  stream, to use the same program. The padding begins with an end of text that
  the target did not generate, which makes one label in T wrong.
  """
  missing = length - greedy.shape[1]
  windows = np.pad(
    greedy, ((0, 0), (0, missing)), constant_values=data.end_of_text
  )
  tokens = max(windows.size + 1, len(data.validation))
  stream = np.full(tokens, data.end_of_text, greedy.dtype)
  stream[: windows.size] = windows.reshape(-1)
  return stream


class Prompts(NamedTuple):
  """Prompts of rollouts.

  Attributes:
    train: for each length in `recipe.prompt_tokens`, an array `[N, length]`
      from the train split; N is the same for all.
    validation: `[N, recipe.prompt_tokens[0]]` from the validation split.
  """

  train: list[np.ndarray]
  validation: np.ndarray


def prompts(recipe: DrafterRecipe, corpus: Corpus) -> Prompts:
  """Samples the prompts and checks the corpus before any work.

  Raises:
    UserError: the corpus is too small, or its documents are too short.
  """
  train, validation = corpus.tokens('train'), corpus.tokens('validation')
  length, count = recipe.sequence_length, len(train)
  if recipe.rollouts:
    count += num_added(count, recipe.rollout_share)
  window_starts(count, length, recipe.batch_size, 0, recipe.seed)
  check_windows(len(validation), length, 'validation')
  lengths, end = recipe.prompt_tokens, corpus.end_of_text
  share = -(-recipe.rollouts // len(lengths))
  return Prompts(
    [
      choose_prompts(train, end, share, tokens, recipe.seed + number)
      for number, tokens in enumerate(lengths)
    ],
    choose_prompts(
      validation, end, recipe.validation_rollouts, lengths[0], recipe.seed
    ),
  )


def _rollouts(
  target: api.Target,
  begins: Prompts,
  recipe: DrafterRecipe,
  output: pathlib.Path,
) -> tuple[list[np.ndarray], np.ndarray]:
  """Rollouts for training, by prompt length, and greedy ones for validation.

  Stored in the run's folder, so that a continued run has the same.
  """
  path, lengths = output / ROLLOUTS, recipe.prompt_tokens
  names = [f'train_{number}' for number in range(len(lengths))]
  wanted = dict(zip(names, begins.train, strict=True))
  wanted['validation'] = begins.validation
  if path.exists():
    found = _stored(path, wanted, recipe, target.config.vocab_size)
    return [found[name] for name in names], found['validation']
  share = len(begins.train[0])
  most = max(share, recipe.validation_rollouts)
  roller = Roller(target, max(lengths) + recipe.rollout_tokens, min(ROWS, most))
  count = recipe.rollout_tokens
  train = [
    roller(rows, count, recipe.temperatures, (recipe.seed + number) * share)
    for number, rows in enumerate(begins.train)
  ]
  validation = roller(begins.validation, count, (0.0,), recipe.seed * share)
  arrays = dict(zip(names, train, strict=True))
  write_arrays(path, {'validation': validation, **arrays})
  return train, validation


def _stored(
  path: pathlib.Path,
  starts: dict[str, np.ndarray],
  recipe: DrafterRecipe,
  vocab_size: int,
) -> dict[str, np.ndarray]:
  """The rollouts in a file, checked to continue these prompts.

  Raises:
    UserError: the file is damaged, or has another corpus, recipe or target.
  """
  arrays = read_arrays(path)
  for name, rows in starts.items():
    found = arrays.get(name, np.zeros(0))
    shape = (len(rows), rows.shape[1] + recipe.rollout_tokens)
    same = found.shape == shape and found.dtype == id_dtype(vocab_size)
    if not same or not np.array_equal(found[:, : rows.shape[1]], rows):
      raise UserError(
        f'{path}: {name} does not continue the prompts of this run; delete '
        'the file to make it again'
      )
    as_ids(found, vocab_size, str(path))
  return arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Roller:
  """A function that continues prompts in large batches of one program.

  Attributes:
    target: the target.
    capacity: most tokens of prompt and continuation.
    rows: prompts in a batch.
  """

  target: api.Target
  capacity: int
  rows: int

  def __call__(
    self,
    prompts: np.ndarray,
    num_tokens: int,
    temperatures: tuple[float, ...],
    seed: int,
  ) -> np.ndarray:
    """Prompts with their continuations, `[N, P + num_tokens]`.

    Nothing stops a row, not even an end of text.

    Args:
      prompts: token ids `[N, P]`.
      num_tokens: number of tokens to add to each.
      temperatures: temperatures, which the rows use in turn.
      seed: seed of the first row; row i has seed + i, modulo 2^32.

    Returns:
      An array of the type `id_dtype` for the target's vocabulary.
    """
    vocab_size = self.target.config.vocab_size
    count, length = prompts.shape
    empty = np.zeros((0, length + num_tokens), id_dtype(vocab_size))
    parts = [empty]
    begin = time.perf_counter()
    for first in range(0, count, self.rows):
      # The last batch is padded.
      rows = np.arange(first, first + self.rows) % count
      with status(f'rollouts: {first} of {count}'):
        tokens = self._batch(
          prompts[rows], rows, num_tokens, temperatures, seed
        )
      tokens = tokens[:, : length + num_tokens]
      parts.append(as_ids(tokens, vocab_size, 'rollouts'))
    seconds = time.perf_counter() - begin
    rate = count * num_tokens / max(seconds, 1e-9)
    print(
      f'{count} rollouts in {seconds:.1f} s, {rate:.0f} tokens/s',
      file=sys.stderr,
      flush=True,
    )
    return np.concatenate(parts)[:count]

  def _batch(self, prompts, rows, num_tokens, temperatures, seed):
    made = generation.prepare(
      self.target,
      None,
      prompts,
      generation.GenerateOptions(
        max_new_tokens=num_tokens,
        stop_ids=(),
        capacity=self.capacity,
        # Above 0 to get the program that samples; each row has its own.
        temperature=1.0,
      ),
    )
    requests = [
      SamplingConfig(
        temperature=temperatures[row % len(temperatures)],
        seed=(seed + int(row)) % 2**32,
      )
      for row in rows
    ]
    state = made.state.replace(sampling=Sampling.of(requests))
    state, _ = decode_to_end(made.engine, made.params, state)
    return np.asarray(state.tokens)


def drafter_tensors(
  config: DrafterConfig, params: Any, dtype: Any
) -> dict[str, np.ndarray]:
  """Parameters by their names in z-lab's checkpoints."""
  tensors = {}
  for name in drafter_shapes(config):
    value = params
    for part in name.replace('layers.', 'layers_').split('.'):
      value = value[part]
    tensors[name] = np.asarray(value).astype(dtype)
  return tensors


def write_drafter(
  folder: pathlib.Path,
  config: DrafterConfig,
  params: Any,
  recipe: DrafterRecipe,
  target: api.Target,
) -> None:
  """Writes or replaces a folder for `--drafter`.

  Its recipe names the target, which is checked when it is loaded.
  """
  dtypes = {'bfloat16': ml_dtypes.bfloat16, 'float32': np.float32}
  dtype = dtypes[recipe.compute_dtype]
  bundle = Bundle(
    name=folder.parent.name,
    config=None,
    target=None,
    golden={},
    drafter_config=config,
    drafter=drafter_tensors(config, params, dtype),
    recipe=dataclasses.asdict(recipe) | {'target': api.trained_for(target)},
  )
  shutil.rmtree(folder, ignore_errors=True)
  write_checkpoint(folder, bundle)
