"""Drivers, compiled text, stops, limits and what lies behind the length."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decode import Engine, drivers, init_state, stream
from kdtree_jax.decode.compilation import Call
from kdtree_jax.decode.drivers import (
  ALL,
  decode_rounds,
  traced_round,
)
from kdtree_jax.decode.prefill import prefill
from kdtree_jax.decode.round import (
  accept_path,
  build_tree,
  decode_round,
  draft,
  verify,
)
from kdtree_jax.errors import UserError
from kdtree_jax.registry import names
from tests import support

FIXTURE = 'deepseek_v3_trained_drafter'
NEW_TOKENS = 24
TO_HOST = re.compile(r'callback|infeed|outfeed|\bsend|\brecv')


def trained(tree_budget=16, capacity=64, block_size=None):
  """A pair whose rounds commit up to 8 tokens."""
  target = support.fixture(FIXTURE)
  folder = support.DATA / FIXTURE / 'dflash'
  drafter = api.load_drafter(folder, target, block_size)
  options = generation.GenerateOptions(
    tree_budget=tree_budget, capacity=capacity, prefill_chunk=8
  )
  engine = generation.make_engine(target, drafter, 0, options)
  return engine, {'target': target.params, 'drafter': drafter.params}


def fresh(engine, prompts=None, new_tokens=NEW_TOKENS, stop_ids=()):
  prompts = prompts or [support.trace(FIXTURE)['prompt']]
  return init_state(
    engine, prompts, [new_tokens] * len(prompts), stop_ids, jnp.float32
  )


def golden(count):
  trace = support.trace(FIXTURE)
  return trace['ar_ids'][len(trace['prompt']) :][:count]


@pytest.mark.parametrize('budget', (16, 'auto'))
def test_drivers_agree_bitwise(budget):
  engine, params = trained(budget)
  params, _ = support.with_costs(engine, params, fresh(engine))

  def new():
    return support.with_costs(engine, params, fresh(engine))[1]

  looped, _ = drivers.decode_to_end(engine, params, new())
  streamed = [*stream(engine, params, new())][-1]
  by_threes = [*stream(engine, params, new(), 3)]
  traced = [*drivers.traced(engine, params, new())][-1][0]
  rounds = int(looped.stats.rounds)
  assert rounds < NEW_TOKENS
  assert len(by_threes) == 1 + -(-rounds // 3)
  for other in (streamed, by_threes[-1], traced):
    ours, theirs = jax.tree.leaves(looped), jax.tree.leaves(other)
    for a, b in zip(ours, theirs, strict=True):
      assert np.array_equal(a, b)


def test_same_run_twice_is_bitwise_equal():
  engine, params = trained()
  first, _ = drivers.decode_to_end(engine, params, fresh(engine))
  second, _ = drivers.decode_to_end(engine, params, fresh(engine))
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    assert np.array_equal(a, b)


@pytest.mark.parametrize('name', (None, *names('drafter')))
def test_the_loop_never_leaves_the_device(name):
  target = support.variant('tiny')
  drafter = api.load_drafter(name, target, 4) if name else None
  options = generation.GenerateOptions(
    tree_budget=9, capacity=32, prefill_chunk=4
  )
  engine = generation.make_engine(target, drafter, 0, options)
  params = {'target': target.params, 'drafter': {}}
  if drafter:
    params['drafter'] = drafter.params
    if drafter.drafter.needs_golden:
      params['drafter'] = generation.golden_params(engine, [[1]])
  state = fresh(engine, [[1]], 4)
  for function, operands in ((prefill, ()), (decode_rounds, (ALL,))):
    # Before XLA: it adds no way to the host.
    jitted = jax.jit(function, static_argnums=0)
    text = jitted.lower(engine, params, state, *operands).as_text()
    assert 'stablehlo.while' in text
    assert not TO_HOST.findall(text), function.__name__


def test_a_way_to_the_host_is_seen():
  """The control of the tests above and below."""

  def asks(x):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(lambda x: x, shape, x)

  assert TO_HOST.findall(jax.jit(asks).lower(jnp.float32(1)).as_text())


def autoregressive():
  """`trained` without its drafter."""
  engine, params = trained()
  options = generation.GenerateOptions(capacity=64, prefill_chunk=8)
  target = support.fixture(FIXTURE)
  engine = generation.make_engine(target, None, 0, options)
  return engine, params | {'drafter': {}}


MAKERS = {
  'ar': autoregressive,
  'nothing': functools.partial(trained, 0),
  'tree': trained,
  'auto': functools.partial(trained, 'auto'),
}
DRIVERS = {
  'prefill': (prefill, ()),
  'generate': (decode_rounds, (ALL,)),
  'traced': (traced_round, ()),
  'forced': (traced_round, ()),  # With a text.
}


def copies(text, cache):
  """What of a compiled program makes a copy of a cache.

  On a GPU it may be a fusion that is named so, or asynchronous. An update in
  place may have a copy of its small operand in its name.
  """
  made = rf'= \(?f32\[{re.escape(",".join(map(str, cache.shape)))}\]\S*'
  assert re.search(made, text), 'the pattern is stale'
  named = r'%(?!\S*dynamic-update-slice)\S*copy\S*'
  return re.findall(rf'{named} {made}.*|{made} copy\(.*', text)


@pytest.mark.parametrize(
  ('maker', 'driver', 'batch'),
  (
    *itertools.product(('tree',), DRIVERS, (1,)),
    *itertools.product(('ar',), [*DRIVERS][:-1], (1,)),
    *itertools.product(('ar', 'tree'), ('prefill', 'generate'), (3,)),
    *itertools.product(('nothing',), ('generate', 'traced', 'forced'), (1,)),
    *itertools.product(('auto',), ('generate', 'forced'), (1,)),
    ('auto', 'generate', 3),
  ),
)
def test_no_cache_is_copied(maker, driver, batch):
  """No other array has a cache's shape. Nor does the host take part.

  On a machine with a GPU this is the GPU's compiled text.
  """
  engine, params = MAKERS[maker]()
  params, state = support.with_costs(
    engine, params, fresh(engine, [[1, 2, 3]] * batch)
  )
  function, operands = DRIVERS[driver]
  if driver == 'forced':
    operands = (state.tokens,)
  call = Call(function, engine, params, state, operands, donate=True)
  text = call.lower().compile().as_text()
  assert 'while(' in text or driver in ('traced', 'forced')
  assert not TO_HOST.findall(text)
  for cache in (state.cache.latent, *jax.tree.leaves(state.drafter_state)):
    assert not copies(text, cache)


def test_undonated_caches_are_copied():
  """The control of the test above: its pattern does find a copy."""
  engine, params = trained()
  state = fresh(engine, [[1, 2, 3]])
  call = Call(decode_rounds, engine, params, state, (ALL,))
  program = call.lower().compile()
  assert copies(program.as_text(), state.cache.latent)


def test_one_compilation_serves_every_prompt_length():
  engine, params = trained()
  drivers.decode_to_end(engine, params, fresh(engine))
  before = support.compilations()
  for length in (1, 7, 8, 9, 30):
    prompt = support.prompt_of(engine.config, length)
    for new_tokens, stops in ((1, ()), (5, (3,))):
      state = fresh(engine, [prompt], new_tokens, stops)
      drivers.decode_to_end(engine, params, state)
  assert support.compilations() == before


@pytest.mark.parametrize('new_tokens', (1, 2, 3, 7, 23))
def test_max_new_tokens_is_exact(new_tokens):
  engine, params = trained()
  state, seconds = drivers.decode_to_end(
    engine, params, fresh(engine, new_tokens=new_tokens)
  )
  result = drivers.result_of(state, 0, new_tokens, seconds)
  assert result.output_ids == golden(new_tokens)
  assert result.stop_reason == 'length'
  total = sum(result.acceptance_lengths)
  assert total >= new_tokens > total - result.acceptance_lengths[-1]


@pytest.mark.parametrize('stop', sorted(set(golden(40))))
def test_stop_is_the_end(stop):
  """Every token of the output once as the stop: root, mid-path, leaf."""
  engine, params = trained()
  output = golden(40)
  wanted = output[: output.index(stop) + 1]
  state, seconds = drivers.decode_to_end(
    engine, params, fresh(engine, new_tokens=40, stop_ids=(stop,))
  )
  result = drivers.result_of(state, 0, 40, seconds)
  assert result.output_ids == wanted
  assert result.stop_reason == 'stop'
  assert sum(result.acceptance_lengths) == len(wanted)
  assert int(state.length[0]) == len(result.prompt_ids) + len(wanted)


def test_a_stop_at_the_last_allowed_token_is_a_stop():
  """And one right after it is none, even where the same walk accepts it."""
  engine, params = trained()
  output = golden(40)
  firsts = [i for i in range(1, 40) if output[i] not in output[:i]]
  for index, allowed in itertools.product(firsts, (0, 1)):
    allowed += index
    state, seconds = drivers.decode_to_end(
      engine,
      params,
      fresh(engine, new_tokens=allowed, stop_ids=(output[index],)),
    )
    result = drivers.result_of(state, 0, allowed, seconds)
    reason = 'stop' if allowed > index else 'length'
    assert (result.stop_reason, len(result.output_ids)) == (reason, allowed)


def test_finished_rows_and_padding_are_routed_to_no_expert(monkeypatch):
  """They change no output, so that only their routing can show them."""
  engine, params = trained()
  state = fresh(engine, [[1, 2, 3]] * 3)
  state = state.replace(done=jnp.array([True, False, False]))
  shape = (3, engine.decode.draft_depth, engine.config.vocab_size)
  # The last row has nothing to draft: all but its root is padding.
  possible = jnp.array([0, 0, -jnp.inf]).reshape(3, 1, 1)
  tree = build_tree(engine, state, jnp.zeros(shape) + possible)
  honest, routed = Engine.apply, []

  def apply(self, params, *operands, method=None):
    if method is None:
      routed.append(operands[3])
    return honest(self, params, *operands, method=method)

  monkeypatch.setattr(Engine, 'apply', apply)
  verify(engine, params, state, tree)
  (valid,) = routed
  nodes = 1 + engine.decode.tree_budget
  assert valid.sum(axis=1).tolist() == [0, nodes, 1]


def test_rejected_siblings_do_not_stop():
  """Every token that is never produced is a stop; many of them are drafted."""
  engine, params = trained(tree_budget=64)
  output = golden(NEW_TOKENS)
  never = [t for t in range(64) if t not in output][:16]
  state, seconds = drivers.decode_to_end(
    engine, params, fresh(engine, stop_ids=never)
  )
  result = drivers.result_of(state, 0, NEW_TOKENS, seconds)
  assert (result.output_ids, result.stop_reason) == (output, 'length')


@pytest.mark.parametrize('room', (19, 1, 0))
def test_capacity_is_reached_exactly(room):
  """The text so far is a prompt as well; one that fills yields nothing."""
  capacity = 30
  engine, params = trained(capacity=capacity)
  text = support.trace(FIXTURE)['ar_ids'][: capacity - room]
  state, seconds = drivers.decode_to_end(engine, params, fresh(engine, [text]))
  result = drivers.result_of(state, 0, NEW_TOKENS, seconds)
  wanted = support.trace(FIXTURE)['ar_ids'][:capacity]
  assert [*result.prompt_ids, *result.output_ids] == wanted
  assert len(result.output_ids) == room
  assert result.stop_reason == 'capacity'
  assert (result.target_forwards == 0) == (room == 0)


def poisoned(state):
  """NaN wherever nobody may look: behind the length, in both caches."""

  def behind(rows):
    at = jnp.arange(rows.shape[2], dtype=jnp.int32)[None, :]
    hidden = (at >= state.length[:, None])[None, :, :, None]
    return jnp.where(hidden, jnp.nan, rows)

  return state.replace(
    cache=state.cache.replace(latent=behind(state.cache.latent)),
    drafter_state=state.drafter_state.replace(
      context=behind(state.drafter_state.context)
    ),
  )


def test_nothing_behind_the_length_is_read():
  engine, params = trained()
  steps = jax.jit(decode_round, static_argnums=0)
  clean = jax.jit(prefill, static_argnums=0)(
    engine, params, poisoned(fresh(engine))
  )
  dirty = poisoned(clean)
  for number in range(6):
    clean, ours = steps(engine, params, clean)
    dirty, theirs = steps(engine, params, dirty)
    for a, b in zip(
      jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True
    ):
      assert np.array_equal(a, b), f'round {number}'
    length = int(clean.length[0])
    for a, b in (
      (clean.cache.latent, dirty.cache.latent),
      (clean.drafter_state.context, dirty.drafter_state.context),
    ):
      assert np.array_equal(a[:, :, :length], b[:, :, :length])
    dirty = poisoned(dirty)
  assert length > 20


def test_committed_rows_are_those_of_a_fresh_prefill():
  """Five rounds and more of compaction, against never having speculated."""
  engine, params = trained()
  state, _ = drivers.decode_to_end(engine, params, fresh(engine))
  length = int(state.length[0])
  whole = fresh(engine, [state.tokens[0, :length].tolist()], 1)
  whole = jax.jit(prefill, static_argnums=0)(engine, params, whole)
  for a, b in (
    (state.cache.latent, whole.cache.latent),
    (state.drafter_state.context, whole.drafter_state.context),
  ):
    a, b = np.asarray(a[:, :, :length]), np.asarray(b[:, :, :length])
    assert support.relative_error(a, b) < 1e-5
  assert state.tokens[0, length] == whole.tokens[0, length]


def test_every_node_is_verified_as_if_alone():
  """Logits of each node against AR on the tokens of its own path."""
  engine, params = trained()
  state = jax.jit(prefill, static_argnums=0)(engine, params, fresh(engine))
  state, _ = jax.jit(decode_round, static_argnums=0)(engine, params, state)
  engine, _ = trained(tree_budget=24)

  def verified(state):
    tree = build_tree(engine, state, draft(engine, params, state))
    verified = verify(engine, params, state, tree)
    return tree, verified.tokens, verified.logits

  tree, tokens, logits = jax.jit(verified)(state)
  target = support.fixture(FIXTURE)
  length = int(state.length[0])
  prefix = state.tokens[0, :length].tolist()
  paths = {-1: []}
  for node in range(int(tree.num_nodes[0])):
    token = int(tree.tokens[0, node])
    paths[node] = [*paths[int(tree.parents[0, node])], token]
    alone = generation.forward_logits(target, [*prefix, *paths[node]])[-1]
    ours = np.asarray(logits[0, node])
    assert support.relative_error(ours, alone) < 1e-5, f'node {node}'
    assert int(tokens[0, node]) == alone.argmax()


@pytest.mark.slow
def test_a_larger_tree_never_accepts_less():
  engine, params = trained()
  state = jax.jit(prefill, static_argnums=0)(engine, params, fresh(engine))
  state, _ = jax.jit(decode_round, static_argnums=0)(engine, params, state)

  @functools.partial(jax.jit, static_argnums=0)
  def accepted(engine, params, state):
    tree = build_tree(engine, state, draft(engine, params, state))
    tokens = verify(engine, params, state, tree).tokens
    return accept_path(engine, state, tree, tokens).acceptance_length[0]

  lengths = [
    int(accepted(trained(tree_budget=budget)[0], params, state))
    for budget in (0, 7, 33)
  ]
  assert lengths == sorted(lengths)
  assert lengths[0] == 1 < lengths[-1]


@pytest.mark.slow
def test_shrinking_and_growing_in_one_process():
  wanted = golden(12)
  for budget, capacity in ((33, 64), (1, 32), (33, 64), (7, 128)):
    engine, params = trained(budget, capacity)
    state, seconds = drivers.decode_to_end(
      engine, params, fresh(engine, new_tokens=12)
    )
    assert drivers.result_of(state, 0, 12, seconds).output_ids == wanted


def test_a_smaller_block_uses_the_first_positions_of_the_trained_one():
  engine, params = trained()
  small, _ = trained(block_size=4)
  state = jax.jit(prefill, static_argnums=0)(engine, params, fresh(engine))
  assert np.array_equal(
    draft(engine, params, state)[:, :3], draft(small, params, state)
  )


def test_bfloat16_runs_and_repeats_bitwise():
  target = api.load_target(support.DATA / FIXTURE, 'bfloat16')
  drafter = api.load_drafter(support.DATA / FIXTURE / 'dflash', target)
  prompt = support.trace(FIXTURE)['prompt']
  first, second = (
    generation.generate(
      target,
      drafter,
      prompt,
      max_new_tokens=12,
      stop_ids=(),
      costs='bytes',
    )
    for _ in range(2)
  )
  assert first.output_ids == second.output_ids
  assert len(first.output_ids) == 12


@pytest.mark.slow
def test_without_jit():
  """JAX_DISABLE_JIT: every operation is legal outside a trace as well."""
  target = support.variant('single_head')
  drafter = api.load_drafter('repeat', target, 2)
  options = generation.GenerateOptions(
    tree_budget=1, capacity=4, prefill_chunk=2
  )
  engine = generation.make_engine(target, drafter, 0, options)
  params = {'target': target.params, 'drafter': {}}
  state = fresh(engine, [[5, 7]], 2)
  wanted, _ = drivers.decode_to_end(engine, params, fresh(engine, [[5, 7]], 2))
  with jax.disable_jit():
    state = prefill(engine, params, state)
    state, _ = decode_round(engine, params, state)
  assert np.array_equal(state.tokens[:, :4], wanted.tokens[:, :4])


def test_engine_refuses_what_cannot_be():
  engine, _ = trained()
  with pytest.raises(UserError, match='needs a drafter'):
    Engine(engine.config, None, engine.decode)
  with pytest.raises(UserError, match='block_size=4'):
    Engine(
      engine.config,
      engine.drafter,
      DecodeConfig(tree_budget=3, draft_depth=3),
    )
  with pytest.raises(UserError, match='max_position_embeddings=512'):
    trained(capacity=513)
