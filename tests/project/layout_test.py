"""What imports what, and how long things are."""

import ast
import functools
import pathlib
import sys

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
  'calibrations',
  'costs',
  'divergence',
  'generation',
  'modes',
  'named_configs',
  'observation',
  'options',
  'sessions',
  'teacher_forcing',
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


@functools.cache
def parsed(path):
  return ast.parse((ROOT / path).read_text())


def imports(path):
  """Dotted names of all modules that a file imports, absolutely."""
  found = []
  for node in ast.walk(parsed(path)):
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


def test_direction_of_imports():
  wrong = [
    f'{path} imports {name}'
    for path in SOURCES
    for name in imports(path)
    if not may_import(path, name)
  ]
  assert not wrong


def may_import(path, name):
  """Whether a file may import a module or what is in it."""
  package, top = path.parts[0], name.split('.')[0]
  if package == 'pallas_kernels':
    return top not in ('kdtree_jax', 'configs', 'flax')
  if package == 'configs':
    return top != 'kdtree_jax' or name.startswith(IN_CONFIGS)
  own = path.parts[1].removesuffix('.py')
  if own == 'reference' and top in sys.stdlib_module_names:
    return True
  if own == 'reference' and top not in ('kdtree_jax', 'numpy', 'ml_dtypes'):
    return False
  if top == 'pallas_kernels':
    pieces = name.split('.')
    return len(pieces) < 3 or pieces[1] not in OPS or pieces[2] == 'api'
  if top != 'kdtree_jax' or own in TOP:
    return True
  other = part(name)
  if other == own:
    return True
  if other in TOP - {'__init__'}:
    return False
  return other not in ALLOWED or other in ALLOWED[own]


def test_directions_that_are_wrong_are_found():
  """The control of the test above."""
  for path, name in (
    ('pallas_kernels/case.py', 'kdtree_jax.errors'),
    ('configs/tiny.py', 'kdtree_jax.model'),
    ('kdtree_jax/reference/model.py', 'jax'),
    ('kdtree_jax/model/moe.py', 'pallas_kernels.expert_mlp.tiles'),
    ('kdtree_jax/model/moe.py', 'kdtree_jax.decode'),
    ('kdtree_jax/io/kdtr.py', 'kdtree_jax.api'),
  ):
    assert not may_import(pathlib.Path(path), name), (path, name)


def test_a_sitting_and_a_screen():
  long = [
    path for path in SOURCES if (ROOT / path).read_text().count('\n') > 500
  ]
  long += [
    f'{path}: {node.name}'
    for path in SOURCES
    for node in ast.walk(parsed(path))
    if isinstance(node, ast.FunctionDef)
    and node.end_lineno - node.lineno >= 120
  ]
  assert not long, 'split them'


def test_public_things_have_docstrings():
  lacking = [
    path
    for path in SOURCES
    if path.name != '__init__.py' or parsed(path).body
    if not ast.get_docstring(parsed(path))
  ]
  lacking += [
    f'{path}: {node.name}'
    for path in SOURCES
    for node in parsed(path).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
    and not node.name.startswith('_')
    and not ast.get_docstring(node)
  ]
  assert not lacking
