"""`--mode=bench_acceptance`: acceptance of a drafter's tokens by budget."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdtree_jax import api, generation, teacher_forcing
from kdtree_jax.analysis.acceptance import count_nodes
from kdtree_jax.analysis.plots import (
  acceptance_by_budget,
  acceptance_histogram,
  check_plots,
)
from kdtree_jax.analysis.tables import Row, markdown, summarise
from kdtree_jax.decode import GenerateResult, SamplingConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import sha256
from kdtree_jax.io.files import file_kind, write_atomically
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.results import JsonLines
from kdtree_jax.io.tokenizer import Tokenizer
from kdtree_jax.modes import generate, resumable_runs, texts
from kdtree_jax.modes.loading import check_pair, load_drafter, load_target
from kdtree_jax.modes.options import BenchAcceptanceFlags
from kdtree_jax.options import GenerateOptions
from kdtree_jax.training.corpus import Corpus, read_corpus


class Item(NamedTuple):
  """One method for all prompts, which is one program."""

  method: str
  tree_budget: int
  tree_policy: str
  keep_top1_chain: bool
  teacher_forced: bool

  @property
  def title(self) -> str:
    words = [self.method]
    words += [str(self.tree_budget)] if self.method == 'ddtree' else []
    words += ['chain kept'] if self.keep_top1_chain else []
    return ' '.join([*words, 'on real text'] if self.teacher_forced else words)


class Job(NamedTuple):
  """One prompt at one temperature."""

  prompt: resumable_runs.Passage
  temperature: float
  seed: int


def run(flags: BenchAcceptanceFlags) -> int:
  """Prints and writes tables; returns 1 if a float32 output is not AR's."""
  _check(flags)
  corpus = None if flags.corpus is None else read_corpus(flags.corpus)
  prompts, tokenizer = resumable_runs.passages(flags, corpus)
  target = load_target(flags.target, flags.dtype, flags.weights)
  if corpus is not None:
    check_pair(corpus, target)
  drafter = load_drafter(flags, flags.drafter, target)
  bench = _Bench(flags, target, drafter, corpus, prompts, tokenizer)
  for prompt in prompts:
    with texts.naming(prompt.where, prompt.id):
      texts.check_fit(prompt.ids, target, None)
  records = resumable_runs.read_runs(flags.output, bench.common)
  items = _items(flags, drafter, with_text=prompts[0].text is not None)
  jobs = [bench.jobs(item, records) for item in items]
  with contextlib.ExitStack() as stack:
    advance = stack.enter_context(resumable_runs.progress(sum(map(len, jobs))))
    write = None
    if flags.output is not None:
      lines = JsonLines(flags.output, append=True)
      write = stack.enter_context(lines).write
    for item, todo in zip(items, jobs, strict=True):
      records += bench.run(item, todo, records, advance, write)
  return _finish(flags, summarise(records))


def _check(flags: BenchAcceptanceFlags) -> None:
  """Checks the flags before anything is loaded."""
  check_output(flags.output)
  _check_tables(flags.output)
  for temperature in flags.temperatures:
    SamplingConfig(temperature=temperature, seed=flags.seed)
  if flags.plots is not None:
    check_output(flags.plots, 'plots', folder=True)
    check_plots()


def _check_tables(output: str | None) -> None:
  """Refuses a new `--output` whose tables would replace a file."""
  path = tables_path(output)
  if output is None or path is None:
    return
  if file_kind(path) is not None and file_kind(output) is None:
    raise UserError(
      f'--output={output}: the tables would replace {path}, which belongs to '
      'something else; give another name'
    )
  check_output(str(path))


def tables_path(output: str | None) -> pathlib.Path | None:
  """The path of the tables, beside the records; None for no file.

  `x.md` for `x.jsonl`; any other name keeps its suffix: `run.1.md` for
  `run.1`, because `run.md` would be that of `run.2` too.
  """
  if output is None or file_kind(output) == 'special':
    return None
  path = pathlib.Path(output)
  stem = path.stem if path.suffix == '.jsonl' else path.name
  return path.with_name(f'{stem}.md')


