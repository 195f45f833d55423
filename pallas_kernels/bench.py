"""Times every kernel against its reference and the ceilings of the GPU.

  python -m pallas_kernels.bench --ops=tree_build,tree_accept --output=out.jsonl

Every case (`pallas_kernels/<op>/cases.py`) is checked, and the large ones are
timed. A time is the median over several runs of a loop on the device; "net" is
without what an iteration of such a loop costs by itself. The two ceilings, a
large copy and a large bf16 product on random data, are measured in the same
run, since
GPUs of one model differ by a few per cent.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import os
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from pallas_kernels import _dispatch
from pallas_kernels.case import Case

REPETITIONS = 7
LOOP_SECONDS = 0.02  # length of one run of a loop, at the ceilings' rates
MIN_CALL_SECONDS = 5e-6  # shortest call that is assumed to choose iterations
MAX_ITERATIONS = 400
UNROLL = 8
COPY_BYTES = 1 << 30
PRODUCT_SIZE = 8192
# Number of cases that are checked and compiled at once; their inputs take
# gigabytes.
THREADS = 6
# Estimates, to choose iterations before the ceilings are known.
BYTES_PER_SECOND = 4e12
FLOPS_PER_SECOND = 7e14


@dataclasses.dataclass(frozen=True)
class Ceilings:
  """The highest rates of this GPU, measured in this run."""

  device: str
  copy_bytes_per_second: float  # read plus written
  product_flops_per_second: float
  loop_seconds: float  # an iteration of a loop, besides the calls in it


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the bench; returns the exit code, 1 if a check failed."""
  args = parse_args(argv)
  if jax.default_backend() != 'gpu':
    print('No GPU: the bench needs one, and measures nothing without it.')
    return 0
  if _dispatch.why_not_hopper():
    print(
      f'{jax.devices()[0].device_kind} is no Hopper GPU: the kernels need one, '
      'so the bench measures nothing.'
    )
    return 0
  cases = [
    case
    for case in find_cases(args.ops)
    if not args.names or any(name in case.name for name in args.names)
  ]
  # Most of the time is compilation, and nothing is timed beside it.
  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    made = pool.map(check if args.smoke else prepare, cases)
    prepared = _progress(made, len(cases))
  if args.smoke:
    return _report(prepared, None, args.output)
  ceilings = measure_ceilings()
  print(
    f'{ceilings.device}: copy {ceilings.copy_bytes_per_second / 1e12:.2f} TB/s,'
    f' bf16 product {ceilings.product_flops_per_second / 1e12:.0f} TFLOP/s, '
    f'{ceilings.loop_seconds * 1e6:.1f} us an iteration of a loop',
    flush=True,
  )
  rows = (
    run_case(case, ready, ceilings)
    for case, ready in zip(cases, prepared, strict=True)
  )
  return _report(rows, ceilings, args.output)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
    prog='python -m pallas_kernels.bench', description=__doc__.splitlines()[0]
  )

  def names(text: str) -> list[str]:
    return [name for name in text.split(',') if name]

  parser.add_argument(
    '--ops', type=names, default=[], help='ops to run, comma-separated'
  )
  parser.add_argument(
    '--names',
    type=names,
    default=[],
    help='run only shapes whose name contains one of these',
  )
  parser.add_argument('--output', help='JSON lines file to write')
  parser.add_argument(
    '--smoke', action='store_true', help='check every case, time nothing'
  )
  args = parser.parse_args(argv)
  output = args.output
  if output is not None:
    place = output if os.path.exists(output) else os.path.dirname(output) or '.'
    if os.path.isdir(output) or not output or not os.access(place, os.W_OK):
      parser.error(f'--output={output}: cannot be written')
  unknown = set(args.ops) - set(ops_with_cases())
  if unknown:
    parser.error(
      f'--ops: {", ".join(sorted(unknown))} unknown; '
      f'choices: {", ".join(ops_with_cases())}'
    )
  return args


def ops_with_cases() -> list[str]:
  """Names of the ops, those of the package's own packages."""
  return sorted(
    module.name
    for module in pkgutil.iter_modules(pallas_kernels.__path__)
    if module.ispkg
  )


def find_cases(ops: Sequence[str] = ()) -> Iterator[Case]:
  """All cases of `ops`, or of every op."""
  for op in ops or ops_with_cases():
    yield from importlib.import_module(f'pallas_kernels.{op}.cases').cases()


