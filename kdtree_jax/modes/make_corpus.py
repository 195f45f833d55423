"""`--mode=make_corpus`: local sources to a tokenizer and token streams."""

import pathlib

from kdtree_jax.io.paths import check_output
from kdtree_jax.modes.run_config import (
  RunConfig,
  required,
  status,
)
from kdtree_jax.training.build import build_corpus

FLAGS = ('corpus_sources', 'vocab_size', 'max_tokens', 'output')
DEFAULT_VOCAB = 4096


def run(config: RunConfig) -> int:
  """Writes the folder `--output`."""
  folders = required(config.corpus_sources, 'corpus_sources', 'make_corpus')
  output = required(config.output, 'output', 'make_corpus')
  check_output(output, folder=True)
  size = DEFAULT_VOCAB if config.vocab_size is None else config.vocab_size
  with status(f'reading {", ".join(folders)}'):
    manifest = build_corpus(
      folders, pathlib.Path(output), size, config.max_tokens
    )
  for split, counts in manifest['splits'].items():
    per_token = counts['bytes'] / counts['tokens']
    print(
      f'{split}: {counts["documents"]:,} documents, {counts["bytes"]:,} bytes, '
      f'{counts["tokens"]:,} tokens, {per_token:.2f} bytes a token'
    )
  for name, reason in manifest['skipped_packages'].items():
    print(f'skipped {name}: {reason}')
  counts = manifest['skipped_files']
  print(
    'skipped files: '
    + (', '.join(f'{n:,} {why}' for why, n in counts.items()) or 'none')
  )
  print(f'wrote {output}')
  return 0
