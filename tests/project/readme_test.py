"""The README's commands run, and its recipes do what they say."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from kdtree_jax.modes import flags

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / 'README.md').read_text()
COMMANDS = re.findall(r'```bash\n(.*?)\n```', README, re.S)
PYTHON = re.findall(r'From Python:\n\n```python\n(.*?)```', README, re.S)
FILES = re.findall(r'<!-- file: (\S+) -->\n```python\n(.*?)```', README, re.S)
LINES = re.findall(
  r'<!-- line: (\S+) after "(.*?)" -->\n```python\n(.*?)```', README, re.S
)
# What takes a GPU or hours stands in text blocks.
LONG = [
  line
  for path in (ROOT / 'README.md', *sorted(ROOT.glob('docs/*.md')))
  for block in re.findall(r'```text\n(.*?)\n```', path.read_text(), re.S)
  for line in block.splitlines()
  if ' run.py ' in line
]
RECIPES = 'wide_latent or lookup or star'


def environment():
  """As a user has it: nothing of the suite's own settings."""
  return {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}


def execute(arguments, cwd=ROOT, env=None):
  return subprocess.run(
    arguments,
    cwd=cwd,
    env=env or environment(),
    capture_output=True,
    text=True,
    timeout=900,
  )


def test_the_first_two_commands():
  assert COMMANDS[0] == 'pip install uv && uv run run.py'
  assert COMMANDS[1] in (ROOT / '.ci/run').read_text().splitlines()


@pytest.mark.parametrize('command', COMMANDS[2:])
def test_other_commands(command, tmp_path):
  """As written; programs as the suite compiles them, which it shares."""
  words = shlex.split(command)
  assert words[:3] == ['uv', 'run', 'run.py'], 'a command nobody runs'
  # Paths are relative to the repository; what is written goes elsewhere.
  words = [
    re.sub(r'^--output=', f'--output={tmp_path}/', word) for word in words[3:]
  ]
  done = execute([sys.executable, 'run.py', *words], env=os.environ)
  assert done.returncode == 0, done.stderr
  assert done.stdout


@pytest.mark.parametrize('command', LONG)
def test_flags_of_long_commands(command):
  """They are not run here, but every flag is one that its mode takes."""
  words = shlex.split(command)
  given = flags.parse(words[words.index('run.py') :])
  assert f'--mode={given.mode}' in words


def test_long_commands_are_found():
  assert {'train_target', 'train_drafter'} <= {
    re.search(r'--mode=(\w+)', command)[1] for command in LONG
  }


def test_python_example():
  (source,) = PYTHON
  done = execute([sys.executable, '-c', source])
  assert done.returncode == 0, done.stderr
  assert '(4, 64)' in done.stdout


def test_recipes_through_the_exactness_suite(tmp_path):
  """Copies the project, adds the recipes word for word, runs the suite."""
  assert len(FILES) == 3 and len(LINES) == 2
  for name in ('kdtree_jax', 'pallas_kernels', 'configs', 'tests'):
    skip = shutil.ignore_patterns('__pycache__')
    shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
  shutil.copy(ROOT / 'pyproject.toml', tmp_path)
  for name, text in FILES:
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text(text)
  for name, after, line in LINES:
    text = (tmp_path / name).read_text()
    assert text.count(after) == 1
    (tmp_path / name).write_text(text.replace(after, f'{after}\n{line[:-1]}'))
  suite = [sys.executable, '-m', 'pytest', '-q', '-n', '0', '-k', RECIPES]
  done = execute(
    [
      *suite,
      '-m',
      'not slow',
      'tests/decode/lossless_test.py::test_recipe',
      'tests/tree/policies_test.py',
      'tests/model/transformer_test.py',
    ],
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stdout[-3000:]
  assert '6 passed' in done.stdout
