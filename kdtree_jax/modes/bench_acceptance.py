"""`--mode=bench_acceptance`: how much a drafter gets accepted, over budgets."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdtree_jax import api, generation
from kdtree_jax.analysis.acceptance import count_nodes
from kdtree_jax.analysis.plots import (
  acceptance_by_budget,
  acceptance_histogram,
  check_plots,
)
from kdtree_jax.analysis.report import Row, markdown, summarise
from kdtree_jax.decode import GenerateResult, SamplingConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.digests import sha256
from kdtree_jax.io.files import file_kind, write_atomically
from kdtree_jax.io.paths import check_output
from kdtree_jax.io.results import JsonLines
from kdtree_jax.io.tokenizer import Tokenizer
from kdtree_jax.modes import generate, sweep, texts
from kdtree_jax.modes.loading import check_pair, load_target
from kdtree_jax.modes.run_config import (
  RunConfig,
  check_budgets,
  integers,
  numbers,
  required,
  status,
)
from kdtree_jax.training.corpus import Corpus

FLAGS = (
  *('target', 'drafter', 'drafter_attention_factor', 'dtype', 'weights'),
  *('corpus', 'prompts', 'num_prompts', 'prompt_length', 'max_new_tokens'),
  *('tree_budget', 'temperature', 'block_size', 'ignore_eos', 'seed'),
  *('batch_size', 'prefill_chunk', 'kernels', 'output', 'plots'),
)
TREE_BUDGETS = (4, 8, 16, 32, 64, 128, 256, 512)
TEMPERATURES = (0.0, 0.8, 1.0)
BATCH_SIZE = 32


class Item(NamedTuple):
  """One method over all prompts; one program."""

  method: str
  tree_budget: int
  tree_policy: str
  chain_seed: bool
  forced: bool

  @property
  def title(self) -> str:
    words = [self.method]
    words += [str(self.tree_budget)] if self.method == 'ddtree' else []
    words += ['chain kept'] if self.chain_seed else []
    return ' '.join([*words, 'on real text'] if self.forced else words)


class Job(NamedTuple):
  """One prompt at one temperature."""

  prompt: sweep.Passage
  temperature: float
  seed: int


def run(config: RunConfig) -> int:
  """Prints and writes what was found; 1 if float32 outputs are not AR's."""
  _check(config)
  corpus = sweep.corpus_of(config)
  prompts, tokenizer = sweep.passages(config, corpus)
  target = load_target(config)
  if corpus is not None:
    check_pair(corpus, target)
  with status('loading the drafter'):
    drafter = api.load_drafter(
      required(config.drafter, 'drafter', config.mode),
      target,
      config.block_size,
      config.drafter_attention_factor,
    )
  bench = _Bench(config, target, drafter, corpus, prompts, tokenizer)
  for prompt in prompts:
    with texts.naming(prompt.where, prompt.id):
      texts.check_fit(prompt.ids, target, None)
  records = sweep.read_runs(config.output, bench.common)
  items = _plan(config, drafter, forced=prompts[0].text is not None)
  jobs = [bench.jobs(item, records) for item in items]
  with contextlib.ExitStack() as stack:
    advance = stack.enter_context(sweep.progress(sum(map(len, jobs))))
    write = None
    if config.output is not None:
      lines = JsonLines(config.output, append=True)
      write = stack.enter_context(lines).write
    for item, todo in zip(items, jobs, strict=True):
      records += bench.run(item, todo, records, advance, write)
  return _finish(config, summarise(records))


def _check(config: RunConfig) -> None:
  """What can be refused before anything is loaded."""
  required(config.target, 'target', config.mode)
  required(config.drafter, 'drafter', config.mode)
  check_budgets(config)
  check_output(config.output)
  _check_tables(config.output)
  for temperature in _temperatures(config):
    SamplingConfig(temperature=temperature, seed=config.seed or 0)
  counts = ('num_prompts', 'prompt_length', 'max_new_tokens')
  for flag in (*counts, 'batch_size', 'prefill_chunk'):
    value = getattr(config, flag)
    if value is not None and value < 1:
      raise UserError(f'--{flag}={value} is below 1')
  if config.plots is not None:
    check_output(config.plots, 'plots', folder=True)
    check_plots()


def _check_tables(output: str | None) -> None:
  """Refuses a new `--output` whose tables would replace a file."""
  path = tables_path(output)
  if path is None:
    return
  if file_kind(path) is not None and file_kind(output) is None:
    raise UserError(
      f'--output={output}: the tables would replace {path}, which is of '
      'something else; give another name'
    )
  check_output(str(path))


def tables_path(output: str | None) -> pathlib.Path | None:
  """Where the tables go: beside the records; None: nowhere.

  `x.md` for `x.jsonl`. Any other name keeps all of itself: `run.1.md` for
  `run.1`, not the `run.md` of `run.2` as well.
  """
  if output is None or file_kind(output) == 'special':
    return None
  path = pathlib.Path(output)
  stem = path.stem if path.suffix == '.jsonl' else path.name
  return path.with_name(f'{stem}.md')


def _temperatures(config: RunConfig) -> list[float]:
  if config.temperature is None:
    return list(TEMPERATURES)
  return sorted(set(numbers(config.temperature, 'temperature')))


def _plan(
  config: RunConfig, drafter: api.LoadedDrafter, forced: bool
) -> list[Item]:
  """AR, then the chain and trees with and without it; the same on text."""
  budgets = TREE_BUDGETS
  if config.tree_budget is not None:
    budgets = sorted(set(integers(config.tree_budget, 'tree_budget')))
  depth = drafter.block_size - 1
  plan = [Item('ar', 0, 'best_first', False, False)]
  for on_text in (False, True) if forced else (False,):
    plan.append(Item('chain', depth, 'chain', False, on_text))
    for seeded in (False,) if on_text else (False, True):
      plan += [
        Item('ddtree', budget, 'best_first', seeded, on_text)
        for budget in budgets
      ]
  return plan


