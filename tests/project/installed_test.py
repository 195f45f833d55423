"""What a wheel holds besides the packages; .ci/wheel installs and runs one."""

import pathlib
import subprocess
import sys
import tomllib

import pytest

from kdtree_jax import UserError, named_configs, repository

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '"""A config."""\n\nCONFIG = {value}\n'


@pytest.fixture(params=['wheel', 'checkout'])
def package(request, tmp_path, monkeypatch):
  """The folder of the package, where `configs/` is inside or beside it."""
  package = tmp_path / 'kdtree_jax'
  configs = (package if request.param == 'wheel' else tmp_path) / 'configs'
  package.mkdir()
  configs.mkdir()
  (configs / 'mine.py').write_text(CONFIG.format(value=17))
  (configs / '_helper.py').write_text('raise AssertionError')
  path = repository.repository_path
  monkeypatch.setattr(
    named_configs, 'repository_path', lambda name: path(name, package)
  )
  return package


def test_configs_are_found_by_file_name(package):
  assert named_configs.config_names() == ('mine',)
  assert named_configs.load_config('mine') == 17
  with pytest.raises(UserError, match="unknown config 'tiny'; known: mine"):
    named_configs.load_config('tiny')
  assert named_configs.recipe_names() == ()


def test_the_wheel_takes_no_other_top_level_name():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  wheel = project['tool']['hatch']['build']['targets']['wheel']
  assert set(wheel['packages']) == {'kdtree_jax', 'pallas_kernels'}
  assert wheel['force-include'] == {
    name: f'kdtree_jax/{name}' for name in ('configs', 'run.py')
  }
  for name in wheel['force-include']:
    assert repository.repository_path(name) == ROOT / name


def test_the_command_is_run_py(tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'kdtree_jax', '--mode=inspect'],
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr == 'error: --mode=inspect needs --target\n'


def test_ci_installs_the_wheel_and_checks_the_sources():
  lines = (ROOT / '.ci/run').read_text().splitlines()
  checks = ('ruff check .', 'ruff format --check .', 'pyrefly check')
  assert {'.ci/wheel', *(f'uv run {check}' for check in checks)} <= set(lines)
