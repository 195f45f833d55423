"""The documents' commands run and print what they show; recipes work."""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from kdtree_jax.modes import flags
from tests.command_line import called

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
  path.relative_to(ROOT).as_posix(): path.read_text()
  for path in (
    ROOT / 'README.md',
    ROOT / 'pallas_kernels/PERFORMANCE.md',
    *sorted(ROOT.glob('docs/*.md')),
  )
}
README, FORKING = PAGES['README.md'], PAGES['docs/FORKING.md']
# A command, and what it prints where a text block follows.
SHOWN = re.compile(r'```bash\n(.*?)\n```(?:\n\n```text\n(.*?)\n```)?', re.S)
FIRST = [command for command, _ in SHOWN.findall(README)[:2]]
# Every other command once, with what all pages show of it.
COMMANDS: dict[str, list[str]] = {}
for page in PAGES.values():
  for command, shown in SHOWN.findall(page):
    if command not in FIRST:
      COMMANDS.setdefault(command, []).extend(shown.splitlines())
PYTHON = re.findall(
  r'```python\n(import.*?)```\n\n```text\n(.*?)\n```', README, re.S
)
FILES = re.findall(r'<!-- file: (\S+) -->\n```python\n(.*?)```', FORKING, re.S)
# As text: a formatter of Python would not leave a line of a file as it is.
LINES = re.findall(
  r'<!-- line: (\S+) after "(.*?)" -->\n```text\n(.*?)\n```', FORKING, re.S
)
# What takes a GPU or hours stands in text blocks.
LONG = [
  line
  for page in PAGES.values()
  for block in re.findall(r'```text\n(.*?)\n```', page, re.S)
  for line in block.splitlines()
  if ' run.py ' in line
]
RECIPES = 'wide_latent or lookup or star'


def environment():
  """As a user has it: nothing of the suite's own settings."""
  suites = ('XLA_FLAGS', 'NPROC')
  return {k: v for k, v in os.environ.items() if k not in suites}


def execute(arguments, cwd=ROOT, env=None):
  return subprocess.run(
    arguments,
    cwd=cwd,
    env=env or environment(),
    capture_output=True,
    text=True,
    timeout=900,
  )


def unnumbered(text):
  """Without its numbers, which rounding and machines may change."""
  return re.sub(r'\d+(\.\d+)?(e-?\d+)?', '#', text)


def check_shown(shown, printed):
  """Every line that a page shows was printed; `...` stands for anything."""
  printed = unnumbered(printed)
  for line in shown:
    pieces = map(re.escape, re.split(r' *\.\.\. *', unnumbered(line)))
    assert re.search('^' + '.*'.join(pieces), printed, re.M), line


def test_the_first_two_commands():
  assert FIRST[0] == 'pip install uv && uv run run.py'
  assert FIRST[1] in (ROOT / '.ci/run').read_text().splitlines()


@pytest.mark.parametrize('command', COMMANDS)
def test_other_commands(command, tmp_path):
  """As written, in this process: they share their programs."""
  words = shlex.split(command)
  assert words[:3] == ['uv', 'run', 'run.py'], 'a command nobody runs'
  # Paths are relative to the repository; what is written goes elsewhere.
  words = [
    re.sub(r'^--output=', f'--output={tmp_path}/', word) for word in words[3:]
  ]
  done = called(*words)
  assert done.returncode == 0, done.stderr
  assert done.stdout
  check_shown(COMMANDS[command], done.stdout.replace(f'{tmp_path}/', ''))


@pytest.mark.parametrize('line', ['match: no', '{"a": 1, ... "z"'])
def test_what_is_not_printed_is_found(line):
  with pytest.raises(AssertionError):
    check_shown([line], 'match: yes\n{"a": 2, "b": 3}\n"z"')


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
  ((source, shown),) = PYTHON
  done = execute([sys.executable, '-c', source], env=os.environ)
  assert done.returncode == 0, done.stderr
  check_shown(shown.splitlines(), done.stdout)


def test_readme_is_short():
  assert README.count('\n') <= 220


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_somewhere(page):
  for link in re.findall(r'\]\((?!https?:)(.*?)\)', PAGES[page]):
    name, _, anchor = link.partition('#')
    path = (ROOT / page).parent / name if name else ROOT / page
    assert path.exists(), link
    if anchor:
      titles = re.findall(r'^#+ (.*)', path.read_text(), re.M)
      assert anchor in {
        re.sub(r'[^\w -]', '', title).lower().replace(' ', '-')
        for title in titles
      }, link


def test_the_table_of_priced_speedups():
  path = ROOT / 'docs/pictures.py'
  spec = importlib.util.spec_from_file_location('pictures', path)
  pictures = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(pictures)
  for page in ('README.md', 'docs/PERFORMANCE.md'):
    assert pictures.table() in PAGES[page]
  lengths = {
    point.budget: point.acceptance_length for point in pictures.points()
  }
  (row,) = re.findall(
    r'^\| DDTree \| (4\.12.*) \|$', PAGES['docs/ACCEPTANCE.md'], re.M
  )
  budgets = [4, 8, 16, 32, 64, 128, 256, 512]
  measured = dict(zip(budgets, map(float, row.split(' | ')), strict=True))
  assert lengths == {0: 1.0} | {b: measured[b] for b in lengths if b}


def test_recipes_through_the_exactness_suite(tmp_path):
  """Copies the project, adds the recipes word for word, runs the suite."""
  assert len(FILES) == 3 and len(LINES) == 2
  for name in ('kdtree_jax', 'pallas_kernels', 'configs', 'tests'):
    skip = shutil.ignore_patterns('__pycache__')
    shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
  shutil.copy(ROOT / 'pyproject.toml', tmp_path)
  # A fork may have carried them out already.
  for name, text in FILES:
    (tmp_path / name).write_text(text)
  for name, after, line in LINES:
    text = (tmp_path / name).read_text()
    assert text.count(after) == 1
    if line not in text.splitlines():
      text = text.replace(after, f'{after}\n{line}')
    (tmp_path / name).write_text(text)
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