def _items(
  flags: BenchAcceptanceFlags, drafter: api.LoadedDrafter, with_text: bool
) -> list[Item]:
  """AR, the chain, trees without and with it; some also teacher-forced."""
  budgets = sorted(set(flags.tree_budget))
  depth = drafter.block_size - 1
  items = [Item('ar', 0, 'best_first', False, False)]
  for forced in (False, True) if with_text else (False,):
    items.append(Item('chain', depth, 'chain', False, forced))
    for keep_chain in (False,) if forced else (False, True):
      items += [
        Item('ddtree', budget, 'best_first', keep_chain, forced)
        for budget in budgets
      ]
  return items


@dataclasses.dataclass
class _Bench:
  """Models, prompts and flags, which all items share."""

  flags: BenchAcceptanceFlags
  target: api.Target
  drafter: api.LoadedDrafter
  corpus: Corpus | None
  prompts: list[resumable_runs.Passage]
  tokenizer: Tokenizer | None

  @functools.cached_property
  def common(self) -> dict[str, Any]:
    """The fields that all lines of one file share, also when continued."""
    return {
      'target': self.target.name,
      'drafter': self.drafter.name,
      'fingerprint': resumable_runs.fingerprint(self.target, self.drafter),
      'corpus': self.corpus and sha256(self.corpus.identity('test'))[:16],
      'dtype': np.dtype(self.target.dtype).name,
      'block_size': self.drafter.block_size,
      'max_new_tokens': self.flags.max_new_tokens,
      'ignore_eos': self.flags.ignore_eos,
    }

  def jobs(self, item: Item, records: Sequence[dict[str, Any]]) -> list[Job]:
    """The jobs of one item that are not among the records."""
    done = {_key(record) for record in records}
    temperatures = [0.0] if item.teacher_forced else self.flags.temperatures
    jobs = [
      Job(prompt, temperature, self.flags.seed + index)
      for index, prompt in enumerate(self.prompts)
      for temperature in temperatures
    ]
    return [job for job in jobs if _key(self._named(item, job)) not in done]

  def run(
    self,
    item: Item,
    jobs: Sequence[Job],
    records: Sequence[dict[str, Any]],
    advance: Callable[[int, str | None], None],
    write: Callable[[dict[str, Any]], None] | None,
  ) -> list[dict[str, Any]]:
    """Runs jobs and returns their lines; writes each batch when it is done.

    Args:
      item: the method.
      jobs: its jobs.
      records: earlier lines, for AR's outputs.
      advance: called with progress.
      write: called with each line, if there is a file.
    """
    begin = time.perf_counter()
    outputs = {
      _key(record)[:-1]: record['output_ids']
      for record in records
      if record['method'] == 'ar'
    }
    lines = []
    for batch, count in resumable_runs.batches(jobs, self.flags.batch_size):
      made = (self._teacher_forced if item.teacher_forced else self._free)(
        item, batch
      )
      for line in made[:count]:
        ids = outputs.get(_key(line)[:-1])
        compared = (
          ids is not None and item.method != 'ar' and not item.teacher_forced
        )
        match = line['output_ids'] == ids if compared else None
        lines.append(line | {'match': match})
        if write is not None:
          write(lines[-1])
      advance(count, None)
    if lines:
      tokens = sum(sum(line['acceptance_lengths']) for line in lines)
      rounds = sum(len(line['acceptance_lengths']) for line in lines)
      seconds = time.perf_counter() - begin
      mean = f'{tokens / rounds:.2f} tokens a forward'
      advance(0, f'{item.title}: {mean}, {len(lines)} runs, {seconds:.1f} s')
    return lines

  def _named(self, item: Item, job: Job) -> dict[str, Any]:
    return {
      'id': job.prompt.id,
      'temperature': job.temperature,
      'seed': job.seed,
      'prompt_ids': job.prompt.ids,
      'method': item.method,
      'tree_budget': item.tree_budget,
      'keep_top1_chain': item.keep_top1_chain,
      'forced': item.teacher_forced,
    }

  def _options(self, item: Item) -> GenerateOptions:
    flags, config = self.flags, self.target.config
    longest = max(len(prompt.ids) for prompt in self.prompts)
    return GenerateOptions(
      max_new_tokens=flags.max_new_tokens,
      tree_budget=item.tree_budget,
      tree_policy=item.tree_policy,
      keep_top1_chain=item.keep_top1_chain,
      capacity=generation.bucket(
        longest + flags.max_new_tokens, config.max_position_embeddings
      ),
      prefill_chunk=flags.prefill_chunk,
      kernels=flags.kernels,
      stop_ids=() if flags.ignore_eos else None,
    )

  def _free(self, item: Item, batch: Sequence[Job]) -> list[dict[str, Any]]:
    """The lines of jobs on the model's own text, without `match`."""
    drafter = None if item.method == 'ar' else self.drafter
    results = generation.continue_prompts(
      self.target,
      drafter,
      [job.prompt.ids for job in batch],
      self._options(item),
      sampling=[
        SamplingConfig(temperature=job.temperature, seed=job.seed)
        for job in batch
      ],
      record_rounds=drafter is not None,
    )
    return [
      self._line(item, job, result)
      for job, result in zip(batch, results, strict=True)
    ]

  def _teacher_forced(
    self, item: Item, batch: Sequence[Job]
  ) -> list[dict[str, Any]]:
    """The lines of jobs on given text."""
    results = teacher_forcing.teacher_forced(
      self.target,
      self.drafter,
      [job.prompt.text or [] for job in batch],
      len(batch[0].prompt.ids),
      self._options(item),
    )
    return [
      self._line(item, job, result.along_text)
      | {'target_acceptance_lengths': result.along_target.acceptance_lengths}
      for job, result in zip(batch, results, strict=True)
    ]

  def _line(
    self, item: Item, job: Job, result: GenerateResult
  ) -> dict[str, Any]:
    """A line as in `--mode=generate`, with counts of accepted nodes."""
    drafter = None if item.method == 'ar' else self.drafter
    plain = dataclasses.replace(result, rounds=None)
    variant = generate.Variant(item.method, item.tree_budget, item.tree_policy)
    made = generate.record(variant, plain, drafter, job.temperature, job.seed)
    line = self._named(item, job) | made | self.common
    if self.tokenizer is not None:
      line['text'] = self.tokenizer.decode(result.output_ids)
    if result.rounds is not None:
      trees = [(r.parents, r.scores, r.accepted_indices) for r in result.rounds]
      line['nodes'] = dataclasses.asdict(count_nodes(trees))
    return line


