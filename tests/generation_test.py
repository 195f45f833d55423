"""Batches, limits, streams, further turns, kept chains: the public calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import api, generation, sessions
from kdtree_jax.decode import drivers, init_state
from kdtree_jax.errors import UserError
from kdtree_jax.tree import check_invariants, keep_top1_chain
from kdtree_jax.tree.policies import best_first, chain
from tests import support

FIXTURE = 'deepseek_v3_trained_drafter'


@pytest.fixture(scope='module')
def pair():
  target = support.fixture(FIXTURE)
  folder = support.DATA / FIXTURE / 'dflash'
  return target, api.load_drafter(folder, target)


def prompts_of(target, lengths):
  return [
    support.prompt_of(target.config, n, seed=i) for i, n in enumerate(lengths)
  ]


OPTIONS = {
  'max_new_tokens': 20,
  'tree_budget': 16,
  'capacity': 64,
  'prefill_chunk': 8,
  'stop_ids': (),
}


@pytest.mark.parametrize(
  'temperature', (0.8, pytest.param(0.0, marks=pytest.mark.slow))
)
def test_rows_equal_their_single_runs(pair, temperature):
  """Lengths of 1, 7, 30 and 44: the last reaches the capacity early."""
  target, drafter = pair
  prompts = prompts_of(target, (1, 7, 30, 44))
  options = OPTIONS | {'temperature': temperature, 'max_new_tokens': 25}
  together = generation.generate_batch(target, drafter, prompts, **options)
  for i, prompt in enumerate(prompts):
    alone = generation.generate(target, drafter, prompt, **options, seed=i)
    assert together[i].output_ids == alone.output_ids, i
    assert together[i].acceptance_lengths == alone.acceptance_lengths, i
    assert together[i].stop_reason == alone.stop_reason, i
  assert [len(r.output_ids) for r in together] == [25, 25, 25, 20]
  assert together[3].stop_reason == 'capacity'


def test_neighbours_change_no_bit(pair):
  """At equal B: other texts, other lengths, neighbours that end at once."""
  target, drafter = pair
  options = generation.GenerateOptions(**OPTIONS)
  engine = generation.make_engine(target, drafter, 0, options)
  params = {'target': target.params, 'drafter': drafter.params}
  mine = support.prompt_of(target.config, 9)

  def run(neighbours, limits, stops=()):
    state = init_state(
      engine, [mine, *neighbours], [20, *limits], stops, jnp.float32
    )
    return drivers.decode_to_end(engine, params, state)[0]

  usual = run(prompts_of(target, (9, 9)), (20, 20))
  length = int(usual.length[0])
  for neighbours, limits in (
    (prompts_of(target, (1, 40)), (1, 24)),
    ([[63] * 9, [0] * 30], (3, 2)),
    ([mine, mine], (1, 1)),
  ):
    other = run(neighbours, limits)
    assert np.array_equal(usual.tokens[0], other.tokens[0])
    assert np.array_equal(
      usual.cache.latent[:, 0, :length], other.cache.latent[:, 0, :length]
    )
    assert np.array_equal(
      usual.stats.acceptance_length[0], other.stats.acceptance_length[0]
    )


def test_stops_are_of_the_row(pair):
  target, drafter = pair
  prompts = prompts_of(target, (5, 11, 3))
  free = generation.generate_batch(target, drafter, prompts, **OPTIONS)
  stop = free[1].output_ids[6]
  options = OPTIONS | {'stop_ids': (stop,)}
  for before, after in zip(
    free,
    generation.generate_batch(target, drafter, prompts, **options),
    strict=True,
  ):
    wanted = before.output_ids
    if stop in wanted:
      wanted = wanted[: wanted.index(stop) + 1]
      assert after.stop_reason == 'stop'
    assert after.output_ids == wanted


SHAPES = (
  # A tree of the root alone and a full block: see also `lossless_test`.
  pytest.param(24, 0, 8, marks=pytest.mark.slow),
  pytest.param(24, 5, 8, marks=pytest.mark.slow),
  pytest.param(33, 16, 8, marks=pytest.mark.slow),
  pytest.param(40, 1, 3, marks=pytest.mark.slow),
  (17, 31, 5),
  pytest.param(64, 7, 2, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(('capacity', 'budget', 'block'), SHAPES)
def test_random_lengths_around_the_limits(capacity, budget, block):
  """34 (prompt, max_new_tokens) pairs a shape: exact, and AR's tokens."""
  target = support.fixture(FIXTURE)
  folder = support.DATA / FIXTURE / 'dflash'
  drafter = api.load_drafter(folder, target, block)
  rng = np.random.default_rng(capacity)
  text = support.prompt_of(target.config, capacity, seed=capacity)
  shape = {'capacity': capacity, 'prefill_chunk': 8, 'stop_ids': ()}
  wanted = {}
  for _ in range(34):
    length = int(rng.integers(1, capacity + 1))
    room = capacity - length
    count = int(rng.integers(1, 4)) + max(0, room - int(rng.integers(0, 6)))
    if length not in wanted:
      wanted[length] = generation.generate(
        target, None, text[:length], max_new_tokens=capacity, **shape
      ).output_ids
      assert len(wanted[length]) == room
    result = generation.generate(
      target,
      drafter,
      text[:length],
      max_new_tokens=count,
      tree_budget=budget,
      **shape,
    )
    assert result.output_ids == wanted[length][:count]
    reason = 'length' if count <= room else 'capacity'
    assert result.stop_reason == reason


