"""The audit passes what is right and finds each planted fault."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, divergence, observation
from kdtree_jax import audit as audits
from kdtree_jax.audit import audit
from kdtree_jax.decode import round as stages
from kdtree_jax.errors import UserError
from kdtree_jax.modes import audit as mode
from kdtree_jax.observation import Observation
from pallas_kernels.tree_build.api import ancestors_from_parents
from tests import support
from tests.command_line import mode_flags

FIXTURE = 'deepseek_v3_trained_drafter'


def report(dtype='float32', **options):
  folder = support.DATA / FIXTURE
  target = api.load_target(folder, dtype)
  drafter = api.load_drafter(folder / 'dflash', target)
  prompt = support.trace(FIXTURE)['prompt']
  fields = {'tree_budget': 24, 'max_new_tokens': 24} | options
  return audit(target, drafter, prompt, **fields)


@pytest.fixture
def planted(monkeypatch):
  """Replaces a stage; programs traced before or with it are forgotten."""

  def plant(name, replacement):
    monkeypatch.setattr(stages, name, replacement)
    jax.clear_caches()

  yield plant
  monkeypatch.undo()
  jax.clear_caches()


def test_a_right_engine_passes():
  found = report()
  assert found.failures == []
  assert found.divergence is None and found.oracle_divergence is None
  assert found.oracle_acceptance_length == found.full_acceptance_length == 8
  assert found.acceptance_length > 2
  assert found.cache_error < 1e-4 and found.context_error < 1e-4
  assert found.cache_noise < 1e-4 and found.context_noise < 1e-4


# Before what is planted, which forgets all programs: these share theirs.


def test_the_mode_says_so_in_its_exit_status(tmp_path, capsys):
  folder = support.DATA / FIXTURE
  config = mode_flags(
    mode='audit',
    target=str(folder),
    drafter=str(folder / 'dflash'),
    prompt_ids=tuple(map(str, support.trace(FIXTURE)['prompt'])),
    max_new_tokens=24,
    tree_budget=('24', '5'),
    output=str(tmp_path / 'audit.jsonl'),
  )
  assert mode.run(config) == 0
  assert capsys.readouterr().out.count(': passed') == 2
  lines = (tmp_path / 'audit.jsonl').read_text().splitlines()
  assert [json.loads(line)['tree_budget'] for line in lines] == [24, 5]


@pytest.mark.parametrize('count', (0, -1))
def test_nothing_to_decode_is_no_verdict(count):
  """An error of the user: exit status 1 would say that outputs differ."""
  config = mode_flags(
    mode='audit',
    target=str(support.DATA / FIXTURE),
    drafter='random',
    prompt_ids=('1',),
    max_new_tokens=count,
  )
  with pytest.raises(UserError, match=f'max_new_tokens={count} is below 1'):
    mode.run(config)


def test_mask_that_ignores_ancestry(planted):
  honest = stages.verify

  def verify(engine, params, state, tree):
    # Every node sees all before it, as in a chain.
    count = tree.tokens.shape[1]
    chain = jnp.arange(-1, count - 1, dtype=jnp.int32)[None]
    bits = ancestors_from_parents(chain, count)
    bits = jnp.broadcast_to(bits, tree.ancestors.shape)
    return honest(engine, params, state, tree.replace(ancestors=bits))

  planted('verify', verify)
  assert any('divergence' in failure for failure in report().failures)


@pytest.mark.slow
def test_position_from_the_slot(planted):
  honest = stages.verify

  def verify(engine, params, state, tree):
    slots = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
    depths = jnp.broadcast_to(slots, tree.depths.shape)
    return honest(engine, params, state, tree.replace(depths=depths))

  planted('verify', verify)
  assert any('cache error' in failure for failure in report().failures)


def test_compaction_that_skips_a_layer(planted):
  """AR does it as well: both agree with each other, and are both wrong."""
  honest = stages.commit

  def commit(cache, *rest):
    new = honest(cache, *rest)
    return new.replace(latent=new.latent.at[1].set(cache.latent[1]))

  planted('commit', commit)
  assert any('cache error' in failure for failure in report().failures)


@pytest.mark.slow
def test_compaction_of_the_wrong_rows(planted):
  """Slots instead of the path, in one layer: right for chains and for AR."""
  honest = stages.commit

  def commit(cache, rows, path, *rest):
    new = honest(cache, rows, path, *rest)
    slots = jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape)
    wrong = honest(cache, rows, slots.astype(path.dtype), *rest)
    return new.replace(latent=new.latent.at[1].set(wrong.latent[1]))

  planted('commit', commit)
  assert any('divergence' in failure for failure in report().failures)


def test_features_shifted_by_one(planted):
  """Costs acceptance only: the output stays AR's."""
  honest = stages.commit_path

  def commit_path(engine, params, state, num_nodes, out, acceptance, *choice):
    features = jnp.roll(out.features, 1, axis=1)
    out = out.replace(features=features)
    return honest(engine, params, state, num_nodes, out, acceptance)

  planted('commit_path', commit_path)
  found = report()
  assert found.divergence is None
  assert any('context error' in failure for failure in found.failures)


@pytest.mark.slow
def test_bfloat16_divergences_are_judged():
  found = report('bfloat16')
  assert found.failures == []
  for each in (found.divergence, found.oracle_divergence):
    assert each is None or each.near_tie


