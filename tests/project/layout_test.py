"""What imports what, and how long things are."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = tuple(
  sorted(
    path.relative_to(ROOT)
    for folder in ('kdtree_jax', 'pallas_kernels', 'configs')
    for path in (ROOT / folder).rglob('*.py')
  )
)
# Who may import whom inside kdtree_jax; a missing entry is an error.
ALLOWED = {
  'errors': set(),
  'keys': set(),
  'checks': {'errors'},
  'registry': {'errors'},
  'repository': set(),
  'schema': {'errors'},
  'config': {'errors', 'schema'},
  'model': {'config', 'errors', 'keys'},
  'tree': {'config', 'errors', 'registry'},
  'drafters': {'config', 'errors', 'keys', 'registry', 'model'},
  'decode': {
    'checks',
    'config',
    'errors',
    'registry',
    'schema',
    'model',
    'tree',
    'drafters',
  },
  'io': {
    'config',
    'errors',
    'registry',
    'schema',
    'model',
    'tree',
    'drafters',
    'decode',
  },
  'training': {
    'config',
    'errors',
    'keys',
    'registry',
    'schema',
    'model',
    'tree',
    'drafters',
    'decode',
    'io',
  },
  'analysis': {'errors'},
  'reference': set(),
}
# Of kdtree_jax, what a file in configs/ is made of.
IN_CONFIGS = ('kdtree_jax.config', 'kdtree_jax.training.recipe')
TOP = {
  'api',
  'audit',
  'benchmark',
  'divergence',
  'generation',
  'modes',
  'named_configs',
  'observation',
  'options',
  'sessions',
  '__init__',
  '__main__',
}
OPS = (
  'cache_compact',
  'draft_attention',
  'expert_router',
  'expert_mlp',
  'tree_accept',
  'tree_build',
  'verify_attention',
)


def imports(path):
  """Dotted names of all modules that a file imports, absolutely."""
  found = []
  for node in ast.walk(ast.parse((ROOT / path).read_text())):
    if isinstance(node, ast.Import):
      found += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      found.append(node.module)
      found += [f'{node.module}.{alias.name}' for alias in node.names]
  return found


def part(dotted):
  """`kdtree_jax.model.moe` -> `model`."""
  pieces = dotted.split('.')
  return pieces[1] if len(pieces) > 1 else '__init__'


def test_there_is_something_to_check():
  assert len(SOURCES) > 40


@pytest.mark.parametrize('path', SOURCES, ids=str)
def test_direction_of_imports(path):
  package = path.parts[0]
  for name in imports(path):
    top = name.split('.')[0]
    if package == 'pallas_kernels':
      assert top not in ('kdtree_jax', 'configs', 'flax'), name
    elif package == 'configs' and top == 'kdtree_jax':
      assert name.startswith(IN_CONFIGS), name
    elif package == 'kdtree_jax':
      check_inside(path, name, top)


def check_inside(path, name, top):
  own = path.parts[1].removesuffix('.py')
  if own == 'reference':
    assert top in ('kdtree_jax', 'numpy', 'ml_dtypes') or not external(top)
  if top == 'pallas_kernels':
    pieces = name.split('.')
    assert len(pieces) < 3 or pieces[1] not in OPS or pieces[2] == 'api', name
  if top == 'kdtree_jax' and own not in TOP:
    other = part(name)
    known = other in ALLOWED or other == own
    assert not known or other == own or other in ALLOWED[own], name
    assert other not in TOP - {'__init__'}, name


def external(top):
  import sys

  return top not in sys.stdlib_module_names


@pytest.mark.parametrize('path', SOURCES, ids=str)
def test_a_sitting_and_a_screen(path):
  text = (ROOT / path).read_text()
  assert text.count('\n') <= 500, 'split the file'
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef):
      length = node.end_lineno - node.lineno + 1
      assert length <= 120, f'{node.name} has {length} lines'


@pytest.mark.parametrize('path', SOURCES, ids=str)
def test_public_things_have_docstrings(path):
  tree = ast.parse((ROOT / path).read_text())
  if path.name != '__init__.py' or tree.body:
    assert ast.get_docstring(tree), 'the module has no docstring'
  for node in tree.body:
    kinds = (ast.FunctionDef, ast.ClassDef)
    if isinstance(node, kinds) and not node.name.startswith('_'):
      assert ast.get_docstring(node), f'{node.name} has no docstring'
