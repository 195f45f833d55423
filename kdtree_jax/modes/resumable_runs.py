"""Prompts, batches, progress and continuation of measurements in a file."""

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.console
import rich.progress

from kdtree_jax import api
from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import weights_digest
from kdtree_jax.io.files import file_kind
from kdtree_jax.io.results import read_jsonl
from kdtree_jax.io.tokenizer import Tokenizer, load_tokenizer
from kdtree_jax.modes import texts
from kdtree_jax.modes.flags import FLAG_ALIASES
from kdtree_jax.modes.options import BenchAcceptanceFlags
from kdtree_jax.training.corpus import Corpus


class Passage(NamedTuple):
  """A prompt, perhaps with the text it begins.

  Attributes:
    id: its place in the corpus, or its id in the file of prompts.
    ids: tokens of the prompt.
    text: tokens of the prompt and its real continuation, or None.
    where: its file and line in a file of prompts, or None.
  """

  id: str | int
  ids: list[int]
  text: list[int] | None
  where: str | None = None


def passages(
  flags: BenchAcceptanceFlags, corpus: Corpus | None
) -> tuple[list[Passage], Tokenizer | None]:
  """The prompts of `--prompts`, or passages of the test split of `--corpus`.

  Passages come from different documents, at places that depend only on the
  corpus and the lengths.

  Args:
    flags: name the prompts.
    corpus: the corpus of `--corpus`.

  Returns:
    The prompts and the tokenizer.

  Raises:
    UserError: the target has no tokenizer, or the corpus no text of that
      length.
  """
  if corpus is None:
    tokenizer = load_tokenizer(flags.target)
    if tokenizer is None:
      raise UserError(
        f'--prompts needs a tokenizer, and {flags.target} has none; use '
        '--corpus'
      )
    dialogues = texts.dialogues_in(str(flags.prompts))
    ids = texts.first_ids(dialogues, tokenizer, False)
    found = [
      Passage(dialogue.prompt.id, prompt, None, dialogue.prompt.where)
      for dialogue, prompt in zip(dialogues, ids, strict=True)
    ]
    return found, tokenizer
  length = flags.prompt_length
  need = length + flags.max_new_tokens
  rng = np.random.default_rng(0)
  long = [
    (index, document)
    for index, document in enumerate(corpus.documents('test'))
    if len(document) >= need
  ]
  if not long:
    raise UserError(
      f'--corpus={flags.corpus}: no test document has {need} tokens; lower '
      '--prompt_length or --max_new_tokens'
    )
  # A larger --num_prompts begins with the same passages.
  found = []
  for at in rng.permutation(len(long))[: flags.num_prompts]:
    index, document = long[at]
    start = int(rng.integers(0, len(document) - need + 1))
    text = document[start:].tolist()
    found.append(Passage(f'test:{index}:{start}', text[:length], text))
  return found, load_tokenizer(corpus.folder)


def fingerprint(target: api.Target, drafter: api.LoadedDrafter) -> str:
  """A digest of a pair: its architectures and its weights as loaded."""
  digest = hashlib.sha256(repr((target.config, drafter.drafter)).encode())
  for params in (target.params, drafter.params):
    digest.update(weights_digest(params).encode())
  return digest.hexdigest()[:16]


def read_runs(
  path: str | None, common: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """The lines of an earlier call that this one continues; none without a file.

  Raises:
    UserError: a line is not a run, or has other settings.
  """
  # Other kinds of files are only written.
  if path is None or file_kind(path) != 'file':
    return []
  records = []
  for number, record in read_jsonl(path):
    for name, value in common.items():
      there = record.get(name) if isinstance(record, dict) else None
      if there != value:
        raise UserError(
          f'--output={path}: line {number} has {name}={json.dumps(there)}, '
          f'not {json.dumps(value)}; give a new file'
        )
    # Files of earlier versions have the earlier names.
    records.append({FLAG_ALIASES.get(k, k): v for k, v in record.items()})
  return records


def batches[T](jobs: Sequence[T], size: int) -> Iterator[tuple[list[T], int]]:
  """Batches of one width, which share a program.

  Yields:
    Jobs, and how many of them count; the last batch is padded.
  """
  if not jobs:
    return
  count = -(-len(jobs) // size)
  width = -(-len(jobs) // count)
  for batch in itertools.batched(jobs, width):
    filled = [*batch, *([batch[0]] * (width - len(batch)))]
    yield filled, len(batch)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int, str | None], None]]:
  """A progress bar on a terminal; elsewhere only lines.

  Yields:
    A function of the number of new runs and a line to print, or None.
  """
  bar = rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.MofNCompleteColumn(),
    console=rich.console.Console(stderr=True),
    disable=not sys.stderr.isatty(),
    transient=True,
  )
  with bar:
    task = bar.add_task('runs', total=total)

    def advance(count: int, line: str | None) -> None:
      bar.advance(task, count)
      if line is None:
        return
      if bar.disable:
        print(line, file=sys.stderr, flush=True)
      else:
        bar.console.print(line)

    yield advance