def device_loop(
  call: Callable[..., Any],
  iterations: int,
  unroll: int = 1,
  in_place: bool = False,
) -> jax.stages.Wrapped:
  """A jitted function that makes `iterations * unroll` calls in a row.

  It takes the inputs and the output of a first call and returns both, the
  inputs to be used again. The barrier makes the inputs of a call depend on the
  output before. In place, the output is the first input of the next call.
  """

  def step(inputs, output):
    if in_place:
      inputs = lax.optimization_barrier(inputs)
      return (call(*inputs), *inputs[1:]), None
    inputs, output = lax.optimization_barrier((inputs, output))
    return inputs, call(*inputs)

  def body(_, state):
    for _ in range(unroll):
      state = step(*state)
    return state

  @functools.partial(jax.jit, donate_argnums=(0,) if in_place else ())
  def loop(first, others, output):
    state = ((first, *others), None if in_place else output)
    (first, *_), output = lax.fori_loop(0, iterations, body, state)
    return first if in_place else output

  return loop


@dataclasses.dataclass(frozen=True)
class Loop:
  """A compiled `device_loop`; it makes `iterations * unroll` calls."""

  run: Callable[..., Any]
  iterations: int
  unroll: int
  in_place: bool

  @classmethod
  def compile(
    cls,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    iterations: int,
    unroll: int = 1,
    in_place: bool = False,
  ) -> 'Loop':
    """Compiles the loop for these inputs or their shapes."""
    output = jax.eval_shape(call, *inputs)
    loop = device_loop(call, iterations, unroll, in_place)
    run = loop.lower(inputs[0], inputs[1:], output).compile()
    return cls(run, iterations, unroll, in_place)

  def seconds(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    """Median over `REPETITIONS` runs, in seconds a call."""
    first, others = inputs[0], inputs[1:]
    # An update in place consumes its input, so it gets a copy.
    state = jnp.copy(first) if self.in_place else jax.jit(call)(*inputs)
    calls, times = self.iterations * self.unroll, []
    for _ in range(1 + REPETITIONS):
      start = time.perf_counter()
      state = self.run(state if self.in_place else first, others, state)
      jax.block_until_ready(state)
      times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])  # the first one warms up


def seconds_per_call(
  call: Callable[..., Any],
  inputs: tuple[Any, ...],
  iterations: int,
  unroll: int = 1,
  in_place: bool = False,
) -> float:
  """Median over `REPETITIONS` loops, in seconds a call."""
  loop = Loop.compile(call, inputs, iterations, unroll, in_place)
  return loop.seconds(call, inputs)


