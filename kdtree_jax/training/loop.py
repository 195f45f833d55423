"""The training loop: one donated step, exact resume, asynchronous metrics."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int32

from kdtree_jax.io.checkpoint_weights import Params
from kdtree_jax.keys import Purpose, key_for
from kdtree_jax.training.checkpoints import TrainingRun, check_metrics
from kdtree_jax.training.packing import (
  PackedBatch,
  gather_windows,
  num_windows,
  pack,
  window_starts,
)
from kdtree_jax.training.progress import TrainingProgress
from kdtree_jax.training.recipe import TrainRecipe
from kdtree_jax.training.streams import check_stream


@runtime_checkable
class Task(Protocol):
  """What a model learns; hashable, with pure methods.

  `constants` are arrays that training does not change.
  """

  def init(self, key: jax.Array) -> Params:
    """Initial parameters, float32."""

  def loss(
    self, params: Params, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> tuple[jax.Array, Any]:
    """The float32 scalar to minimise, and an input of `after_step`."""

  def after_step(
    self, params: Params, aux: Any
  ) -> tuple[Params, dict[str, jax.Array]]:
    """Updates without a gradient, such as a router's bias, and metrics."""

  def evaluate(
    self, params: Params, constants: Any, batch: PackedBatch, key: jax.Array
  ) -> dict[str, jax.Array]:
    """Sums over a batch's sequences, which are added up over batches."""

  def report(self, sums: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics from the sums of `evaluate`."""


class TrainState(flax.struct.PyTreeNode):
  """All state that a run depends on, besides data and recipe.

  Attributes:
    step: number of steps done; also the position in the data.
    params: the parameters, float32.
    opt_state: the state of `optimizer(recipe)`.
  """

  step: Int32[Array, '']
  params: Params
  opt_state: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingData:
  """Streams of uint16 or uint32; each document ends with `end_of_text`."""

  train: np.ndarray
  validation: np.ndarray
  end_of_text: int

  def __post_init__(self):
    for split in ('train', 'validation'):
      check_stream(getattr(self, split), f'the {split} split')


def schedule(recipe: TrainRecipe) -> optax.Schedule:
  """Learning rates by step: linear warm-up, then a cosine if steps are left."""
  if recipe.warmup_steps == recipe.steps:
    # optax refuses a cosine of no steps.
    return optax.linear_schedule(0.0, recipe.learning_rate, recipe.steps)
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=recipe.learning_rate,
    warmup_steps=recipe.warmup_steps,
    decay_steps=recipe.steps,
    end_value=recipe.final_learning_rate,
  )


def optimizer(recipe: TrainRecipe) -> optax.GradientTransformation:
  """AdamW with gradient clipping; weights decay in matrices only."""
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
  data: TrainingData,
  run: TrainingRun,
  *,
  constants: Any = None,
  stop_after: int | None = None,
  title: str = 'training',
) -> TrainState:
  """Trains to the end of the recipe's schedule, from the run's last checkpoint.

  Args:
    task: what is learnt.
    recipe: schedule, optimiser and data order.
    data: the token streams.
    run: the run's folder, which gets checkpoints and metrics.
    constants: arrays that the task uses and that do not change.
    stop_after: ends after this many steps in all, with a checkpoint, as an
      interruption would.
    title: title of the progress bar.

  Returns:
    The last state; it is also the last checkpoint.

  Raises:
    UserError: the data does not fill one batch, or the run diverged: a loss
      or a gradient is not finite. No such state becomes a checkpoint.
  """
  last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
  length = recipe.sequence_length
  # Refuses a corpus that is too small, before anything is compiled.
  window_starts(len(data.train), length, recipe.batch_size, 0, recipe.seed)
  state = run.restore(init_state(task, recipe))
  tokens = jnp.asarray(data.train)
  step_fn = _step(task, recipe, data.end_of_text)
  validate = Evaluation(task, recipe, data.end_of_text)
  step = int(state.step)
  pending: dict[str, jax.Array] | None = None
  clock, clock_step = time.perf_counter(), step
  with TrainingProgress(title, recipe.steps, step) as progress:

    def write_pending() -> None:
      """Fetches and writes the metrics of an earlier step."""
      nonlocal pending, clock, clock_step
      if pending is None:
        return
      values = jax.device_get(pending)
      now, at = time.perf_counter(), int(values['step'])
      rate = (at - clock_step) * recipe.tokens_per_step / (now - clock)
      clock, clock_step, pending = now, at, None
      run.log({**values, 'tokens_per_second': round(rate)})
      progress.show(at, loss=float(values['loss']), tokens_per_second=rate)

    while step < last:
      starts = window_starts(
        len(data.train), length, recipe.batch_size, step, recipe.seed
      )
      state, metrics = step_fn(state, tokens, constants, starts)
      step += 1
      if step % recipe.log_every == 0 or step == last:
        # The device works on later steps while the host waits for these.
        write_pending()
        pending = metrics
      if step % recipe.validate_every == 0 or step == recipe.steps:
        write_pending()
        began = time.perf_counter()
        found = validate(
          state.params,
          data.validation,
          constants,
          max_windows=recipe.validation_sequences,
        )
        found = {f'validation_{key}': value for key, value in found.items()}
        run.log({'step': step, **found})
        progress.print_metrics(step, found)
        clock += time.perf_counter() - began
      if step % recipe.checkpoint_every == 0 or step == last:
        write_pending()
        began = time.perf_counter()
        check_metrics(step, jax.device_get(metrics))
        run.save(step, state)
        clock += time.perf_counter() - began
  return state


# Cached, so that a process that resumes a run compiles once.
@functools.lru_cache(maxsize=4)
def _step(task: Task, recipe: TrainRecipe, end_of_text: int):
  """One step of the optimiser, compiled; it donates its state."""
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
    updated: Any = optax.apply_updates(state.params, updates)
    params, metrics = task.after_step(updated, aux)
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
  """The sums of one batch of `Evaluation`, compiled."""

  def sums(params, constants, tokens, starts, live, number):
    windows = gather_windows(tokens, starts, recipe.sequence_length)
    batch = pack(windows, end_of_text)
    batch = batch.replace(counted=batch.counted & live[:, None])
    key = key_for(Purpose.EVALUATION, recipe.seed)
    key = jax.random.fold_in(key, number)
    return task.evaluate(params, constants, batch, key)

  return jax.jit(sums)


class Evaluation:
  """A task's report on a split."""

  def __init__(self, task: Task, recipe: TrainRecipe, end_of_text: int):
    self._task, self._recipe = task, recipe
    self._sums = _sums(task, recipe, end_of_text)

  def __call__(
    self,
    params: Params,
    tokens: np.ndarray,
    constants: Any = None,
    *,
    max_windows: int | None = None,
  ) -> dict[str, Any]:
    """Reports on the first `max_windows` windows of a stream, or on all.

    Windows follow each other without a gap. Windows that fill up the last batch
    have no `counted` token, and a task's sums must not count them.
    """
    size = self._recipe.batch_size
    length = self._recipe.sequence_length
    count = num_windows(len(tokens), length)
    count = count if max_windows is None else min(count, max_windows)
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
    # On the host, because the bytes of a large split exceed 32 bits.
    total = jax.tree.map(_sum, *jax.device_get(found))
    return self._task.report(total)


def _sum(*values: np.ndarray) -> np.ndarray:
  """The sum over batches, in 64 bits."""
  wide = np.float64 if values[0].dtype.kind == 'f' else np.int64
  return np.asarray(np.sum(values, axis=0, dtype=wide))
