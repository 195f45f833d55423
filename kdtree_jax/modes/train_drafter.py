"""`--mode=train_drafter`: a DFlash drafter for a target, from a corpus."""

import dataclasses
import hashlib
import pathlib
import shutil
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np

from kdtree_jax import api, generation
from kdtree_jax.config import DrafterConfig
from kdtree_jax.decode import SamplingConfig
from kdtree_jax.decode.generate import generate
from kdtree_jax.decode.sampling import Sampling
from kdtree_jax.errors import UserError
from kdtree_jax.io.bundle import Bundle
from kdtree_jax.io.export import write_checkpoint
from kdtree_jax.io.files import canonical_json
from kdtree_jax.io.huggingface import drafter_shapes
from kdtree_jax.modes.loading import loading
from kdtree_jax.modes.run_config import RunConfig, required, status
from kdtree_jax.training.checkpoints import Run
from kdtree_jax.training.corpus import Corpus, read_corpus
from kdtree_jax.training.drafter import DraftTask, drafter_config
from kdtree_jax.training.loop import Data, Evaluation, fit
from kdtree_jax.training.recipe import DrafterRecipe, load_recipe
from kdtree_jax.training.rollouts import choose_prompts, cut_loops, mix

FLAGS = ('target', 'weights', 'corpus', 'recipe', 'train_steps', 'output')
# What a recipe's file calls the drafter's.
ATTRIBUTE = 'DRAFTER_RECIPE'
DRAFTER_FOLDER, ROLLOUTS = 'drafter', 'rollouts.npz'
# Rollouts in one decoding loop.
ROWS = 1024


