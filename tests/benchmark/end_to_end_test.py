"""What a drafter is told becomes what the engine writes."""

from kdtree_jax.benchmark import end_to_end


def test_revisions_end_where_nothing_changes():
  """An engine that strays from what it is told at two near-ties."""
  own, asked = [1, 2, 3, 4, 5, 6], []

  def write(told):
    asked.append(told)
    wrong = [i for i, (a, b) in enumerate(zip(told, own, strict=True)) if a - b]
    # The text is its own up to the first mistake it was told, and behind it
    # as good as that of AR.
    first = wrong[0] if wrong else len(own)
    return [*own[: first + 1], *told[first + 1 :]]

  assert end_to_end.revised([1, 2, 9, 4, 9, 6], write) == (own, 2)
  assert len(asked) == 3
  assert end_to_end.revised(own, write) == (own, 0)


def test_revisions_end_in_any_case():
  told, revisions = end_to_end.revised([0], lambda told: [told[0] + 1])
  assert revisions == end_to_end.MAX_REVISIONS == told[0]
