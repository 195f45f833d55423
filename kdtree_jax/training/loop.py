"""The training loop: one donated step, exact resume, metrics without stalls."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdtree_jax.keys import Purpose, key_for
from kdtree_jax.training.checkpoints import Run, check_finite
from kdtree_jax.training.packing import (
  PackedBatch,
  gather_windows,
  num_windows,
  pack,
  window_starts,
)
from kdtree_jax.training.progress import Progress
from kdtree_jax.training.recipe import TrainRecipe
from kdtree_jax.training.streams import check_stream

Params = Any


class Task(Protocol):
  """What is learnt; hashable.

  All methods are pure; `constants` are frozen arrays.
  """

  def init(self, key: jax.Array) -> Params:
    """Float32 parameters."""

  def loss(
    self, params: Params, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> tuple[jax.Array, Any]:
    """The float32 scalar to minimise, and what `after_step` wants to know."""

  def after_step(
    self, params: Params, aux: Any
  ) -> tuple[Params, dict[str, jax.Array]]:
    """Changes no gradient makes (a router's bias), and metrics."""

  def evaluate(
    self, params: Params, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> dict[str, jax.Array]:
    """Sums over a batch's sequences; they are added up over batches."""

  def report(self, sums: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics from the sums of `evaluate`: names without a prefix."""


@flax.struct.dataclass
class TrainState:
  """All that a run's future depends on, besides the data and the recipe.

  Attributes:
    step: int32 scalar, steps done; also the position in the data.
    params: float32.
    opt_state: of `optimizer(recipe)`.
  """

  step: jax.Array
  params: Params
  opt_state: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
  """Streams of uint16 or uint32; each document ends with `end_of_text`."""

  train: np.ndarray
  validation: np.ndarray
  end_of_text: int

  def __post_init__(self):
    for split in ('train', 'validation'):
      check_stream(getattr(self, split), f'the {split} split')


def schedule(recipe: TrainRecipe) -> optax.Schedule:
  """Learning rates by step: a linear rise, then a cosine if steps are left."""
  if recipe.warmup_steps == recipe.steps:
    # optax has no cosine of no steps.
    return optax.linear_schedule(0.0, recipe.learning_rate, recipe.steps)
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=recipe.learning_rate,
    warmup_steps=recipe.warmup_steps,
    decay_steps=recipe.steps,
    end_value=recipe.final_learning_rate,
  )


def optimizer(recipe: TrainRecipe) -> optax.GradientTransformation:
  """AdamW with clipping, warm-up and a cosine; decay of matrices only."""
  return optax.chain(
    optax.clip_by_global_norm(recipe.clip_norm),
    optax.adamw(
      schedule(recipe),
      b1=recipe.beta1,
      b2=recipe.beta2,
      weight_decay=recipe.weight_decay,
      mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
    ),
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(task: Task, recipe: TrainRecipe) -> TrainState:
  """The state before the first step."""
  params = task.init(key_for(Purpose.TRAINING_WEIGHTS, recipe.seed))
  return TrainState(jnp.int32(0), params, optimizer(recipe).init(params))


def fit(
  task: Task,
  recipe: TrainRecipe,
  data: Data,
  run: Run,
  *,
  constants: Any = None,
  stop_after: int | None = None,
  title: str = 'training',
) -> TrainState:
  """Trains to the end of the recipe's schedule, from where the run stands.

  Args:
    task: what is learnt.
    recipe: how.
    data: from what.
    run: the folder, perhaps with a checkpoint; gets checkpoints and metrics.
    constants: arrays that the task sees and that do not change.
    stop_after: ends after this many steps in all, with a checkpoint, as an
      interruption would.
    title: of the progress bar.

  Returns:
    The last state; it is also the last checkpoint.

  Raises:
    UserError: the data does not fill one batch, or the run diverged: a loss
      or a gradient is not finite. No such state becomes a checkpoint.
  """
  last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
  length = recipe.sequence_length
  # Refuses a corpus that is too small before anything is compiled.
  window_starts(len(data.train), length, recipe.batch_size, 0, recipe.seed)
  state = run.restore(init_state(task, recipe))
  tokens = jnp.asarray(data.train)
  step_fn = _step(task, recipe, data.end_of_text)
  validate = Evaluation(task, recipe, data.end_of_text)
  step = int(state.step)
  pending: dict[str, jax.Array] | None = None
  clock, clock_step = time.perf_counter(), step
  with Progress(title, recipe.steps, step) as progress:

    def settle() -> None:
      """Fetches what was computed a while ago and writes it down."""
      nonlocal pending, clock, clock_step
      if pending is None:
        return
      values = jax.device_get(pending)
      now, at = time.perf_counter(), int(values['step'])
      rate = (at - clock_step) * recipe.tokens_per_step / (now - clock)
      clock, clock_step, pending = now, at, None
      run.log({**values, 'tokens_per_second': round(rate)})
      progress.show(at, loss=values['loss'], tokens_per_second=rate)

    while step < last:
      starts = window_starts(
        len(data.train), length, recipe.batch_size, step, recipe.seed
      )
      state, metrics = step_fn(state, tokens, constants, starts)
      step += 1
      if step % recipe.log_every == 0 or step == last:
        # The device has the next steps already while the host waits for these.
        settle()
        pending = metrics
      if step % recipe.validate_every == 0 or step == recipe.steps:
        settle()
        began = time.perf_counter()
        found = validate(
          state.params,
          data.validation,
          constants,
          limit=recipe.validation_sequences,
        )
        found = {f'validation_{key}': value for key, value in found.items()}
        run.log({'step': step, **found})
        progress.say(step, found)
        clock += time.perf_counter() - began
      if step % recipe.checkpoint_every == 0 or step == last:
        settle()
        began = time.perf_counter()
        check_finite(step, jax.device_get(metrics))
        run.save(step, state)
        clock += time.perf_counter() - began
  return state


# A process that trains the same twice, as an interrupted one does in tests,
# compiles once.
@functools.lru_cache(maxsize=4)
def _step(task: Task, recipe: TrainRecipe, end_of_text: int):
  """One step of the optimiser as a compiled function that takes its state."""
  transform = optimizer(recipe)

  def step(state, tokens, constants, starts):
    windows = gather_windows(tokens, starts, recipe.sequence_length)
    batch = pack(windows, end_of_text)
    key = key_for(Purpose.TRAINING_STEP, recipe.seed)
    key = jax.random.fold_in(key, state.step)
    (loss, aux), gradient = jax.value_and_grad(task.loss, has_aux=True)(
      state.params, constants, batch, key
    )
    # optax mixes integers and floats.
    with jax.numpy_dtype_promotion('standard'):
      updates, opt_state = transform.update(
        gradient, state.opt_state, state.params
      )
    params = optax.apply_updates(state.params, updates)
    params, metrics = task.after_step(params, aux)
    new = TrainState(state.step + 1, params, opt_state)
    metrics = {
      'step': new.step,
      'loss': loss,
      'gradient_norm': optax.tree.norm(gradient),
      **metrics,
    }
    return new, metrics

  return jax.jit(step, donate_argnums=0)


@functools.lru_cache(maxsize=4)
def _sums(task: Task, recipe: TrainRecipe, end_of_text: int):
  """The sums of one batch of `Evaluation` as a compiled function."""

  def sums(params, constants, tokens, starts, live, number):
    windows = gather_windows(tokens, starts, recipe.sequence_length)
    batch = pack(windows, end_of_text)
    batch = batch.replace(counted=batch.counted & live[:, None])
    key = key_for(Purpose.EVALUATION, recipe.seed)
    key = jax.random.fold_in(key, number)
    return task.evaluate(params, constants, batch, key)

  return jax.jit(sums)


class Evaluation:
  """Sums of a task over a split."""

  def __init__(self, task: Task, recipe: TrainRecipe, end_of_text: int):
    self._task, self._recipe = task, recipe
    self._sums = _sums(task, recipe, end_of_text)

  def __call__(
    self,
    params: Params,
    tokens: np.ndarray,
    constants: Any = None,
    *,
    limit: int | None = None,
  ) -> dict[str, Any]:
    """The task's report on the first `limit` windows of a stream, or on all.

    Windows follow each other without a gap. Those that fill up the last batch
    are not `counted`, and neither may a task's sums count them.
    """
    size = self._recipe.batch_size
    length = self._recipe.sequence_length
    count = num_windows(len(tokens), length)
    count = count if limit is None else min(count, limit)
    on_device = jnp.asarray(tokens)
    found: list[Any] = []
    for number, first in enumerate(range(0, count, size)):
      index = np.arange(first, first + size)
      live = index < count
      starts = (np.where(live, index, 0) * length).astype(np.int32)
      found.append(
        self._sums(params, constants, on_device, starts, live, np.int32(number))
      )
    if not found:
      return {}
    # On the host, as 32 bits do not hold the bytes of a large split.
    total = jax.tree.map(_sum, *jax.device_get(found))
    return self._task.report(total)


def _sum(*values: np.ndarray) -> np.ndarray:
  """The sum of a batch's arrays, in 64 bits."""
  wide = np.float64 if values[0].dtype.kind == 'f' else np.int64
  return np.sum(values, axis=0, dtype=wide)
