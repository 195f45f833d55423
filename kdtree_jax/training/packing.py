"""Windows of a token stream as sequences of documents that do not meet."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdtree_jax.errors import UserError
from kdtree_jax.training.streams import check_length


@flax.struct.dataclass
class PackedBatch:
  """B windows of L tokens, each a row of whole and cut documents.

  Attributes:
    tokens: `[B, L]` int32.
    labels: `[B, L]` int32, the token after each.
    counted: `[B, L]` bool; false where the label begins another document.
    positions: `[B, L]` int32, from the beginning of the document in the window.
    segments: `[B, L]` int32, number of the document in the window, from 0.
    ancestors: `[B, L, ceil(L / 32)]` uint32, bit j of row i: token i sees j,
      that is, j <= i in the same document; the mask of a target's forward.
  """

  tokens: jax.Array
  labels: jax.Array
  counted: jax.Array
  positions: jax.Array
  segments: jax.Array
  ancestors: jax.Array


def pack(windows: jax.Array, end_of_text: int) -> PackedBatch:
  """Splits `[B, L + 1]` int32 windows into documents.

  A document ends with `end_of_text`; the next one begins after it.
  """
  tokens, labels = windows[:, :-1], windows[:, 1:]
  batch, n = tokens.shape
  ends = tokens == end_of_text
  begins = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
  segments = jnp.cumsum(begins.astype(jnp.int32), axis=1)
  index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (batch, n))
  starts = lax.cummax(jnp.where(begins, index, 0), axis=1)
  visible = segments[:, :, None] == segments[:, None, :]
  visible &= np.tril(np.ones((1, n, n), bool))
  return PackedBatch(
    tokens=tokens,
    labels=labels,
    counted=~ends,
    positions=index - starts,
    segments=segments,
    ancestors=pack_bits(visible),
  )


def pack_bits(mask: jax.Array) -> jax.Array:
  """`[..., N]` bool to uint32 words; 32 w + i is bit i of word w."""
  n = mask.shape[-1]
  padding = [(0, 0)] * (mask.ndim - 1) + [(0, -n % 32)]
  words = jnp.pad(mask, padding).reshape(*mask.shape[:-1], -1, 32)
  weights = np.uint32(1) << np.arange(32, dtype=np.uint32)
  weights = weights.reshape((1,) * (words.ndim - 1) + (32,))
  return jnp.sum(
    jnp.where(words, weights, np.uint32(0)), axis=-1, dtype=jnp.uint32
  )


def gather_windows(
  tokens: jax.Array, starts: jax.Array, length: int
) -> jax.Array:
  """`[T]` unsigned tokens and `[B]` int32 starts to `[B, length + 1]` int32.

  Ids are below 2^31, as vocabularies are.
  """
  offsets = jnp.arange(length + 1, dtype=jnp.int32)
  return tokens[starts[:, None] + offsets[None, :]].astype(jnp.int32)


def num_windows(num_tokens: int, length: int) -> int:
  """Windows of `length` labels that a stream holds; none shares a label."""
  return max(0, (num_tokens - 1) // length)


def check_windows(num_tokens: int, length: int, split: str) -> None:
  """Refuses a split that is too short to be measured on.

  Raises:
    UserError: it holds no window of `length` labels.
  """
  if not num_windows(num_tokens, length):
    raise UserError(
      f'the {split} split has {num_tokens} tokens, and a sequence of the '
      f'recipe takes {length + 1}; take a larger corpus or lower '
      'sequence_length'
    )


def window_starts(
  num_tokens: int, length: int, batch: int, step: int, seed: int
) -> np.ndarray:
  """The `[batch]` int32 starts of a step's windows, a function of the step.

  An epoch visits every window once, in an order and with an offset of its own;
  what fills no whole batch is left out.

  Raises:
    UserError: the stream does not fill one batch, or is too long for int32.
  """
  check_length(num_tokens, 'the train split')
  # One window less, so that there is room for the offset.
  windows = num_windows(num_tokens, length) - 1
  steps = windows // batch
  if steps < 1:
    raise UserError(
      f'the corpus has {num_tokens} training tokens; a step takes '
      f'{batch} sequences of {length}'
    )
  epoch, place = divmod(step, steps)
  order, offset = _epoch(windows, length, epoch, seed)
  chosen = order[place * batch : (place + 1) * batch]
  return (chosen * length + offset).astype(np.int32)


@functools.lru_cache(maxsize=2)
def _epoch(
  windows: int, length: int, epoch: int, seed: int
) -> tuple[np.ndarray, int]:
  rng = np.random.default_rng((seed, epoch))
  return rng.permutation(windows), int(rng.integers(length))
