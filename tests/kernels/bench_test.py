"""The bench's own arithmetic; its figures come from a GPU only."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels.case import Case, check_attention
from pallas_kernels.draft_attention import cases as draft_cases
from pallas_kernels.expert_mlp import cases as expert_cases


def square_case(**changes):
  case = Case(
    op='square',
    name='small',
    make_inputs=lambda key: (jax.random.normal(key, (8,)),),
    kernel=lambda x: x * x,
    reference=lambda x: x**2,
    check=lambda kernel, inputs: {'ok': True, 'error': 0.0},
    bytes=64.0,
    flops=8.0,
  )
  return dataclasses.replace(case, **changes)


CEILINGS = bench.Ceilings('device', 4e12, 8e14, 1e-5)


def run(case):
  return bench.run_case(case, bench.prepare(case), CEILINGS)


def test_without_a_gpu_says_so_in_one_line(capsys):
  assert bench.main([]) == 0
  out = capsys.readouterr().out
  assert out.startswith('No GPU') and out.count('\n') == 1


def test_unknown_op_is_an_error(capsys):
  with pytest.raises(SystemExit):
    bench.main(['--ops=tree_biuld'])
  assert 'tree_build' in capsys.readouterr().err


def test_another_gpu_is_said_in_one_line(capsys, monkeypatch):
  class Device:
    device_kind, compute_capability = 'NVIDIA A100', '8.0'

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax, 'devices', lambda: [Device()])
  for argv in ([], ['--smoke']):
    assert bench.main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith('NVIDIA A100 is no Hopper') and out.count('\n') == 1


def test_every_op_has_cases():
  cases = list(bench.find_cases())
  assert {case.op for case in cases} == set(bench.ops_with_cases())
  assert len(bench.ops_with_cases()) == 7
  assert len({(case.op, case.name) for case in cases}) == len(cases)
  assert {case.op for case in cases if case.timed} == {c.op for c in cases}
  for case in cases:
    assert case.name.isprintable() and '|' not in case.name


@pytest.mark.parametrize(
  'case',
  [case for case in bench.find_cases() if case.timed],
  ids=lambda case: f'{case.op}: {case.name}',
)
def test_a_timed_case_is_well_formed(case):
  """Its inputs have shapes that its reference takes."""
  assert case.flops >= 0
  inputs = input_shapes(case)
  shapes = jax.eval_shape(case.reference, *inputs)
  assert jax.tree.leaves(shapes)
  if case.in_place:
    assert (shapes.shape, shapes.dtype) == (inputs[0].shape, inputs[0].dtype)


def input_shapes(case):
  """What `make_inputs` gives, without making what is large."""
  if case.op == 'tree_accept':  # drawn with NumPy
    return case.make_inputs(jax.random.key(0))
  return jax.eval_shape(case.make_inputs, jax.random.key(0))


def test_loop_makes_every_call():
  x = jnp.array([1.0, 3.0])
  loop = bench.device_loop(lambda x: 2 * x, 3, unroll=2, in_place=True)
  np.testing.assert_array_equal(loop(jnp.copy(x), (), None), 64 * x)
  loop = bench.device_loop(lambda x, y: x + y, 3, unroll=2)
  np.testing.assert_array_equal(loop(x, (x,), 0 * x), 2 * x)


def test_loop_body_keeps_the_call_inside():
  """The call must stand in the loop, not before it."""
  loop = bench.device_loop(jnp.cos, 5)
  x = jnp.ones((8,))
  jaxpr = str(jax.make_jaxpr(loop)(x, (), x))
  assert jaxpr.index('optimization_barrier') < jaxpr.index('cos')


def test_in_place_loop_leaves_the_inputs_alone():
  x = jnp.ones((8,))
  assert bench.seconds_per_call(lambda x: x + 1, (x,), 2, in_place=True) > 0
  np.testing.assert_array_equal(x, 1)


@pytest.mark.parametrize(('in_place', 'calls'), ((False, 1), (True, None)))
def test_row_of_a_case(in_place, calls):
  """Only calls that need each other's output share an iteration."""
  case = dataclasses.replace(square_case(), in_place=in_place)
  row = run(case)
  assert row['ok'] and row['kernel_us'] > 0
  floor = max(64 / 4e12, 8 / 8e14)
  np.testing.assert_allclose(
    row['fraction_of_ceiling'], floor / (row['kernel_us'] * 1e-6)
  )
  loop = CEILINGS.loop_seconds * 1e6 / (calls or bench.UNROLL)
  np.testing.assert_allclose(row['kernel_us'] - row['net_us'], loop)
  assert bench.table_row(row).count('|') == 10


