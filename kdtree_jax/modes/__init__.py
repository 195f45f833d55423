"""What `run.py --mode=NAME` does: one module a mode.

Each has `run(options) -> int`, the exit status; its flags are a dataclass in
`modes/options`.
"""
