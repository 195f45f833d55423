"""Fields of configs: every one, with every kind of value that is wrong."""

import dataclasses
import json
import math
import typing

import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.config import (
  DecodeConfig,
  DrafterConfig,
  ModelConfig,
  RopeScaling,
)
from kdtree_jax.errors import UserError
from kdtree_jax.named_configs import load_config, load_recipe
from kdtree_jax.schema import from_json
from kdtree_jax.training.recipe import DrafterRecipe, TrainRecipe

# With each optional field set, so that null is one more wrong value elsewhere.
YARN = RopeScaling(
  factor=2.0,
  original_max_position_embeddings=16,
  mscale=1.0,
  mscale_all_dim=1.0,
  attention_factor=1.0,
)
MODEL = dataclasses.replace(
  load_config('tiny'),
  rope_scaling=YARN,
  eos_token_id=(3,),
  mlp_layer_types=('dense', 'sparse') * 2,
)
DRAFTER = DrafterConfig(
  hidden_size=8,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=4,
  intermediate_size=8,
  vocab_size=9,
  block_size=4,
  mask_token_id=0,
  target_layer_ids=(0, 1),
  num_target_layers=2,
  rope_scaling=YARN,
  layer_types=('full_attention', 'sliding_attention'),
  sliding_window=3,
  causal=True,
  draft_vocab_size=5,
)
CONFIGS = (
  YARN,
  MODEL,
  DRAFTER,
  DecodeConfig(tree_budget=4, draft_depth=2),
  load_recipe('python_small')[1],
  load_recipe('python_small', 'DRAFTER_RECIPE')[1],
)
FIELDS = [
  pytest.param(config, field.name, id=f'{type(config).__name__}.{field.name}')
  for config in CONFIGS
  for field in dataclasses.fields(config)
]
# Of every type that JSON has, and Python's own; some suit a field.
VALUES = (
  None,
  True,
  5,
  2**31,
  -(10**400),
  1.5,
  math.nan,
  math.inf,
  'x\ny',
  [],
  (),
  [5],
  [None],
  [math.nan],
  [True],
  {},
  {1: 2},
  {'factor': 'x'},
)


def suits(value, kind):
  """Whether a value is of a type, spelled out here once more."""
  if value is None:
    return type(None) in typing.get_args(kind)
  kinds = [k for k in typing.get_args(kind) if isinstance(k, type)] or [kind]
  if isinstance(value, tuple | list):
    return 'tuple' in str(kind)
  if type(value) is int:
    return float in kinds or (int in kinds and 'tuple' not in str(kind))
  return type(value) in kinds and 'tuple' not in str(kind)


def attempt(make, *mentions):
  """Makes a config, or gets an error in one line that says where."""
  try:
    return make()
  except UserError as error:
    assert str(error).isprintable()
    assert any(name in str(error) for name in mentions), error
    return None


@pytest.mark.parametrize('config, name', FIELDS)
def test_no_field_takes_what_is_not_of_its_type(config, name):
  cls = type(config)
  kind = typing.get_type_hints(cls)[name]
  for value in VALUES:
    # Right types may be at odds with another field, which is then named.
    mentions = ('',) if suits(value, kind) else (name, 'RopeScaling')
    made = attempt(
      lambda v=value: dataclasses.replace(config, **{name: v}), *mentions
    )
    assert made is None or suits(value, kind), value
    if made is not None and isinstance(value, int | float):
      assert math.isfinite(value) and abs(value) < 1e30
    raw = dataclasses.asdict(config) | {name: value}
    read = attempt(lambda r=raw: from_json(cls, r), *mentions)
    assert (read is None) == (made is None), value
    assert read is None or hash(read) == hash(read)


@pytest.mark.parametrize('integer', (np.int64, np.uint8, np.array, jnp.int32))
def test_numbers_of_other_libraries_become_those_of_python(integer):
  config = dataclasses.replace(
    MODEL, hidden_size=integer(8), eos_token_id=integer([3, 4])
  )
  assert config == dataclasses.replace(
    MODEL, hidden_size=8, eos_token_id=(3, 4)
  )
  assert type(config.hidden_size) is type(config.eos_token_id[0]) is int
  for wrong in (np.float32(8), np.True_, integer([8])):
    with pytest.raises(UserError, match='ModelConfig: hidden_size='):
      dataclasses.replace(MODEL, hidden_size=wrong)


@pytest.mark.parametrize('config', CONFIGS, ids=lambda c: type(c).__name__)
def test_round_trip_through_json(config):
  raw = json.loads(json.dumps(dataclasses.asdict(config)))
  assert from_json(type(config), raw) == config


@pytest.mark.parametrize('cls', (ModelConfig, DrafterConfig))
@pytest.mark.parametrize('raw', (None, 5, [], 'x', [('vocab_size', 5)]))
def test_what_is_no_object(cls, raw):
  with pytest.raises(UserError, match=f'{cls.__name__}: .* is not a JSON obje'):
    cls.from_dict(raw)


@pytest.mark.parametrize('key', ('odd', 'a\nb', 1, None, (1, 2)))
def test_unknown_keys(key):
  with pytest.raises(UserError, match='ModelConfig: unknown field ') as info:
    ModelConfig.from_dict(MODEL.to_dict() | {key: 1, 'z': 2})
  assert str(info.value).isprintable()


@pytest.mark.parametrize(
  'config, name',
  [p for p in FIELDS if not isinstance(p.values[0], TrainRecipe)],
)
def test_a_missing_field_is_named_or_has_a_default(config, name):
  raw = dataclasses.asdict(config)
  del raw[name]
  default = type(config).__dataclass_fields__[name].default
  if default is dataclasses.MISSING:
    with pytest.raises(UserError, match=f'{type(config).__name__}: {name} is'):
      from_json(type(config), raw)
  else:
    made = attempt(lambda: from_json(type(config), raw), name)
    assert made is None or getattr(made, name) == default


def test_every_config_is_tested():
  assert {type(config) for config in CONFIGS} == {
    *(RopeScaling, ModelConfig, DrafterConfig, DecodeConfig),
    *(TrainRecipe, DrafterRecipe),
  }


@pytest.mark.parametrize(
  'change, match',
  (
    ({'eos_token_id': 5}, 'ModelConfig: eos_token_id=5 is not a list'),
    ({'eos_token_id': [True]}, 'a list that holds True, which is not an int'),
    ({'num_hidden_layers': 10**6}, 'num_hidden_layers is 1000000, above 4096'),
    ({'rms_norm_eps': 0.0}, 'rms_norm_eps is 0.0, not positive'),
    ({'rope_theta': 1.0}, 'rope_theta - 1 is 0.0, not positive'),
  ),
)
def test_messages(change, match):
  with pytest.raises(UserError, match=match):
    dataclasses.replace(MODEL, **change)