def test_the_loops_own_cost_is_measured():
  assert 0 <= bench.loop_seconds() < 0.1


def test_failures_are_reported(capsys):
  def broken(x):
    raise NotImplementedError('no such layout')

  row = run(square_case(kernel=broken))
  assert not row['ok']
  assert 'no such layout' in bench.table_row(row)
  assert bench.table_row(row).count('|') == 10
  assert bench._report([row], CEILINGS, None) == 1
  header, rule = capsys.readouterr().out.splitlines()[:2]
  assert header.count('|') == rule.count('|') == 10


def test_a_failure_of_the_smoke_test_does_not_hide_the_others():
  def broken(kernel, inputs):
    raise NotImplementedError('no such layout')

  row = bench.check(square_case(check=broken))
  assert not row['ok'] and 'no such layout' in row['failure']
  assert bench.check(square_case()) == {
    'op': 'square',
    'name': 'small',
    'ok': True,
    'error': 0.0,
  }


def test_writes_json_lines(tmp_path):
  path = tmp_path / 'out.jsonl'
  rows = [bench.check(square_case())]
  assert bench._report(rows, CEILINGS, str(path)) == 0
  assert path.read_text().count('\n') == 2
  link = tmp_path / 'link'
  link.symlink_to('/dev/null')
  assert bench._report(rows, CEILINGS, str(link)) == 0
  assert link.is_char_device() and link.is_symlink()


def test_an_output_that_cannot_be_written_is_refused(tmp_path, capsys):
  for path in ('', str(tmp_path), str(tmp_path / 'no' / 'x')):
    with pytest.raises(SystemExit):
      bench.parse_args([f'--output={path}'])
    assert f'--output={path}: cannot be written' in capsys.readouterr().err
  bench.parse_args([f'--output={tmp_path / "x"}'])


ATTEND = functools.partial(draft_cases._attend, None, 'reference')


@pytest.mark.parametrize(
  ('fault', 'found'),
  [
    (None, {'ok': True, 'repeats': True, 'rows_independent': True}),
    (lambda out: out * 1.02, {'ok': False, 'rows_independent': True}),
    (lambda out: out + out[:, -1:] / 64, {'rows_independent': False}),
  ],
)
def test_what_the_check_of_an_attention_finds(fault, found):
  """A kernel that is inaccurate, and one whose rows see each other."""
  inputs = draft_cases._inputs(5, 2, 2, 33, jax.random.key(0))

  def kernel(*arrays):
    out = ATTEND(*arrays)
    return fault(out.astype(jnp.float32)).astype(out.dtype) if fault else out

  checked = check_attention(ATTEND, kernel, inputs)
  assert found.items() <= checked.items()
  assert checked['ok'] == (fault is None)
  assert 0 < checked['reference_error'] < 0.01


def test_the_check_of_the_experts():
  """With the reference for the kernel all is as it should be."""
  inputs = expert_cases._inputs(17, 2, (4, 64, 32), 1, jax.random.key(0))
  run = functools.partial(expert_cases._run, 'reference')
  assert expert_cases._check(run, inputs, few=17)['ok']


def test_a_case_that_is_not_timed_is_checked():
  case = square_case(bytes=0.0)
  assert run(case) == bench.check(case)