def measure_ceilings() -> Ceilings:
  """Measures copy bandwidth, bf16 product rate and a loop's own cost."""
  x = jax.random.normal(jax.random.key(0), (COPY_BYTES // 4,), jnp.float32)
  copy = seconds_per_call(lambda x: x + 1, (x,), 20, in_place=True)
  del x
  shape = (PRODUCT_SIZE, PRODUCT_SIZE)
  a, b = (
    jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2)
  )
  product = seconds_per_call(lambda a, b: a @ b, (a, b), 10)
  return Ceilings(
    jax.devices()[0].device_kind,
    2 * COPY_BYTES / copy,
    2 * PRODUCT_SIZE**3 / product,
    loop_seconds(),
  )


def loop_seconds() -> float:
  """Seconds that an iteration of a loop takes besides the calls in it.

  It is the time of an iteration with one small fusion, less that of the fusion:
  what each further fusion adds to an iteration.
  """
  small = jnp.zeros((128,), jnp.float32)
  measure = functools.partial(
    seconds_per_call, lambda x: x + 1, (small,), in_place=True
  )
  one = measure(MAX_ITERATIONS)
  several = UNROLL * measure(MAX_ITERATIONS // UNROLL, UNROLL)
  return max(0.0, one - (several - one) / (UNROLL - 1))


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A case that was checked, and its loops if it is to be timed."""

  row: dict[str, Any]
  kernel: Loop | None = None
  reference: Loop | None = None


def check(case: Case) -> dict[str, Any]:
  """Checks one case and times nothing; returns the case's row."""
  return _guarded(_named(case), lambda: _checked(case)[0])


def prepare(case: Case) -> Prepared:
  """Checks one case and compiles its loops; a failure is a row, not raised."""
  if not case.timed:
    return Prepared(check(case))
  loops = []

  def both() -> dict[str, Any]:
    row, shapes = _checked(case)
    loops.extend(_compile_loops(case, shapes))
    return row

  row = _guarded(_named(case), both)
  return Prepared(row, *loops) if len(loops) == 2 else Prepared(row)


def run_case(
  case: Case, prepared: Prepared, ceilings: Ceilings
) -> dict[str, Any]:
  """Times a prepared case that has loops; reports a failure, raises none."""
  if prepared.kernel is None:
    return prepared.row
  return _guarded(prepared.row, lambda: _time_case(case, prepared, ceilings))


def _named(case: Case) -> dict[str, Any]:
  return {'op': case.op, 'name': case.name}


def _guarded(
  row: dict[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
  """The row with the fields that `measure` adds, or with its failure."""
  try:
    return row | measure()
  # A kernel that does not compile must not hide what the others reach.
  except Exception as error:  # noqa: BLE001
    return row | {'ok': False, 'failure': f'{type(error).__name__}: {error}'}


def _checked(case: Case) -> tuple[dict[str, Any], Any]:
  """The fields that the check returns, and the inputs' shapes."""
  inputs = case.make_inputs(jax.random.key(0))
  return case.check(case.kernel, inputs), jax.eval_shape(lambda: inputs)


def _compile_loops(case: Case, inputs: tuple[Any, ...]) -> tuple[Loop, Loop]:
  """Loops of the kernel and of the reference, which is called less often."""
  floor = max(case.bytes / BYTES_PER_SECOND, case.flops / FLOPS_PER_SECOND)
  iterations = int(LOOP_SECONDS / max(floor, MIN_CALL_SECONDS))
  iterations = max(10, min(iterations, MAX_ITERATIONS))
  # Several short calls an iteration, since the loop itself costs microseconds;
  # only where each needs the output before, or XLA makes one of equal calls.
  short = iterations == MAX_ITERATIONS
  unroll = UNROLL if short and case.in_place else 1
  compile_loop = functools.partial(Loop.compile, in_place=case.in_place)
  return (
    compile_loop(case.kernel, inputs, iterations // unroll, unroll),
    compile_loop(case.reference, inputs, max(10, iterations // 10)),
  )


def _time_case(
  case: Case, prepared: Prepared, ceilings: Ceilings
) -> dict[str, Any]:
  """Times the kernel and its reference; returns times, rates and fraction."""
  floor = max(
    case.bytes / ceilings.copy_bytes_per_second,
    case.flops / ceilings.product_flops_per_second,
  )
  inputs = case.make_inputs(jax.random.key(0))
  assert prepared.kernel and prepared.reference  # `run_case` saw them
  kernel = prepared.kernel.seconds(case.kernel, inputs)
  reference = prepared.reference.seconds(case.reference, inputs)
  net = kernel - ceilings.loop_seconds / prepared.kernel.unroll
  return {
    'kernel_us': kernel * 1e6,
    'net_us': net * 1e6,
    'reference_us': reference * 1e6,
    'bytes': case.bytes,
    'flops': case.flops,
    'tb_per_s': case.bytes / kernel / 1e12,
    'tflop_per_s': case.flops / kernel / 1e12,
    'fraction_of_ceiling': floor / kernel,
  }


def table_row(row: dict[str, Any]) -> str:
  """One line of the Markdown table."""
  if 'failure' in row:
    failure = row['failure'].splitlines()[0][:120].replace('|', '/')
    return f'| {row["op"]} | {row["name"]} | **{failure}** | | | | | | |'
  error = row.get('error')
  cells = [
    row['op'],
    row['name'],
    'yes' if row['ok'] else '**NO**',
    '' if error is None else f'{error:.2g}',
  ]
  if 'kernel_us' in row:
    cells += [
      f'{row["kernel_us"]:.1f}',
      f'{row["net_us"]:.1f}',
      f'{row["reference_us"]:.1f}',
      f'{row["tb_per_s"]:.2f} / {row["tflop_per_s"]:.0f}',
      f'{row["fraction_of_ceiling"]:.1%}',
    ]
  else:
    cells += [''] * 5
  return f'| {" | ".join(cells)} |'


def _progress(made: Iterator[Any], count: int) -> list[Any]:
  """Collects the items, and prints a line on standard error for each."""
  found = []
  for number, item in enumerate(made, 1):
    found.append(item)
    print(f'checked {number} of {count}', file=sys.stderr, flush=True)
  return found


def _report(rows, ceilings: Ceilings | None, output: str | None) -> int:
  """Prints rows as they come and writes them; returns 1 if one is wrong."""
  print(
    '| op | shape | right | error | kernel us | net us | reference us '
    '| TB/s / TFLOP/s | of ceiling |\n|---|---|---|---|---|---|---|---|---|'
  )
  failed = False
  # Written into, not replaced: it may be a link, a pipe or a device. A line
  # when it is known: nothing of an interrupted run is lost.
  with open(output or os.devnull, 'w', buffering=1, encoding='utf-8') as file:
    if ceilings is not None:
      head = {'ceilings': dataclasses.asdict(ceilings)}
      file.write(json.dumps(head) + '\n')
    for row in rows:
      failed |= not row['ok']
      print(table_row(row), flush=True)
      file.write(json.dumps(row, default=float) + '\n')
  return int(failed)


if __name__ == '__main__':
  raise SystemExit(main())
