"""A golden sequence becomes what the engine generates."""

from kdtree_jax.benchmark import end_to_end


def test_revisions_end_where_nothing_changes():
  """An engine whose output differs from the golden one at two near-ties."""
  own, asked = [1, 2, 3, 4, 5, 6], []

  def generate(golden):
    asked.append(golden)
    pairs = zip(golden, own, strict=True)
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
    # Right up to the first wrong golden token, and after it as good as AR's.
    first = wrong[0] if wrong else len(own)
    return [*own[: first + 1], *golden[first + 1 :]]

  assert end_to_end.settled([1, 2, 9, 4, 9, 6], generate) == (own, 2)
  assert len(asked) == 3
  assert end_to_end.settled(own, generate) == (own, 0)


def test_revisions_end_in_any_case():
  golden, revisions = end_to_end.settled([0], lambda golden: [golden[0] + 1])
  assert revisions == end_to_end.MAX_REVISIONS == golden[0]
