"""The modes of `run.py`, one module per mode.

Each has `run(flags) -> int`, which returns the exit status; its flags are a
dataclass in `modes/options`.
"""
