"""Time of a decoding step, its physical limit, and the resulting speedup."""

from typing import Any

# A line of a results file.
Record = dict[str, Any]
