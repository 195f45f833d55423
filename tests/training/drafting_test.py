"""The forward over many anchors is the engine's drafting, and it teaches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.config import SLIDING
from kdtree_jax.drafters.attention import block_attention
from kdtree_jax.drafters.dflash import DFlashDrafter
from kdtree_jax.model import Transformer
from kdtree_jax.training import acceptance, drafting
from kdtree_jax.training.packing import pack
from tests import support

NAME = 'deepseek_v3_trained_drafter'
END = 5
LENGTH = 29
SLIDES = {'layer_types': (SLIDING, 'full_attention'), 'sliding_window': 4}
VARIANTS = {
  'plain': {},
  'causal': {'causal': True},
  'sliding': SLIDES,
  'sliding, from the root': {
    **SLIDES,
    'causal': False,
    'window_from_root': True,
  },
}


def trained():
  """Target, drafter and its parameters."""
  target = support.fixture(NAME)
  loaded = api.load_drafter(support.DATA / NAME / 'dflash', target)
  return target, loaded.drafter, loaded.params


def windows():
  """`[2, LENGTH + 1]`: documents of 11, 7 and 11 tokens, and one of 29."""
  rng = np.random.default_rng(3)
  tokens = rng.integers(6, 60, (2, LENGTH + 1)).astype(np.int32)
  tokens[0, [10, 17]] = END
  return tokens


@functools.cache
def engine_draft(config, block_size):
  """Compiles draft logits `[D, V]` at a root by way of commit and draft.

  Of a document `[LENGTH]`, padded, and the index of its root.
  """
  target, _, params = trained()
  drafter = DFlashDrafter(config, block_size)
  model = Transformer(target.config, drafter.tap_layers)

  def run(document, root):
    batch = pack(jnp.pad(document[None], ((0, 0), (0, 1))), -1)
    features = drafting.frozen_forward(model, target.params, batch).features
    state = drafter.init_state(1, 48, jnp.float32)
    zero = jnp.zeros((1,), jnp.int32)
    state = drafter.commit(params, state, features, zero)
    # Rows that are not committed are never read.
    known = jnp.arange(48, dtype=jnp.int32)[None, None, :, None] < root
    context = jnp.where(known, state.context, jnp.nan)
    head = drafting.target_head(model, target.params)
    state = state.replace(context=context)
    return drafter.draft(params, state, document[None], zero + root, head)[0]

  return jax.jit(run)


@functools.cache
def parallel_draft(config, block_size):
  """Compiles draft logits `[B, A, D, V]` of windows and anchors."""
  target, _, params = trained()
  drafter = DFlashDrafter(config, block_size)
  model = Transformer(target.config, drafter.tap_layers)

  def run(windows, index):
    batch = pack(windows, END)
    features = drafting.frozen_forward(model, target.params, batch).features
    head = drafting.target_head(model, target.params)
    anchors = drafting.Anchors(index, jnp.ones_like(index, jnp.bool_))
    return drafting.draft_logits(
      drafter, params, head, features, batch, anchors
    )

  return jax.jit(run)


@pytest.mark.parametrize(
  'variant',
  [
    'plain',
    'sliding',
    pytest.param('causal', marks=pytest.mark.slow),
    pytest.param('sliding, from the root', marks=pytest.mark.slow),
  ],
)
def test_every_anchor_drafts_as_the_engine_does(variant):
  target, drafter, params = trained()
  config = dataclasses.replace(drafter.config, **VARIANTS[variant])
  tokens = windows()
  # The first of a document and the last of the sequence are anchors, too.
  anchors = np.array([[3, 9, 10, 12, 15, 20, 28], [1, 2, 7, 13, 17, 27, 28]])
  logits = parallel_draft(config, 6)(tokens, anchors.astype(np.int32))
  assert logits.shape == (2, 7, 5, 64)
  begins = [[0] * 3 + [11] * 2 + [18] * 2, [0] * 7]
  for row, i in np.ndindex(2, 7):
    begin = begins[row][i]
    document = np.pad(tokens[row, begin:LENGTH], (0, begin))
    root = np.int32(anchors[row, i] - begin)
    wanted = engine_draft(config, 6)(document, root)
    assert support.relative_error(logits[row, i], wanted) < 1e-5


def test_an_anchor_sees_its_past_its_document_and_its_own_block_only():
  config = trained()[1].config
  tokens = windows()

  def draft(tokens, *anchors):
    # Seven, so that the program is that of another test.
    index = np.repeat(np.array(anchors, np.int32), [3, 4], axis=1)
    return np.asarray(parallel_draft(config, 6)(tokens, index))[:, [0, -1]]

  anchors = [[13, 15], [4, 20]]
  plain = draft(tokens, *anchors)

  def moved(row, at):
    changed = tokens.copy()
    changed[row, at] = 6 + (changed[row, at] - 5) % 54
    return np.abs(draft(changed, *anchors) - plain).max(axis=(2, 3)) > 0

  # What stands behind an anchor, and in the document before: nothing moves.
  assert not moved(0, [3, 9, 16, 20, 28]).any()
  assert moved(0, [12]).tolist() == [[True, True], [False, False]]
  # The root itself moves its own block and that of later anchors.
  assert moved(0, [13]).tolist() == [[True, True], [False, False]]
  assert moved(1, [12]).tolist() == [[False, False], [False, True]]
  # Another block moves nothing.
  other = draft(tokens, [13, 24], [4, 9])
  assert np.array_equal(other[:, 0], plain[:, 0])


def test_anchors_are_different_and_have_text_on_both_sides():
  batch = pack(jnp.asarray(windows()), END)
  for seed in range(5):
    anchors = drafting.sample_anchors(jax.random.key(seed), batch, 27)
    for row, edges in enumerate(([0, 10, 11, 17, 18, 28], [0, 28])):
      chosen = anchors.index[row][anchors.valid[row]].tolist()
      assert sorted(chosen) == [i for i in range(29) if i not in edges]
  first = drafting.sample_anchors(jax.random.key(0), batch, 4)
  second = drafting.sample_anchors(jax.random.key(1), batch, 4)
  assert not np.array_equal(first.index, second.index)


def test_slots_beyond_the_document_have_no_target():
  batch = pack(jnp.asarray(windows()), END)
  index = jnp.array([[8, 20], [26, 3]], jnp.int32)
  anchors = drafting.Anchors(index, jnp.array([[True] * 2, [True, False]]))
  valid = drafting.has_target(batch, anchors, 4)
  wanted = [[[1, 1, 0, 0], [1] * 4], [[1, 1, 0, 0], [0] * 4]]
  assert np.array_equal(valid, np.array(wanted, bool))


@functools.cache
def loss_and_gradient():
  """Compiles them, of parameters, share of hard targets and prefix power."""
  target, drafter, _ = trained()
  model = Transformer(target.config, drafter.tap_layers)

  def run(params, hard_weight, prefix_power):
    batch = pack(jnp.asarray(windows()), END)
    out = drafting.frozen_forward(model, target.params, batch)
    anchors = drafting.sample_anchors(jax.random.key(0), batch, 5)
    result = drafting.draft_loss(
      drafter,
      params,
      model,
      target.params,
      out,
      batch,
      anchors,
      gamma=2.0,
      prefix_power=prefix_power,
      hard_weight=hard_weight,
    )
    return result.loss, result

  return jax.jit(jax.value_and_grad(run, has_aux=True))


def test_the_loss_is_the_weighted_divergence(monkeypatch):
  params, run = trained()[2], loss_and_gradient()
  (soft, (hard, _), (half, _)) = (
    run(params, x, 0.0)[0] for x in (0.0, 1.0, 0.5)
  )
  soft, sums = soft
  weights = np.exp(-np.arange(7) / 2.0)
  assert np.array_equal(drafting.position_weights(7, 2.0), np.float32(weights))
  wanted = (weights * sums.divergence).sum() / (weights * sums.count).sum()
  assert np.isclose(soft, wanted, rtol=1e-5)
  assert np.isclose(half, (soft + hard) / 2, rtol=1e-5)
  assert (np.asarray(sums.divergence) >= 0).all()
  # In pieces, computed twice, it is the same, and so is its gradient.
  (_, wanted) = run(params, 0.5, 0.0)
  monkeypatch.setattr(drafting, 'LOGITS_AT_ONCE', 1)
  (again, _), found = loss_and_gradient.__wrapped__()(params, 0.5, 0.0)
  assert np.isclose(half, again, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
    assert np.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_slot_weighs_as_much_as_its_prefix_is_probable():
  target, drafter, params = trained()
  model = Transformer(target.config, drafter.tap_layers)
  batch = pack(jnp.asarray(windows()), END)
  anchors = drafting.sample_anchors(jax.random.key(0), batch, 5)

  @jax.jit
  def seen(variables, params):
    out = drafting.frozen_forward(model, variables['params'], batch)
    head = drafting.target_head(model, variables['params'])
    logits = drafting.draft_logits(
      drafter, params, head, out.features, batch, anchors
    )
    best = model.apply(variables, out.hidden, method='logits').argmax(axis=-1)
    return jax.nn.log_softmax(logits), best

  log_q, best = map(np.asarray, seen({'params': target.params}, params))
  valid = np.asarray(drafting.has_target(batch, anchors, 7))
  total, weight = 0.0, 0.0
  for row, a, k in zip(*np.nonzero(valid), strict=True):
    at = int(anchors.index[row, a]) + k
    slots = np.asarray(log_q[row, a])
    before = [slots[i, windows()[row, at - k + i + 1]] for i in range(k)]
    here = np.exp(-k / 2.0 + 0.5 * np.sum(before))
    total -= here * slots[k, best[row, at]]
    weight += here
  (loss, _), gradient = loss_and_gradient()(params, 1.0, 0.5)
  assert np.isclose(loss, total / weight, rtol=1e-4)
  (plain, _), _ = loss_and_gradient()(params, 1.0, 0.0)
  assert not np.isclose(loss, plain, rtol=1e-3)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_the_gradient_of_attention_is_that_of_a_plain_softmax():
  keys = jax.random.split(jax.random.key(0), 6)
  shapes = [(2, 3, 4, 2, 2, 8), *[(2, 5, 2, 8)] * 2, *[(2, 3, 4, 2, 8)] * 2]
  q, k, v, own_k, own_v = (
    jax.random.normal(key, shape)
    for key, shape in zip(keys, shapes, strict=False)
  )
  seen = jax.random.bernoulli(keys[5], 0.5, (2, 3, 1, 5))
  within = jnp.tril(jnp.ones((4, 4), jnp.bool_))

  def plain(q, k, v, own_k, own_v):
    scores = jnp.concatenate(
      [
        jnp.where(
          seen[:, None, None], jnp.einsum('bawkgd,bskd->bkgaws', q, k), -jnp.inf
        ),
        jnp.where(
          within[None, None, None, None],
          jnp.einsum('bawkgd,bavkd->bkgawv', q, own_k),
          -jnp.inf,
        ),
      ],
      axis=-1,
    )
    probs = jax.nn.softmax(scores * 0.3, axis=-1)
    out = jnp.einsum('bkgaws,bskd->bawkgd', probs[..., :5], v)
    out = out + jnp.einsum('bkgawv,bavkd->bawkgd', probs[..., 5:], own_v)
    return jnp.sum(jnp.sin(out))

  def ours(q, k, v, own_k, own_v):
    out = block_attention(q, (k, v), (own_k, own_v), (seen, within), 0.3)
    return jnp.sum(jnp.sin(out))

  both = [
    jax.jit(jax.value_and_grad(f, argnums=range(5)))(q, k, v, own_k, own_v)
    for f in (plain, ours)
  ]
  for wanted, found in zip(*map(jax.tree.leaves, both), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('half', (0, 1), ids=('key', 'value'))
def test_a_row_that_is_not_finite_reaches_only_those_that_see_it(half):
  """A row of the context, and one of a block, in results and gradients."""
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(1, 2, 3, 1, 2, 4)).astype(np.float32)
  context = rng.normal(size=(2, 1, 5, 1, 4)).astype(np.float32)
  block = rng.normal(size=(2, 1, 2, 3, 1, 4)).astype(np.float32)
  # Only the first block sees row 2; only the last slots see themselves.
  seen = np.ones((1, 2, 1, 5), bool)
  seen[0, 1, :, 2] = False
  within = np.tril(np.ones((3, 3), bool))

  @jax.jit
  def run(context, block):
    def attend(queries):
      return block_attention(queries, context, block, (seen, within), 0.3)

    out, gradient = jax.vjp(attend, queries)
    return out, gradient(out)[0]

  wanted = run(tuple(context), tuple(block))
  context[half, 0, 2, 0, 1] = block[half, 0, 1, 2, 0, 3] = np.nan
  for found, clean in zip(
    run(tuple(context), tuple(block)), wanted, strict=True
  ):
    assert np.isnan(found[0, 0]).all() and np.isnan(found[0, 1, 2]).all()
    np.testing.assert_array_equal(found[0, 1, :2], clean[0, 1, :2])


# -------------------------------------------------------------- acceptance


def test_acceptance_lengths_by_hand():
  """A text of 1, 2, 0 and a drafter whose second choice is right at times."""
  following = jnp.array([[1, 2, 0], [1, 2, 0], [3, 2, 0]], jnp.int32)
  probabilities = np.full((3, 3, 4), 0.01)
  # Right, right, right; second best at depth 1; not at all at depth 0.
  for row, depth, token, p in (
    (0, 0, 1, 0.9),
    (0, 1, 2, 0.9),
    (0, 2, 0, 0.9),
    (1, 0, 1, 0.9),
    (1, 1, 3, 0.6),
    (1, 1, 2, 0.35),
    (1, 2, 0, 0.97),
    (2, 0, 1, 0.9),
    (2, 1, 2, 0.9),
    (2, 2, 0, 0.9),
  ):
    probabilities[row, depth, token] = p
  logits = jnp.asarray(np.log(probabilities), jnp.float32)
  lengths = jax.jit(acceptance.acceptance_lengths, static_argnums=2)(
    logits, following, (2, 5)
  )
  # Of two nodes the better chain has both; of five the other one three, too.
  assert lengths.tolist() == [[4, 3, 4], [2, 2, 4], [1, 1, 1]]


def test_rounds_go_from_root_to_root():
  lengths = jnp.array([[1, 2], [2, 3], [9, 9], [1, 1], [3, 1], [1, 1]])
  allowed = jnp.array([True, True, True, True, True, False])
  # From 1: the first policy takes 1, 3, 4; the second 1, 4 and 5, which does
  # not count.
  total, count = acceptance.rounds(lengths.astype(jnp.int32), allowed, 1)
  assert total.tolist() == [2 + 1 + 3, 3 + 1]
  assert count.tolist() == [3, 2]


def test_measured_on_greedy_text_it_is_what_decoding_accepts():
  target, drafter, params = trained()
  loaded = api.LoadedDrafter('test', drafter, params)
  prompt = support.trace(NAME)['prompt']
  first, depth = len(prompt), drafter.block_size - 1
  result = generation.generate(
    target, loaded, prompt, max_new_tokens=40, tree_budget=16, stop_ids=()
  )
  text = [*prompt, *result.output_ids]
  batch = pack(jnp.asarray([[*text, 0]], jnp.int32), -1)
  model = Transformer(target.config, drafter.tap_layers)

  @jax.jit
  def sums_of(batch):
    out = drafting.frozen_forward(model, target.params, batch)
    return acceptance.measure(
      drafter,
      params,
      model,
      target.params,
      out,
      batch,
      budgets=(16,),
      first=first,
    )

  sums = sums_of(batch)
  lengths = np.array(result.acceptance_lengths)
  roots = first + np.cumsum(lengths) - lengths
  counted = lengths[roots + depth < len(text)]
  assert int(sums['rounds'][1]) == len(counted) > 3
  assert int(sums['accepted'][1]) == counted.sum()
  assert sums['accepted'][0] / sums['rounds'][0] <= counted.mean()
