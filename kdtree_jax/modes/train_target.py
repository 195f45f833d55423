"""`--mode=train_target`: trains the model of a recipe on a corpus."""

import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kdtree_jax.config import ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.huggingface import num_parameters
from kdtree_jax.io.kdtr import Bundle, write_bundle
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.unload import target_tensors
from kdtree_jax.modes.options import TrainTargetFlags
from kdtree_jax.named_configs import load_recipe
from kdtree_jax.training.checkpoints import METRICS, Run
from kdtree_jax.training.corpus import SPLITS, TOKENIZER, Corpus, read_corpus
from kdtree_jax.training.loop import Data, Evaluation, fit
from kdtree_jax.training.packing import (
  check_windows,
  window_starts,
)
from kdtree_jax.training.recipe import TrainRecipe
from kdtree_jax.training.target import TargetTask

BUNDLE = 'target.kdtr'


def run(flags: TrainTargetFlags) -> int:
  """Trains in the folder `--output`, or continues its run."""
  name, output = flags.recipe, pathlib.Path(flags.output)
  check_output(flags.output, folder=True)
  model, recipe = load_recipe(name)
  recipe = recipe.with_steps(flags.train_steps)
  corpus = read_corpus(flags.corpus)
  path = train(name, model, recipe, corpus, output)
  print(f'wrote {path}')
  return 0


def train(
  name: str,
  model: ModelConfig,
  recipe: TrainRecipe,
  corpus: Corpus,
  output: pathlib.Path,
) -> pathlib.Path:
  """Trains a model, writes its bundle and evaluates it on the test split.

  Args:
    name: name of the bundle.
    model: the model.
    recipe: the recipe of the training.
    corpus: the corpus.
    output: folder of the run.

  Returns:
    The path of the bundle.

  Raises:
    UserError: model and corpus do not fit, or the folder has another run.
  """
  check_fit(model, recipe, corpus)
  run_folder = Run(output, run_identity(model, recipe, corpus))
  try:
    return _train(name, model, recipe, corpus, run_folder)
  finally:
    run_folder.close()


def check_fit(model: ModelConfig, recipe: TrainRecipe, corpus: Corpus) -> None:
  """Checks that model, recipe and corpus fit, before hours of training.

  Raises:
    UserError: the vocabulary, the stop id or a length does not fit, or a split
      is too short for the recipe.
  """
  if corpus.vocab_size != model.vocab_size:
    raise UserError(
      f'--corpus={corpus.folder}: its tokenizer has {corpus.vocab_size} '
      f'tokens, the model of --recipe has vocab_size={model.vocab_size}'
    )
  if model.eos_token_id != (corpus.end_of_text,):
    raise UserError(
      f'--corpus={corpus.folder}: texts end with {corpus.end_of_text}, the '
      f'model of --recipe has eos_token_id={model.eos_token_id}'
    )
  if recipe.sequence_length > model.max_position_embeddings:
    raise UserError(
      f'recipe: sequence_length={recipe.sequence_length} exceeds '
      f'max_position_embeddings={model.max_position_embeddings}'
    )
  length, seed = recipe.sequence_length, recipe.seed
  window_starts(len(corpus.tokens('train')), length, recipe.batch_size, 0, seed)
  for split in ('validation', 'test'):
    check_windows(len(corpus.tokens(split)), length, split)


def run_identity(
  model: ModelConfig, recipe: TrainRecipe, corpus: Corpus
) -> dict[str, Any]:
  """The settings that identify a run, as JSON."""
  return {
    'model': model.to_dict(),
    'recipe': dataclasses.asdict(recipe),
    'corpus': corpus.identity(*SPLITS),
  }


def _train(
  name: str,
  model: ModelConfig,
  recipe: TrainRecipe,
  corpus: Corpus,
  run_folder: Run,
) -> pathlib.Path:
  began = time.perf_counter()
  task = TargetTask(model, recipe.compute_dtype, recipe.router_bias_step)
  # Read now, since the files may be replaced during the training.
  tokenizer, test = corpus.tokenizer_path.read_bytes(), corpus.tokens('test')
  data = Data(
    corpus.tokens('train'), corpus.tokens('validation'), corpus.end_of_text
  )
  token_bytes = jnp.asarray(corpus.token_bytes)
  print(
    f'{name}: {num_parameters(model):,} parameters, {recipe.steps:,} steps of '
    f'{recipe.tokens_per_step:,} tokens, {len(data.train):,} in the corpus',
    file=sys.stderr,
    flush=True,
  )
  state = fit(task, recipe, data, run_folder, constants=token_bytes, title=name)
  seconds = time.perf_counter() - began
  tensors = target_tensors(model, state.params, ml_dtypes.bfloat16)
  path = run_folder.folder / BUNDLE
  write_bundle(path, _bundle(name, model, recipe, corpus, tensors, tokenizer))
  evaluation = Evaluation(task, recipe, corpus.end_of_text)
  found = evaluation(state.params, test, token_bytes)
  # Replaces the record of a finished run that is repeated.
  run_folder.records = [r for r in run_folder.records if 'seconds' not in r]
  run_folder.log(
    {
      'step': recipe.steps,
      **{f'test_{key}': value for key, value in found.items()},
      'seconds': round(seconds, 1),
    }
  )
  print(
    f'test: {found.get("bits_per_byte", np.nan):.4f} bits per byte; '
    f'{seconds:.0f} s, {_rate(run_folder):,} tokens/s; '
    f'see {run_folder.folder / METRICS}'
  )
  return path


def _rate(run_folder: Run) -> int:
  """The median of the tokens per second, without compilation."""
  key = 'tokens_per_second'
  return int(np.median([r[key] for r in run_folder.records if key in r]))


def _bundle(
  name: str,
  model: ModelConfig,
  recipe: TrainRecipe,
  corpus: Corpus,
  tensors: dict[str, np.ndarray],
  tokenizer: bytes,
) -> Bundle:
  return Bundle(
    name=name,
    config=model,
    target=tensors,
    golden={},
    drafter_config=None,
    drafter=None,
    recipe={
      'trained_by': 'train_target',
      'recipe': dataclasses.asdict(recipe),
      'corpus': corpus.manifest.get('splits', {}),
    },
    tokenizer={TOKENIZER: tokenizer},
  )