@dataclasses.dataclass
class _Bench:
  """All that stays the same from item to item."""

  config: RunConfig
  target: api.Target
  drafter: api.LoadedDrafter
  corpus: Corpus | None
  prompts: list[sweep.Passage]
  tokenizer: Tokenizer | None

  @functools.cached_property
  def common(self) -> dict[str, Any]:
    """What all lines of one file share, and a resumed run must match."""
    return {
      'target': self.target.name,
      'drafter': self.drafter.name,
      'fingerprint': sweep.fingerprint(self.target, self.drafter),
      'corpus': self.corpus and sha256(self.corpus.identity('test'))[:16],
      'dtype': np.dtype(self.target.dtype).name,
      'block_size': self.drafter.block_size,
      'max_new_tokens': sweep.max_new_tokens(self.config),
      'ignore_eos': bool(self.config.ignore_eos),
    }

  def jobs(self, item: Item, records: Sequence[dict[str, Any]]) -> list[Job]:
    """What of one item is not among the records."""
    done = {_key(record) for record in records}
    temperatures = [0.0] if item.forced else _temperatures(self.config)
    seed = self.config.seed or 0
    jobs = [
      Job(prompt, temperature, seed + index)
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
    """The lines of jobs, each batch written when it is done.

    Args:
      item: the method.
      jobs: what it has to do.
      records: with AR's outputs, if there are any yet.
      advance: told of progress.
      write: gets each line, if there is a file.
    """
    begin = time.perf_counter()
    outputs = {
      _key(record)[:-1]: record['output_ids']
      for record in records
      if record['method'] == 'ar'
    }
    lines = []
    for batch, count in sweep.batches(
      jobs, self.config.batch_size or BATCH_SIZE
    ):
      made = (self._forced if item.forced else self._free)(item, batch)
      for line in made[:count]:
        ids = outputs.get(_key(line)[:-1])
        compared = ids is not None and item.method != 'ar' and not item.forced
        match = line['output_ids'] == ids if compared else None
        lines.append(line | {'match': match})
        if write is not None:
          write(lines[-1])
      advance(count)
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
      'chain_seed': item.chain_seed,
      'forced': item.forced,
    }

  def _options(self, item: Item) -> dict[str, Any]:
    defaults, config = generation.GenerateOptions, self.config
    count = sweep.max_new_tokens(config)
    longest = max(len(prompt.ids) for prompt in self.prompts)
    limit = self.target.config.max_position_embeddings
    options = {
      'max_new_tokens': count,
      'tree_budget': item.tree_budget,
      'tree_policy': item.tree_policy,
      'chain_seed': item.chain_seed,
      'capacity': generation.bucket(longest + count, limit),
      'prefill_chunk': config.prefill_chunk or defaults.prefill_chunk,
      'kernels': config.kernels or defaults.kernels,
    }
    return options | ({'stop_ids': ()} if config.ignore_eos else {})

  def _free(self, item: Item, batch: Sequence[Job]) -> list[dict[str, Any]]:
    """Lines of the model's own text, without `match`."""
    drafter = None if item.method == 'ar' else self.drafter
    results = generation.generate_batch(
      self.target,
      drafter,
      [job.prompt.ids for job in batch],
      sampling=[
        SamplingConfig(temperature=job.temperature, seed=job.seed)
        for job in batch
      ],
      record_rounds=drafter is not None,
      **self._options(item),
    )
    return [
      self._line(item, job, result)
      for job, result in zip(batch, results, strict=True)
    ]

  def _forced(self, item: Item, batch: Sequence[Job]) -> list[dict[str, Any]]:
    """Lines of given text, with the target's own walks beside."""
    results = generation.force(
      self.target,
      self.drafter,
      [job.prompt.text or [] for job in batch],
      len(batch[0].prompt.ids),
      **self._options(item),
    )
    return [
      self._line(item, job, result.by_text)
      | {'target_acceptance_lengths': result.by_target.acceptance_lengths}
      for job, result in zip(batch, results, strict=True)
    ]

  def _line(
    self, item: Item, job: Job, result: GenerateResult
  ) -> dict[str, Any]:
    """As in `--mode=generate`, and what became of the nodes."""
    drafter = None if item.method == 'ar' else self.drafter
    plain = dataclasses.replace(result, rounds=None)
    run = generate.Run(item.method, item.tree_budget, item.tree_policy)
    named = self._named(item, job)
    line = named | generate.record(run, plain, drafter, named) | self.common
    if self.tokenizer is not None:
      line['text'] = self.tokenizer.decode(result.output_ids)
    if result.rounds is not None:
      trees = [(r.parents, r.scores, r.accepted_indices) for r in result.rounds]
      line['nodes'] = dataclasses.asdict(count_nodes(trees))
    return line


def _key(record: dict[str, Any]) -> tuple:
  """Names a run; without the last entry, its prompt and its draws."""
  names = ('method', 'tree_budget', 'chain_seed', 'forced')
  drawn = record['id'], record['temperature'], record['seed']
  ids = tuple(record['prompt_ids'])
  return *drawn, ids, tuple(record[name] for name in names)


def _finish(config: RunConfig, rows: list[Row]) -> int:
  """Tables, pictures, verdict."""
  text = markdown(rows)
  print(text)
  path = tables_path(config.output)
  if path is not None:
    write_atomically(path, [text.encode()])
  if config.plots is not None:
    folder = pathlib.Path(config.plots)
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
  exact = (config.dtype or 'float32') == 'float32'
  return int(exact and same != total)
