"""A batch of draft trees as one structure of arrays."""

import math
from collections.abc import Callable, Iterable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

ROOT_INDEX = 0
NO_PARENT = -1


class DraftTree(flax.struct.PyTreeNode):
  """N = 1 + tree_budget slots a row; the root is node 0, `parents[i] < i`.

  Slots from `num_nodes` on are padding: no parent, no child, and no bit in
  any row of `ancestors`, their own included.

  Attributes:
    tokens: the nodes' tokens.
    parents: the parents' indices; NO_PARENT for the root and for padding.
    depths: 0 for the root and for padding.
    scores: sum of log q along the path; -inf for padding.
    num_nodes: the root included.
    ancestors: bit j % 32 of word j // 32 in row i is set if j is i or an
      ancestor of i.
  """

  tokens: Int32[Array, 'B N']
  parents: Int32[Array, 'B N']
  depths: Int32[Array, 'B N']
  scores: Float32[Array, 'B N']
  num_nodes: Int32[Array, ' B']
  ancestors: UInt32[Array, 'B N words']

  @property
  def valid(self) -> Bool[Array, 'B N']:
    """The slots that hold nodes."""
    slots = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
    return slots[None, :] < self.num_nodes[:, None]


def prefix(tree: DraftTree, nodes: Int32[Array, ' B'], width: int) -> DraftTree:
  """The tree of the first draft nodes, in `1 + width` slots.

  Args:
    tree: a tree of at least as many slots; parents come before their children,
      so that every prefix is a tree.
    nodes: draft nodes that each row keeps, at most `width`.
    width: slots besides the root's.
  """
  slots = 1 + width
  num_nodes = jnp.minimum(tree.num_nodes, 1 + nodes)
  kept = jnp.arange(slots, dtype=jnp.int32)[None, :] < num_nodes[:, None]

  def cut(values, fill):
    return jnp.where(kept, values[:, :slots], fill)

  words = (slots + 31) // 32
  return DraftTree(
    tokens=cut(tree.tokens, 0),
    parents=cut(tree.parents, NO_PARENT),
    depths=cut(tree.depths, 0),
    scores=cut(tree.scores, -jnp.inf),
    num_nodes=num_nodes,
    ancestors=jnp.where(
      kept[:, :, None], tree.ancestors[:, :slots, :words], jnp.uint32(0)
    ),
  )


def root_only(root: Int32[Array, ' B']) -> DraftTree:
  """The empty tree of autoregressive decoding."""
  zeros = jnp.zeros((root.shape[0], 1), jnp.int32)
  return DraftTree(
    tokens=root[:, None],
    parents=zeros + NO_PARENT,
    depths=zeros,
    scores=zeros.astype(jnp.float32),
    num_nodes=zeros[:, 0] + 1,
    ancestors=jnp.ones((root.shape[0], 1, 1), jnp.uint32),
  )


def check_invariants(tree: DraftTree) -> None:
  """Checks on the host the invariants of every policy's trees.

  Raises:
    ValueError: the first invariant that a row breaks, by name.
  """
  tree = jax.tree.map(np.asarray, tree)
  batch, width = tree.tokens.shape
  for b in range(batch):
    row = jax.tree.map(lambda x, b=b: x[b], tree)
    count = int(row.num_nodes)

    def require(condition, what, b=b):
      if not condition:
        raise ValueError(f'draft tree, row {b}: {what}')

    require(1 <= count <= width, f'num_nodes={count} is not in 1..{width}')
    require(row.parents[0] == NO_PARENT, 'the root has a parent')
    require(row.depths[0] == 0, 'the root is not at depth 0')
    expected = np.zeros((width, width), bool)
    expected[0, 0] = True
    children = set()
    for i in range(1, count):
      parent = int(row.parents[i])
      require(0 <= parent < i, f'node {i} has parent {parent}')
      require(
        row.depths[i] == row.depths[parent] + 1,
        f'node {i} is not one deeper than its parent',
      )
      require(
        row.scores[i] <= row.scores[parent], f'node {i} outscores its parent'
      )
      edge = (parent, int(row.tokens[i]))
      require(edge not in children, f'node {i} repeats a sibling')
      children.add(edge)
      expected[i] = expected[parent]
      expected[i, i] = True
    words = row.ancestors[:, np.arange(width) // 32]
    bits = words >> (np.arange(width) % 32).astype(np.uint32) & 1
    require(np.array_equal(bits, expected), 'ancestor bits are wrong')
    require((row.parents[count:] == NO_PARENT).all(), 'padding has a parent')
    require((row.depths[count:] == 0).all(), 'padding has a depth')


def format_tree(
  node_token_ids: Iterable[int],
  parents: Iterable[int],
  accepted_indices: Iterable[int] = (),
  label: Callable[[int], str] = str,
  scores: Iterable[float] | None = None,
) -> str:
  """Draws one tree, a node a line, `*` on the accepted path.

  Args:
    node_token_ids: tokens of all nodes, the root first.
    parents: parent of each node, NO_PARENT for the root.
    accepted_indices: nodes to mark.
    label: turns a token id into text.
    scores: the sums of log q along every node's path. They add to each node
      the drafter's probability of its token and of its path.
  """
  tokens, parents = list(node_token_ids), list(parents)
  accepted = set(accepted_indices)
  scores = None if scores is None else list(scores)
  children: dict[int, list[int]] = {}
  for node, parent in enumerate(parents):
    children.setdefault(parent, []).append(node)
  lines = []
  # Depth first with an explicit stack: a chain may be deep.
  stack = [(ROOT_INDEX, '', '')]
  while stack:
    node, lead, below = stack.pop()
    mark = ' *' if node in accepted else ''
    probability = ''
    if scores is not None and node != ROOT_INDEX:
      own = math.exp(scores[node] - scores[parents[node]])
      probability = f' {own:.0%}, path {math.exp(scores[node]):.0%}'
    lines.append(f'{lead}{label(tokens[node])}{probability}{mark}')
    kids = children.get(node, [])
    for kid in reversed(kids):
      last = kid == kids[-1]
      branch = '`- ' if last else '|- '
      bar = '   ' if last else '|  '
      stack.append((kid, below + branch, below + bar))
  return '\n'.join(lines)
