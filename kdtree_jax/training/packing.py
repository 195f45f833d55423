"""Windows of a token stream as sequences of separate documents."""

import functools

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt, UInt32

from kdtree_jax.errors import UserError
from kdtree_jax.training.streams import check_length


class PackedBatch(flax.struct.PyTreeNode):
  """B windows of T tokens, each a sequence of whole and cut documents.

  Attributes:
    tokens: the tokens.
    labels: the token after each.
    counted: false where the label begins another document.
    positions: index in the part of the document that is in the window.
    segments: number of the document in the window, from 0.
    ancestors: bit j of row i: token i attends to j, that is, j <= i in the same
      document; the mask of a target's forward.
  """

  tokens: Int32[Array, 'B T']
  labels: Int32[Array, 'B T']
  counted: Bool[Array, 'B T']
  positions: Int32[Array, 'B T']
  segments: Int32[Array, 'B T']
  ancestors: UInt32[Array, 'B T words']


def pack(windows: Int32[Array, 'B window'], end_of_text: int) -> PackedBatch:
  """Splits windows of T + 1 tokens into documents.

  A document ends with `end_of_text`.
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


def pack_bits(mask: Bool[Array, '*batch N']) -> UInt32[Array, '*batch words']:
  """Packs a mask into words; element 32 w + i is bit i of word w."""
  n = mask.shape[-1]
  padding = [(0, 0)] * (mask.ndim - 1) + [(0, -n % 32)]
  octets = jnp.packbits(jnp.pad(mask, padding), axis=-1, bitorder='little')
  octets = octets.reshape(*mask.shape[:-1], -1, 4)
  return lax.bitcast_convert_type(octets, jnp.uint32)


def gather_windows(
  tokens: UInt[Array, ' stream'], starts: Int32[Array, ' B'], length: int
) -> Int32[Array, 'B window']:
  """The windows of `length + 1` tokens at these starts.

  Ids are below 2^31, as vocabularies are.
  """
  offsets = jnp.arange(length + 1, dtype=jnp.int32)
  return tokens[starts[:, None] + offsets[None, :]].astype(jnp.int32)


def num_windows(num_tokens: int, length: int) -> int:
  """Number of windows of `length` labels in a stream; none shares a label."""
  return max(0, (num_tokens - 1) // length)


def check_windows(num_tokens: int, length: int, split: str) -> None:
  """Refuses a split without a window of `length` labels.

  Raises:
    UserError: names the split.
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
  """The starts `[batch]` int32 of a step's windows, which depend on it alone.

  An epoch visits every window once, in random order and with a random offset;
  windows that fill no whole batch are left out.

  Raises:
    UserError: the stream does not fill one batch, or is too long for int32.
  """
  check_length(num_tokens, 'the train split')
  # One window less leaves room for the offset.
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
