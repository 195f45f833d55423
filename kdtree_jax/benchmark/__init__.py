"""Time of a decoding step, its physical limit, and the resulting speedup."""