@pytest.mark.parametrize('rounds', (1, 3, 100))
def test_stream_is_generate_in_pieces(pair, rounds):
  target, drafter = pair
  prompts = prompts_of(target, (4, 12, 7))
  wanted = generation.generate_batch(target, drafter, prompts, **OPTIONS)
  stream = sessions.Stream(
    target, drafter, prompts, rounds_per_step=rounds, **OPTIONS
  )
  pieces = [[] for _ in prompts]
  for update in stream:
    for piece, new in zip(pieces, update.new_ids, strict=True):
      piece += new
  for piece, result, want in zip(pieces, stream.results(), wanted, strict=True):
    assert piece == result.output_ids == want.output_ids
    assert result.acceptance_lengths == want.acceptance_lengths
    assert result.stop_reason == 'length'


def test_an_interrupted_stream_keeps_its_tokens(pair):
  target, drafter = pair
  stream = sessions.Stream(target, drafter, prompts_of(target, (4,)), **OPTIONS)
  updates = iter(stream)
  taken = [next(updates).new_ids[0] for _ in range(3)]
  updates.close()
  (result,) = stream.results()
  assert result.output_ids == sum(taken, [])
  assert result.stop_reason == 'interrupted'
  assert result.target_forwards == 3


def test_a_stream_goes_on_where_it_was_left(pair):
  target, drafter = pair
  prompts = prompts_of(target, (4,))
  stream = sessions.Stream(target, drafter, prompts, **OPTIONS)
  (waiting,) = stream.results()
  assert (waiting.output_ids, waiting.stop_reason) == ([], 'interrupted')
  for update in stream:
    first = update.new_ids[0]
    break
  rest = sum((update.new_ids[0] for update in stream), [])
  (wanted,) = generation.generate_batch(target, drafter, prompts, **OPTIONS)
  assert first + rest == wanted.output_ids
  assert stream.results()[0].seconds.prefill > 0


@pytest.mark.parametrize(
  'name', ('oracle', pytest.param('adversarial', marks=pytest.mark.slow))
)
def test_golden_drafters_know_the_draws_of_their_seed(name):
  target = support.variant('tiny')
  drafter = api.load_drafter(name, target, 4)
  results = generation.generate_batch(
    target,
    drafter,
    [[1, 2], [3]],
    seeds=[70, 3],
    **OPTIONS | {'temperature': 2.0, 'max_new_tokens': 12},
  )
  wanted = 4 if name == 'oracle' else 1
  for result in results:
    assert set(result.acceptance_lengths) == {wanted}


