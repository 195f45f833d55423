"""`--mode=make_corpus`: a tokenizer and token streams of local sources."""

import pathlib

from kdtree_jax.io.paths import check_output
from kdtree_jax.modes.options import MakeCorpusFlags
from kdtree_jax.modes.status import status
from kdtree_jax.training.build import build_corpus


def run(flags: MakeCorpusFlags) -> int:
  """Writes the corpus to the folder `--output`."""
  folders, output = flags.corpus_sources, flags.output
  check_output(output, folder=True)
  with status(f'reading {", ".join(folders)}'):
    manifest = build_corpus(
      folders, pathlib.Path(output), flags.vocab_size, flags.max_tokens
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