def run(config: RunConfig) -> int:
  """Trains, or continues, the run in `--output`."""
  path, corpus, name, output = (
    required(getattr(config, flag), flag, 'train_drafter')
    for flag in ('target', 'corpus', 'recipe', 'output')
  )
  _, recipe = load_recipe(name, ATTRIBUTE)
  recipe = recipe.with_steps(config.train_steps)
  read = read_corpus(corpus)
  with loading(path) as progress:
    target = api.load_target(
      path, recipe.compute_dtype, config.weights or 'as_stored', progress
    )
  records = train(target, read, recipe, pathlib.Path(output))
  for key, value in records[-1].items():
    if isinstance(value, float):
      print(f'{key}: {value:.4g}')
  print(f'wrote {pathlib.Path(output) / DRAFTER_FOLDER}')
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
    target: in the recipe's dtype.
    corpus: of the target's tokens.
    recipe: how.
    output: folder of the run; one that was interrupted is continued.
    stop_after: ends after so many steps in all, without a drafter.

  Returns:
    The records of `metrics.jsonl`. The last one is measured on greedy
    continuations that the target gives to prompts of the validation split.

  Raises:
    UserError: corpus, target and recipe do not fit each other.
  """
  if corpus.vocab_size > target.config.vocab_size:
    raise UserError(
      f'--corpus={corpus.folder}: its tokenizer has {corpus.vocab_size} '
      f'tokens, the target {target.config.vocab_size}'
    )
  config = drafter_config(recipe, target.config, corpus.mask)
  identity = {
    'mode': 'train_drafter',
    'target': [target.config.to_dict(), fingerprint(target)],
    'recipe': dataclasses.asdict(recipe),
    'corpus': hashlib.sha256(
      canonical_json(corpus.manifest).encode()
    ).hexdigest(),
  }
  folder = Run(output, identity)
  try:
    rollouts, greedy = _rollouts(target, corpus, recipe, output)
    data = Data(
      train=mix(
        corpus.tokens('train'),
        cut_loops(rollouts),
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
      # A window has a label behind it; and as long as the other stream is, it
      # is the same program.
      stream = np.zeros(max(greedy.size + 1, len(data.validation)), np.uint16)
      stream[: greedy.size] = greedy.reshape(-1)
      found = validate(state.params, stream, target.params, limit=len(greedy))
      found = {f'greedy_{key}': value for key, value in found.items()}
      write_drafter(output / DRAFTER_FOLDER, config, state.params, recipe)
      folder.log({'step': recipe.steps, **found})
    return folder.records
  finally:
    folder.close()


def fingerprint(target: api.Target) -> str:
  """Tells two trainings of one architecture apart by their last norm."""
  norm = np.asarray(target.params['norm']['weight'], np.float32)
  return hashlib.sha256(norm.tobytes()).hexdigest()


def _rollouts(
  target: api.Target,
  corpus: Corpus,
  recipe: DrafterRecipe,
  output: pathlib.Path,
) -> tuple[np.ndarray, np.ndarray]:
  """Rollouts to train on, and greedy ones of the validation split.

  Kept in the run's folder, so that a run that is continued has the same.
  """
  path = output / ROLLOUTS
  if path.exists():
    with np.load(path) as arrays:
      return arrays['train'], arrays['validation']
  length = recipe.prompt_tokens
  tokens = max(recipe.rollout_tokens, recipe.sequence_length - length)
  counts = (recipe.rollouts, recipe.validation_rollouts)
  # One program for both.
  roller = Roller(target, length + tokens, min(ROWS, max(counts)))
  found = []
  for split, count, temperatures in (
    ('train', recipe.rollouts, recipe.temperatures),
    ('validation', recipe.validation_rollouts, (0.0,)),
  ):
    end, stream = corpus.end_of_text, corpus.tokens(split)
    prompts = choose_prompts(stream, end, count, length, recipe.seed)
    new = recipe.rollout_tokens
    if split == 'validation':
      new = recipe.sequence_length - length
    found.append(roller(prompts, new, temperatures, recipe.seed))
  temporary = output / f'.{ROLLOUTS}'
  with open(temporary, 'wb') as file:
    np.savez_compressed(file, train=found[0], validation=found[1])
  temporary.rename(path)
  return found[0], found[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Roller:
  """Continues prompts in large batches, all by one program.

  Attributes:
    target: whose distributions.
    capacity: most tokens of prompt and continuation.
    rows: prompts at once.
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
    """`[N, P]` prompts with `num_tokens` more: `[N, P + num_tokens]` uint16.

    Nothing stops a row, an end of text neither.

    Args:
      prompts: token ids.
      num_tokens: to add to each.
      temperatures: of the rows in turn.
      seed: of the first row; row i has seed + i.
    """
    count, length = prompts.shape
    parts = [np.zeros((0, length + num_tokens), np.uint16)]
    begin = time.perf_counter()
    for first in range(0, count, self.rows):
      # The last batch is filled up.
      rows = np.arange(first, first + self.rows) % count
      with status(f'rollouts: {first} of {count}'):
        tokens = self._batch(
          prompts[rows], rows, num_tokens, temperatures, seed
        )
      parts.append(tokens[:, : length + num_tokens].astype(np.uint16))
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
      None,
      {
        'max_new_tokens': num_tokens,
        'stop_ids': (),
        'capacity': self.capacity,
        # Any above 0: the program that draws; each row has its own.
        'temperature': 1.0,
      },
    )
    requests = [
      SamplingConfig(
        temperature=temperatures[row % len(temperatures)], seed=seed + int(row)
      )
      for row in rows
    ]
    state = made.state.replace(sampling=Sampling.of(requests))
    state, _ = generate(made.engine, made.params, state)
    return np.asarray(state.tokens)


def drafter_tensors(
  config: DrafterConfig, params: Any, dtype: Any
) -> dict[str, np.ndarray]:
  """Parameters under the names that z-lab's checkpoints have."""
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
) -> None:
  """Writes, or replaces, a folder that `--drafter` loads."""
  dtypes = {'bfloat16': ml_dtypes.bfloat16, 'float32': np.float32}
  dtype = dtypes[recipe.compute_dtype]
  bundle = Bundle(
    name=folder.parent.name,
    config=None,
    target=None,
    golden={},
    drafter_config=config,
    drafter=drafter_tensors(config, params, dtype),
    recipe=dataclasses.asdict(recipe),
  )
  shutil.rmtree(folder, ignore_errors=True)
  write_checkpoint(folder, bundle)