def letters(ids):
  """A toy tokenizer: two letters a token, so that strings cross borders."""
  return ''.join(chr(97 + i // 8) + chr(97 + i % 8) for i in ids)


@pytest.mark.parametrize('place', (0, 1, 5, 12))
@pytest.mark.parametrize('rounds', (1, 4))
def test_stop_strings_cross_token_borders(pair, place, rounds):
  target, drafter = pair
  prompts = prompts_of(target, (4,))
  (free,) = generation.generate_batch(target, drafter, prompts, **OPTIONS)
  text = letters(free.output_ids)
  stop = text[2 * place + 1 : 2 * place + 4]
  end = text.index(stop) + len(stop)
  stream = sessions.Stream(
    target,
    drafter,
    prompts,
    rounds_per_step=rounds,
    stop_strings=(stop, 'zz'),
    decode=letters,
    **OPTIONS,
  )
  shown = sum((update.new_ids[0] for update in stream), [])
  (result,) = stream.results()
  wanted = free.output_ids[: -(-end // 2)]
  assert result.output_ids == shown == wanted
  assert result.stop_reason == 'stop'
  assert sum(result.acceptance_lengths) == len(wanted)


@pytest.fixture
def compilations():
  """Grows by one for each program that XLA compiles or JAX finds on disk."""
  seen = []

  def listen(event, seconds, **_):
    if event.endswith('backend_compile_duration'):
      seen.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield seen
  jax.monitoring.unregister_event_duration_listener(listen)


def test_loops_on_the_host_compile_nothing(pair, compilations):
  """From the prefill on, to the truncated results, whatever was compiled."""
  target, drafter = pair
  prompts = prompts_of(target, (4, 4))
  free = generation.generate_batch(target, drafter, prompts, **OPTIONS)
  stop = letters(free[0].output_ids)[21:24]
  longest = 0

  def decode(ids):
    nonlocal longest
    longest = max(longest, len(ids))
    return letters(ids)

  stream = sessions.Stream(
    target, drafter, prompts, stop_strings=(stop,), decode=decode, **OPTIONS
  )
  jax.clear_caches()
  jnp.zeros(3) + jnp.arange(3.0)
  assert compilations, 'nothing is counted'
  compilations.clear()
  for _ in stream:
    stream.results()
  results = stream.results()
  assert not compilations
  assert results[0].stop_reason == 'stop' and len(results[1].output_ids) > 1
  # A few tokens before the new one are decoded again, not all.
  assert longest <= 6


def test_recorded_rounds_compile_nothing(pair, compilations):
  target, drafter = pair
  prompt = prompts_of(target, (4,))[0]
  counts = []
  for count in (2, 20):
    options = OPTIONS | {'max_new_tokens': count}
    jax.clear_caches()
    compilations.clear()
    generation.generate(target, drafter, prompt, record_rounds=True, **options)
    counts.append(len(compilations))
  # However many rounds: the program itself is compiled before the first.
  assert counts[1] <= counts[0]


def test_stop_strings_of_letters_in_parts(pair):
  """A function that gives no bytes will do; none is asked for all tokens."""
  target, drafter = pair
  prompts = prompts_of(target, (4,))
  (free,) = generation.generate_batch(target, drafter, prompts, **OPTIONS)
  place = next(
    i for i in range(4, 18) if len(set(free.output_ids[i : i + 3])) == 3
  )
  taken = free.output_ids[place : place + 3]
  parts = dict(zip(taken, '漢'.encode(), strict=True))

  def decode(ids):
    return bytes(parts.get(i, 97) for i in ids).decode('utf-8', 'replace')

  stream = sessions.Stream(
    target, drafter, prompts, stop_strings=('漢',), decode=decode, **OPTIONS
  )
  for _ in stream:
    pass
  text = decode(free.output_ids)
  assert '漢' in text
  wanted = next(n for n in range(21) if '漢' in decode(free.output_ids[:n]))
  assert stream.results()[0].output_ids == free.output_ids[:wanted]


@pytest.mark.parametrize(
  'temperature', (0.7, pytest.param(0.0, marks=pytest.mark.slow))
)
def test_turns_equal_a_fresh_run_on_the_whole_text(pair, temperature):
  target, drafter = pair
  options = OPTIONS | {'temperature': temperature}
  talk = sessions.Conversation(target, drafter, **options)
  text = []
  for turn, count in ((5, 9), (1, 3), (19, 14)):
    ids = support.prompt_of(target.config, turn, seed=turn)
    answer = talk.send(ids, count)
    text += ids
    fresh = generation.generate(
      target, drafter, text, **options | {'max_new_tokens': count}
    )
    assert answer.prompt_ids == text
    assert answer.output_ids == fresh.output_ids
    text += answer.output_ids
  with pytest.raises(UserError, match='capacity'):
    talk.send([1] * 64)
  again = talk.send([2], 4)
  assert again.prompt_ids == [*text, 2]


def test_a_turn_after_a_stop_follows_the_stop(pair):
  target, _ = pair
  prompt = support.prompt_of(target.config, 6)
  free = generation.generate(target, None, prompt, **OPTIONS)
  stop = free.output_ids[3]
  options = OPTIONS | {'stop_ids': (stop,)}
  talk = sessions.Conversation(target, None, **options)
  first = talk.send(prompt)
  assert first.stop_reason == 'stop'
  second = talk.send([7, 8])
  text = [*prompt, *first.output_ids, 7, 8]
  fresh = generation.generate(target, None, text, **options)
  assert second.output_ids == fresh.output_ids


def test_the_drafter_ends_and_the_target_goes_on(pair):
  """Behind its last position a drafter proposes nothing."""
  import dataclasses

  target, drafter = pair
  config = dataclasses.replace(
    drafter.drafter.config, max_position_embeddings=24
  )
  short = dataclasses.replace(
    drafter, drafter=dataclasses.replace(drafter.drafter, config=config)
  )
  prompt = support.trace(FIXTURE)['prompt']
  options = OPTIONS | {'max_new_tokens': 40}
  result = generation.generate(target, short, prompt, **options)
  wanted = generation.generate(target, None, prompt, **options)
  assert result.output_ids == wanted.output_ids
  position = np.cumsum([len(prompt), *result.acceptance_lengths])
  for start, nodes in zip(position, result.num_nodes, strict=False):
    assert (nodes == 1) == (start + 8 > 24)
  assert 1 < max(result.num_nodes) == 17


@pytest.mark.parametrize('budget', (1, 4, 9, 40))
def test_keep_top1_chain(budget):
  """Flat, noisy drafts, whose best-first tree is wide and shallow."""
  rng = np.random.default_rng(budget)
  logits = jnp.asarray(rng.normal(size=(5, 6, 30)) * 0.2, jnp.float32)
  logits = logits.at[3].multiply(50.0).at[4, 3].set(-jnp.inf)
  root = jnp.arange(5, dtype=jnp.int32)

  @jax.jit
  def trees(logits, root):
    plain = best_first(logits, root, budget)
    return plain, keep_top1_chain(plain, logits), chain(logits, root, budget)

  plain, seeded, spine = jax.device_get(trees(logits, root))
  check_invariants(seeded)
  for b in range(5):
    paths = [token_paths(tree, b) for tree in (plain, seeded, spine)]
    assert set(paths[2]) <= set(paths[1]), 'the chain is not whole'
    assert len(paths[1]) == len(paths[0]), 'the size has changed'
    kept = [path for path in paths[0] if path in paths[1]]
    lost = paths[0][len(kept) :]
    assert paths[0][: len(kept)] == kept, 'a better node gave way'
    assert len(lost) <= len(set(paths[2]) - set(paths[0]))
    if set(paths[2]) <= set(paths[0]):
      assert paths[1] == paths[0]


def token_paths(tree, row):
  found = [()]
  for node in range(1, int(tree.num_nodes[row])):
    parent = int(tree.parents[row, node])
    found.append((*found[parent], int(tree.tokens[row, node])))
  return found


@pytest.mark.parametrize(
  ('drafter_name', 'budgets'),
  (
    ('random', (16,)),
    ('oracle', (3, 16)),
    pytest.param('dflash', (3, 16), marks=pytest.mark.slow),
  ),
)
def test_keep_top1_chain_changes_no_token(drafter_name, budgets):
  target = support.variant('tiny')
  drafter = api.load_drafter(drafter_name, target, 6)
  prompt = support.prompt_of(target.config, 5)
  wanted = generation.generate(target, None, prompt, **OPTIONS).output_ids
  for budget in budgets:
    result = generation.generate(
      target,
      drafter,
      prompt,
      keep_top1_chain=True,
      **OPTIONS | {'tree_budget': budget},
    )
    assert result.output_ids == wanted
    if drafter_name == 'oracle':
      assert set(result.acceptance_lengths) == {min(6, 1 + budget)}


@pytest.mark.parametrize('kind', (np.array, np.uint8, jnp.asarray, tuple))
def test_ids_of_any_library(pair, kind):
  target, drafter = pair
  prompt = support.prompt_of(target.config, 7)
  options = OPTIONS | {'max_new_tokens': np.int64(20)}
  wanted = generation.generate(target, drafter, prompt, **OPTIONS)
  given = kind(prompt)
  result = generation.generate(target, drafter, given, **options)
  assert (result.prompt_ids, result.output_ids) == (prompt, wanted.output_ids)
  assert {type(i) for i in result.prompt_ids} == {int}


def test_no_step_of_prefill_is_larger_than_the_capacity(pair):
  target, _ = pair
  ids = support.prompt_of(target.config, 7)
  wanted = generation.forward_logits(target, ids)
  for chunk in (10**7, np.int64(2**40)):
    assert np.array_equal(
      generation.forward_logits(target, ids, prefill_chunk=chunk), wanted
    )
  with pytest.raises(UserError, match='prefill_chunk=1.5'):
    generation.forward_logits(target, ids, prefill_chunk=1.5)


def test_what_cannot_be_is_refused(pair):
  target, drafter = pair
  oracle = api.load_drafter('oracle', target)
  with pytest.raises(UserError, match='oracle'):
    sessions.Conversation(target, oracle)
  with pytest.raises(UserError, match='rounds_per_step=0'):
    sessions.Stream(target, drafter, [[1]], rounds_per_step=0)
  with pytest.raises(UserError, match='tokenizer'):
    sessions.Stream(target, drafter, [[1]], stop_strings=('x',))
  with pytest.raises(UserError, match='not empty'):
    sessions.Stream(target, drafter, [[1]], stop_strings=('',), decode=str)
  with pytest.raises(UserError, match='1 seeds for 2 prompts'):
    generation.generate_batch(target, drafter, [[1], [2]], seeds=[5])
  with pytest.raises(UserError, match='1 golden for 2 prompts'):
    generation.generate_batch(target, oracle, [[1], [2]], golden=[[1, 2]])
  with pytest.raises(UserError, match='no prompts'):
    generation.generate_batch(target, drafter, [])
  with pytest.raises(UserError, match='empty'):
    generation.generate_batch(target, drafter, [[1], []])
  with pytest.raises(TypeError, match='repetition_penalty'):
    generation.generate(target, drafter, [1], repetition_penalty=1.1)