def _key(record: dict[str, Any]) -> tuple[object, ...]:
  """Identifies a run; all but the last entry is its prompt and sampling."""
  names = ('method', 'tree_budget', 'keep_top1_chain', 'forced')
  sampling = record['id'], record['temperature'], record['seed']
  ids = tuple(record['prompt_ids'])
  return *sampling, ids, tuple(record[name] for name in names)


def _finish(flags: BenchAcceptanceFlags, rows: list[Row]) -> int:
  """Writes tables and plots, and returns the exit status."""
  text = markdown(rows)
  print(text)
  path = tables_path(flags.output)
  if path is not None:
    write_atomically(path, [text.encode()])
  if flags.plots is not None:
    folder = pathlib.Path(flags.plots)
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (
      ('acceptance.png', acceptance_by_budget),
      ('histogram.png', acceptance_histogram),
    ):
      write_atomically(folder / name, [draw(rows)])
  same: collections.Counter[float] = collections.Counter()
  total: collections.Counter[float] = collections.Counter()
  for row in rows:
    same[row.setting.temperature] += row.matches[0]
    total[row.setting.temperature] += row.matches[1]
  for temperature, count in sorted(total.items()):
    print(
      f'temperature {temperature:g}: {same[temperature]} of {count} outputs '
      'are token for token those of AR'
    )
  exact = flags.dtype == 'float32'
  return int(exact and same != total)