def test_sampling_is_refused():
  with pytest.raises(UserError, match='greedy'):
    report(temperature=1.0)


# The judge, on synthetic runs: no engine takes part.

CONFIG = dataclasses.replace(
  support.fixture(FIXTURE).config, n_group=4, topk_group=2
)


@pytest.mark.parametrize(
  ('ours', 'theirs', 'margin'),
  (
    # Another expert of the same groups: the two scores.
    ({0, 2}, {1, 2}, 0.1),
    # Their groups are among ours: experts decide, not groups.
    ({0, 2}, {0, 1}, 0.8 - 0.7),
    # Group 1 (0.7 + 0.6) gave way to group 3 (0.1 + 0.3); two scores each.
    ({0, 2}, {0, 7}, (1.3 - 0.4) / 2),
  ),
)
def test_router_margin(ours, theirs, margin):
  choice = np.array([0.9, 0.8, 0.7, 0.6, 0.1, 0.1, 0.1, 0.3])
  found = divergence._router_margin(CONFIG, choice, ours, theirs)
  assert abs(found) == pytest.approx(margin)


def observed(output_ids, logits, experts=None):
  count = len(output_ids)
  if experts is None:
    experts = np.tile(np.array([0, 1]), (count, 1, 1))
  return Observation(
    output_ids=output_ids,
    logits=np.asarray(logits, float),
    choice=np.tile(np.arange(16.0, 0.0, -1.0), (count, 1, 1)),
    experts=np.asarray(experts),
    accepted=[1] * count,
    state=None,
  )


def test_judge():
  target = support.fixture(FIXTURE)
  logits = np.zeros((3, 5))
  logits[1, 2], logits[1, 4] = 1.0, 0.9
  ar = observed([1, 3, 2], logits)
  assert divergence.judge(target, [9], ar, ar, ar) is None
  for noise, near in ((0.04, False), (0.06, True)):
    padded = observed([1, 3, 2], logits + noise)
    found = divergence.judge(
      target, [9], ar, observed([1, 3, 4], logits), padded
    )
    assert (found.position, found.ar_token, found.ddtree_token) == (3, 2, 4)
    assert found.gap == pytest.approx(0.1) and found.near_tie is near
  # Other experts in an earlier row: their margin is judged, not the gap.
  swapped = ar.experts.copy()
  swapped[0, 0] = (0, 8)
  other = observed([1, 3, 4], logits, swapped)
  found = divergence.judge(
    target, [9], ar, other, observed([1, 3, 2], logits + 9)
  )
  assert (found.layer, found.router_margin) == (0, 7.0)
  assert found.router_noise == 0 and not found.near_tie


def test_a_wrong_first_token_is_judged_by_prefill():
  target = support.fixture(FIXTURE)
  ar = observed([1, 2], np.zeros((2, 64)))
  other = observed([target.config.vocab_size - 1, 2], np.zeros((2, 64)))
  found = divergence.judge(target, [9, 8, 7], ar, other, ar)
  assert found.position == 3 and found.noise > 0


@pytest.mark.parametrize(
  ('dtype', 'error', 'noise', 'fails'),
  (
    ('float32', 2e-3, 1.0, True),  # Noise is no excuse there.
    ('bfloat16', 0.05, 0.0, False),
    ('bfloat16', 0.3, 0.05, True),
    ('bfloat16', 0.3, 0.2, False),
    ('bfloat16', 0.5, 0.3, True),  # Too noisy to say.
    ('float32', float('nan'), 0.0, True),
  ),
)
def test_errors_are_judged_by_noise(dtype, error, noise, fails):
  fields = {field.name: 0.0 for field in dataclasses.fields(audits.AuditReport)}
  fields |= {'divergence': None, 'oracle_divergence': None}
  for name in ('cache', 'context'):
    found = fields | {f'{name}_error': error, f'{name}_noise': noise}
    failures = audits._failures(audits.AuditReport(**found), dtype)
    assert [name in text for text in failures] == [True] * fails


@pytest.mark.slow
def test_up_to_the_last_position():
  """Near the limit the oracle knows less than a block."""
  target = support.variant('tiny')
  drafter = api.load_drafter('random', target, 4)
  prompt = support.prompt_of(target.config, 6)
  found = audit(target, drafter, prompt, max_new_tokens=10, capacity=16)
  assert found.failures == []
  with pytest.raises(UserError, match='nothing is left'):
    audit(target, drafter, prompt, capacity=6)


def test_rows_of_a_round_are_cut_on_the_host():
  """On the device every number of rows would be a program of its own."""
  logits = jnp.zeros((9, 3))
  routing = [(jnp.zeros((9, 2)), jnp.zeros((9, 2), jnp.int32))]
  jax.clear_caches()
  events = []
  jax.monitoring.register_event_duration_secs_listener(
    listener := lambda event, *_, **__: events.append(event)
  )
  try:
    for count in range(1, 9):
      rows, choice, experts = observation._rows(logits, routing, count)
      assert len(rows) == len(choice) == len(experts) == count
    assert not [event for event in events if 'backend_compile' in event]
    jnp.zeros(11)[:3]
    assert [event for event in events if 'backend_compile' in event]
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
