"""Best-first draft tree from per-depth logits."""
