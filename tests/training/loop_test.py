"""Schedules of every legal recipe, and runs that go wrong."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import named_configs
from kdtree_jax.errors import UserError
from kdtree_jax.named_configs import load_recipe
from kdtree_jax.training.checkpoints import METRICS, RUN, Run
from kdtree_jax.training.loop import Data, Evaluation, fit, optimizer, schedule
from kdtree_jax.training.recipe import TrainRecipe

RECIPE = TrainRecipe(
  steps=12,
  batch_size=2,
  sequence_length=4,
  learning_rate=0.5,
  final_learning_rate=0.1,
  warmup_steps=2,
  weight_decay=0.0,
  log_every=3,
  validate_every=100,
  checkpoint_every=1,
)
DATA = Data(np.zeros(99, np.uint16), np.zeros(99, np.uint16), 1)


@dataclasses.dataclass(frozen=True)
class Root:
  """Goes down until it is the root of something negative."""

  def init(self, key):
    return {'w': jnp.ones(2)}

  def loss(self, params, constants, batch, key):
    return jnp.sqrt(params['w']).sum(), None

  def after_step(self, params, aux):
    return params, {}

  def evaluate(self, params, constants, batch, key):
    return {'bytes': jnp.int32(2**30), 'nats': jnp.float32(1.5)}

  def report(self, sums):
    return dict(sums)


@pytest.mark.parametrize(
  ('steps', 'warmup', 'rates'),
  [
    (1, 0, [0.5]),
    (1, 1, [0.0]),
    (4, 4, [0.0, 0.125, 0.25, 0.375]),
    (2, 1, [0.0, 0.5]),
    (2, 0, [0.5, 0.3]),
  ],
)
def test_every_length_of_a_warm_up(steps, warmup, rates):
  short = dataclasses.replace(RECIPE, steps=steps, warmup_steps=warmup)
  found = [float(schedule(short)(step)) for step in range(steps)]
  assert found == pytest.approx(rates)
  transform, params = optimizer(short), {'w': jnp.ones(2)}
  with jax.numpy_dtype_promotion('standard'):
    update, _ = transform.update(params, transform.init(params), params)
  assert np.asarray(update['w']) == pytest.approx([-rates[0]] * 2, rel=1e-3)


def test_a_run_of_one_step(tmp_path):
  run = Run(tmp_path / 'run', {})
  state = fit(Root(), RECIPE.with_steps(1), DATA, run)
  run.close()
  assert int(state.step) == 1 and (np.asarray(state.params['w']) < 1).all()


def test_a_run_that_diverges_says_so_and_keeps_its_checkpoint(tmp_path):
  run = Run(tmp_path / 'run', {})
  with pytest.raises(UserError) as raised:
    fit(Root(), RECIPE, DATA, run)
  found = re.fullmatch(
    r'the run diverged: (loss|gradient_norm) is nan at step (\d+); lower the '
    r"recipe's learning_rate or raise its warmup_steps",
    str(raised.value),
  )
  step = int(found[2])
  run.close()
  again = Run(tmp_path / 'run', {})
  kept = again._manager.latest_step()
  assert 0 < kept == step - 1
  again.close()
  lines = (tmp_path / 'run' / METRICS).read_text().splitlines()
  assert all(json.loads(line)['step'] < step for line in lines)


def test_sums_are_wider_than_an_int32():
  evaluate = Evaluation(Root(), RECIPE, 1)
  found = evaluate({}, np.zeros(8 * 5 + 1, np.uint16))
  assert found['bytes'] == 5 * 2**30 and found['nats'] == 7.5


def test_a_checkpoint_that_cannot_be_written_or_read(tmp_path, monkeypatch):
  run = Run(tmp_path / 'run', {})

  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(run._manager, 'save', full)
    with pytest.raises(UserError, match='checkpoints/3: cannot be written'):
      run.save(3, {'w': jnp.ones(2)})
  run.save(3, {'w': jnp.ones(2)})
  run.close()
  for path in (tmp_path / 'run' / 'checkpoints' / '3').rglob('*'):
    if path.is_file():
      path.write_bytes(b'x')
  run = Run(tmp_path / 'run', {})
  with pytest.raises(UserError, match='checkpoints/3: cannot be read'):
    run.restore({'w': jnp.zeros(2)})
  run.close()


def test_runs_that_are_not_this_one(tmp_path):
  identity = {'corpus': {'tokenizer': 'a', 'tokens': 1}, 'recipe': 2}
  Run(tmp_path, identity).close()
  other = {'corpus': {'tokenizer': 'b', 'tokens': 1}, 'recipe': 3}
  with pytest.raises(UserError) as raised:
    Run(tmp_path, other)
  assert str(raised.value) == (
    f'--output={tmp_path}: holds a run of another model, recipe or corpus '
    "(corpus.tokenizer is 'a' there and 'b' here, recipe is 2 there and 3 "
    'here); choose another folder'
  )
  (tmp_path / METRICS).write_text('{"loss": 3}\n')
  with pytest.raises(UserError, match='metrics.jsonl: line 1 is no record'):
    Run(tmp_path, identity)
  (tmp_path / RUN).write_text('{')
  with pytest.raises(UserError, match='--output='):
    Run(tmp_path, identity)


def test_a_recipe_of_another_kind(monkeypatch, tmp_path):
  (tmp_path / 'odd.py').write_text("CONFIG, RECIPE = None, {'steps': 3}\n")
  monkeypatch.setattr(named_configs, 'repository_path', lambda _: tmp_path)
  with pytest.raises(UserError, match='odd.py: RECIPE is a dict, not a Train'):
    load_recipe('odd')


@pytest.mark.parametrize(
  ('line', 'match'),
  [
    ('TrainRecipe(stepz=3)', "broken.py: TypeError: .*'stepz'"),
    ('dataclasses.replace(RECIPE, steps=0)', 'broken.py: recipe: steps=0 is '),
    ('1 / 0', 'broken.py: ZeroDivisionError: division by zero'),
  ],
)
def test_a_recipe_file_that_cannot_be_read(line, match, monkeypatch, tmp_path):
  (tmp_path / 'broken.py').write_text(
    'import dataclasses\n'
    'from kdtree_jax.named_configs import load_config, load_recipe\n'
    'from kdtree_jax.training.recipe import TrainRecipe\n'
    f'CONFIG, RECIPE = {RECIPE!r}, {RECIPE!r}\nRECIPE = {line}\n'
  )
  monkeypatch.setattr(named_configs, 'repository_path', lambda _: tmp_path)
  with pytest.raises(UserError, match=f'configs/{match}'):
    load_recipe('broken')
