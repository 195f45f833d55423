"""Draws: what is kept, whom they equal, and what they are distributed like."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.config import DecodeConfig, ModelConfig
from kdtree_jax.decode import Engine, SamplingConfig, drivers, init_state
from kdtree_jax.decode import round as stages
from kdtree_jax.decode.sampling import (
  Sampling,
  greedy_tokens,
  kept_tokens,
  position_noise,
  sampled_tokens,
)
from kdtree_jax.errors import UserError
from kdtree_jax.registry import names
from tests import support

SETTINGS = tuple(
  SamplingConfig(temperature=t, top_k=k, top_p=p, seed=seed)
  for t, k, p, seed in itertools.product(
    (0.3, 0.7, 1.0, 2.0), (0, 5), (1.0, 0.9), range(5)
  )
)
BLOCK_SIZE = 5
NEW_TOKENS = 12
PROMPT = 4


def kept_by_sorting(logits, config):
  """The definition: rank, cut at k, cut at p, cut below min_p."""
  order = np.argsort(-logits, kind='stable')
  kept = np.ones(len(logits), bool)
  if config.top_k:
    last = logits[order[min(config.top_k, len(logits)) - 1]]
    kept &= logits >= last
  if config.top_p < 1:
    probs = np.where(kept, np.exp(logits - logits.max()), 0)
    probs = probs / probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    last = logits[order[(before < config.top_p).nonzero()[0][-1]]]
    kept &= logits >= last
  return kept & (np.exp(logits - logits.max()) >= config.min_p * (1 - 1e-6))


@pytest.mark.parametrize('kind', ('normal', 'ties', 'flat'))
def test_kept_tokens(kind):
  rng = np.random.default_rng(0)
  configs = [
    SamplingConfig(temperature=1.0, top_k=k, top_p=p, min_p=m)
    for k in (0, 1, 3, 40)
    for p in (1.0, 0.7, 0.2)
    for m in (0.0, 0.11)
  ]
  logits = rng.normal(size=(len(configs), 3, 17)).astype(np.float32) * 2
  if kind == 'ties':
    logits = np.round(logits)
  elif kind == 'flat':
    logits = np.full_like(logits, -3.0)
  kept = jax.jit(kept_tokens)(jnp.asarray(logits), Sampling.of(configs))
  for b, config in enumerate(configs):
    for n in range(3):
      wanted = kept_by_sorting(logits[b, n], config)
      assert np.array_equal(kept[b, n], wanted), config


NEUTRAL = (
  {},
  {'top_p': 1.0, 'top_k': 400},
  {'top_k': 300},
  {'top_k': 2**31 - 1, 'min_p': 0.0},
)
FILTERS = ({'top_k': 3}, {'top_p': 0.9}, {'top_p': 0.9, 'top_k': 299})


@pytest.mark.parametrize('kind', ('peaked', 'barred', 'infinite'))
def test_neutral_settings_keep_all_beside_any_neighbour(kind):
  """Sums of probabilities round to 1 long before the last token is in."""
  rows = [*NEUTRAL, *FILTERS, {'min_p': 1e-30}, {'min_p': 0.2}]
  configs = [SamplingConfig(temperature=1.0, **row) for row in rows]
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(len(rows), 2, 300)).astype(np.float32) * 30
  if kind == 'barred':
    logits[..., ::3] = -np.inf
  elif kind == 'infinite':
    logits[..., 7] = np.inf
  kept = jax.jit(kept_tokens)
  together = kept(jnp.asarray(logits), Sampling.of(configs))
  assert together[: len(NEUTRAL)].all()
  if kind != 'infinite':
    assert not together[len(NEUTRAL) : -2].all(axis=-1).any()
  for b, config in enumerate(configs):
    alone = kept(jnp.asarray(logits[b : b + 1]), Sampling.of([config]))
    assert np.array_equal(together[b], alone[0]), config


def test_noise_is_of_the_position():
  key = Sampling.of(
    [SamplingConfig(temperature=1.0, seed=s) for s in (3, 4)]
  ).key
  early = position_noise(key, jnp.array([10, 10], jnp.int32), 4, 7)
  late = position_noise(key, jnp.array([12, 11], jnp.int32), 2, 7)
  assert np.array_equal(early[0, 2:], late[0])
  assert np.array_equal(early[1, 1:3], late[1])
  assert not np.array_equal(early[0], early[1])


def test_temperature_zero_row_is_greedy():
  logits = jnp.asarray(
    np.random.default_rng(0).normal(size=(2, 6, 9)), 'float32'
  )
  configs = [SamplingConfig(), SamplingConfig(temperature=5.0)]
  depths = jnp.asarray([[0, 1, 1, 2, 2, 3]] * 2, jnp.int32)
  drawn = sampled_tokens(
    logits,
    depths,
    jnp.zeros((2,), jnp.int32),
    Sampling.of(configs),
    max_depth=3,
  )
  assert np.array_equal(drawn[0], logits[0].argmax(axis=-1))
  assert not np.array_equal(drawn[1], logits[1].argmax(axis=-1))


def run_settings(drafter_name, budget, golden=None):
  """All settings as the rows of one batch; tokens `[rows, NEW_TOKENS]`."""
  target = support.variant('grouped_yarn')
  drafter = None
  if drafter_name:
    drafter = api.load_drafter(drafter_name, target, BLOCK_SIZE)
  options = generation.GenerateOptions(
    tree_budget=budget, capacity=32, prefill_chunk=4, temperature=1.0
  )
  engine = generation.make_engine(target, drafter, PROMPT, options)
  prompts = [
    support.prompt_of(target.config, PROMPT, seed=i)
    for i in range(len(SETTINGS))
  ]
  params = {'target': target.params, 'drafter': {}}
  count = NEW_TOKENS
  if drafter:
    params['drafter'] = drafter.params
    if drafter.drafter.needs_golden:
      params['drafter'] = generation.golden_params(engine, golden)
  else:
    count += BLOCK_SIZE
  limits = [count] * len(SETTINGS)
  state = init_state(engine, prompts, limits, (), jnp.float32, SETTINGS)
  state, _ = drivers.decode_to_end(engine, params, state)
  accepted = np.asarray(state.stats.acceptance_length).sum(axis=0)
  rounds = int(state.stats.rounds)
  return np.asarray(state.tokens)[:, : PROMPT + count], accepted[:rounds]


@pytest.fixture(scope='module')
def autoregressive():
  return run_settings(None, 0)[0]


@pytest.mark.parametrize(
  ('drafter', 'budget'),
  (
    ('oracle', 7),
    ('dflash', 64),
    pytest.param('repeat', 1, marks=pytest.mark.slow),
    pytest.param('random', 7, marks=pytest.mark.slow),
  ),
)
def test_sampled_output_is_that_of_ar(autoregressive, drafter, budget):
  check_settings(autoregressive, drafter, budget)


@pytest.mark.matrix
@pytest.mark.parametrize('budget', (1, 7, 64))
@pytest.mark.parametrize('drafter', names('drafter'))
def test_sampled_whole(autoregressive, drafter, budget):
  check_settings(autoregressive, drafter, budget)


def check_settings(autoregressive, drafter, budget):
  """Every setting, each a row of one batch."""
  tokens, accepted = run_settings(drafter, budget, autoregressive)
  wanted = autoregressive[:, : PROMPT + NEW_TOKENS]
  wrong = (tokens != wanted).any(axis=1).nonzero()[0]
  assert not len(wrong), [SETTINGS[i] for i in wrong]
  if drafter == 'oracle':
    assert len(accepted) == -(-NEW_TOKENS // min(BLOCK_SIZE, 1 + budget))


def test_settings_do_sample(autoregressive):
  """Hot rows differ from seed to seed, or the tests above test nothing."""
  hot = [i for i, s in enumerate(SETTINGS) if s.temperature == 2.0]
  outputs = {tuple(autoregressive[i, PROMPT:]) for i in hot}
  assert len(outputs) == len(hot)


def test_greedy_ties_go_to_the_lowest_id():
  logits = jnp.array([[[0.0, 2, 2, 1], [3, 3, 3, 3]], [[-1, -2, -2, -1]] * 2])
  assert greedy_tokens(logits).tolist() == [[1, 0], [0, 0]]


def test_operands_compile_nothing():
  target = support.variant('tiny')
  drafter = api.load_drafter('random', target, 4)
  prompt = support.prompt_of(target.config, 5)

  def run(**options):
    return generation.generate(
      target,
      drafter,
      prompt,
      max_new_tokens=6,
      capacity=32,
      costs='bytes',
      **options,
    ).output_ids

  run(temperature=1.0)
  before = support.compilations()
  for options in (
    {'temperature': 0.2},
    {'temperature': 1.5, 'top_k': 7, 'top_p': 0.8, 'min_p': 0.01},
    {'temperature': 1.0, 'seed': 9, 'stop_ids': (3, 5)},
  ):
    run(**options)
  assert support.compilations() == before
  assert run(temperature=3.0, seed=1) == run(temperature=3.0, seed=1)
  assert run(temperature=3.0, seed=1) != run(temperature=3.0, seed=2)


@pytest.mark.parametrize(
  'wrong',
  (
    {'temperature': -0.1},
    {'temperature': float('nan')},
    {'temperature': float('inf')},
    {'temperature': 1.0, 'top_k': -1},
    {'temperature': 1.0, 'top_p': 0.0},
    {'temperature': 1.0, 'top_p': 1.1},
    {'temperature': 1.0, 'min_p': 2.0},
    {'temperature': 1.0, 'seed': -1},
    {'top_k': 5},
  ),
)
def test_wrong_settings_are_named(wrong):
  with pytest.raises(UserError, match=[*wrong][-1]):
    SamplingConfig(**wrong)


# Chi-square: the second witness.

EIGHT = ModelConfig(
  vocab_size=8,
  hidden_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  q_lora_rank=None,
  kv_lora_rank=8,
  qk_nope_head_dim=4,
  qk_rope_head_dim=4,
  v_head_dim=4,
  intermediate_size=16,
)
TEMPERATURE = 9.0
ROWS, RUNS, STEPS = 100, 210, 3
# P(chi-square with 511 degrees of freedom > this) is 1e-6.
CRITICAL = 678.0


def enumerated(target, prompt):
  """`[8, 8, 8]` probabilities of every continuation under AR."""

  def after(prefix):
    logits = generation.forward_logits(target, [*prompt, *prefix])[-1]
    probs = np.exp((logits - logits.max()).astype(np.float64) / TEMPERATURE)
    return probs / probs.sum()

  joint = np.zeros((8,) * STEPS)
  first = after(())
  for a in range(8):
    second = after((a,))
    for b in range(8):
      joint[a, b] = first[a] * second[b] * after((a, b))
  return joint


def chi_square(target, prompt, joint):
  """The statistic of RUNS * ROWS sequences drawn through trees."""
  drafter = api.load_drafter('random', target, 4)
  decode = DecodeConfig(
    tree_budget=10,
    draft_depth=3,
    capacity=16,
    prefill_chunk=4,
    sample=True,
  )
  engine = Engine(target.config, drafter.drafter, decode)
  params = {'target': target.params, 'drafter': drafter.params}
  counts = np.zeros((8,) * STEPS)
  longest = 0
  for run in range(RUNS):
    settings = [
      SamplingConfig(temperature=TEMPERATURE, seed=run * ROWS + i)
      for i in range(ROWS)
    ]
    state = init_state(
      engine, [prompt] * ROWS, [STEPS] * ROWS, (), jnp.float32, settings
    )
    state, _ = drivers.decode_to_end(engine, params, state)
    drawn = np.asarray(state.tokens)[:, len(prompt) : len(prompt) + STEPS]
    np.add.at(counts, tuple(drawn.T), 1)
    longest = max(longest, int(state.stats.acceptance_length.max()))
  assert longest > 1, 'no draft was ever accepted'
  wanted = joint * RUNS * ROWS
  assert wanted.min() > 5, 'cells too small for the test'
  return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.fixture
def eight():
  target = support.target_of(EIGHT, seed=5)
  prompt = [1, 6, 2]
  return target, prompt, enumerated(target, prompt)


def test_chi_square(eight):
  assert chi_square(*eight) < CRITICAL


@pytest.mark.slow
def test_chi_square_finds_a_biased_walk(eight, monkeypatch):
  """The classic fault: walk by argmax, sample the last token only."""
  honest = stages.verify

  def biased(engine, params, state, tree):
    verified = honest(engine, params, state, tree)
    best = jnp.argmax(verified.logits, axis=-1).astype(jnp.int32)
    is_child = tree.parents[:, None, :] == jnp.arange(
      best.shape[1], dtype=jnp.int32
    ).reshape(1, -1, 1)
    held = (is_child & (tree.tokens[:, None, :] == best[:, :, None])).any(-1)
    return verified.replace(tokens=jnp.where(held, best, verified.tokens))

  monkeypatch.setattr(stages, 'verify', biased)
  # Or the honest trace would be remembered, and afterwards this one.
  jax.clear_caches()
  assert chi_square(*eight) > CRITICAL
  jax.clear_caches()
