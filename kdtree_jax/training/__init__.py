"""Training: a corpus, a loop, and what a target learns from them."""
