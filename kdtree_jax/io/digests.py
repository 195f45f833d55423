"""Digests that distinguish tokenizers and weights of equal sizes.

Equal tokenizers or weights have equal digests whatever file they come from.
"""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdtree_jax.errors import UserError
from kdtree_jax.io.files import JsonObject, canonical_json, one_line, parse_json
from pallas_kernels.quantized import QuantizedArray, dequantize

# The most elements of a matrix that are read, evenly spread in a larger one.
SAMPLE = 1 << 18
# Characters of a digest in messages.
SHOWN = 12
# Parts of tokenizer.json that determine ids besides the model.
_CUTTING = ('normalizer', 'pre_tokenizer')
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def short(digest: str) -> str:
  """The beginning of a digest, for messages."""
  return digest[:SHOWN]


def sha256(value: object) -> str:
  """The digest of a JSON value."""
  return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def tokenizer_digest(files: Mapping[str, bytes], where: str) -> str | None:
  """The digest of how a tokenizer turns text into ids; None: no tokenizer.

  It does not depend on spaces, the order of keys, whether merges are strings or
  pairs, or whether flags are off or absent. Decoding, templates, padding and
  truncation are not included.

  Args:
    files: bytes by the names of `TOKENIZER_FILES`.
    where: the folder or bundle of the files, for messages.

  Raises:
    UserError: a file that is no tokenizer.
  """
  try:
    if 'tokenizer.json' in files:
      return sha256(_json_content(parse_json(files['tokenizer.json'])))
    if 'tiktoken.model' in files:
      return sha256(_tiktoken_content(files))
  except (ValueError, TypeError, AttributeError, LookupError) as e:
    raise UserError(f'{where}: no tokenizer: {one_line(e)}') from e
  return None


def _json_content(raw: Any) -> JsonObject:
  model = {k: v for k, v in raw['model'].items() if v not in (None, False)}
  if 'merges' in model:
    model['merges'] = [
      merge.split(' ') if isinstance(merge, str) else list(merge)
      for merge in model['merges']
    ]
  added = [
    {key: value for key, value in token.items() if value is not False}
    for token in raw.get('added_tokens') or ()
  ]
  return {
    'model': model,
    'added_tokens': sorted(added, key=lambda token: token['id']),
    **{key: _without_nulls(raw.get(key)) for key in _CUTTING},
  }


def _without_nulls(value: object) -> object:
  """A JSON value without the keys whose value is null."""
  if isinstance(value, dict):
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}
  if isinstance(value, list):
    return [_without_nulls(item) for item in value]
  return value


def _tiktoken_content(files: Mapping[str, bytes]) -> JsonObject:
  """Ranks by token in base64, and the names of special tokens."""
  lines = [line.split() for line in files['tiktoken.model'].splitlines()]
  ranks = {token.decode(): int(rank) for token, rank in filter(None, lines)}
  config = parse_json(files.get('tokenizer_config.json', b'{}'))
  added = config.get('added_tokens_decoder') or {}
  names = {
    key: token['content'] if isinstance(token, Mapping) else token
    for key, token in added.items()
  }
  specials = {
    key: name
    for key, name in names.items()
    if name != f'<|reserved_token_{key}|>'
  }
  return {'ranks': ranks, 'specials': specials}


def weights_digest(params: Any, *, rounded: bool = False) -> str:
  """The digest of all parameters: names, shapes, dtypes and values.

  All values of a small matrix and `SAMPLE` of a large one are read, once, on
  the device; every expert of a stack counts as a matrix.

  Args:
    params: nested dict of arrays, which may be quantised.
    rounded: ignores dtypes and rounds dequantised values to bfloat16, so that
      a checkpoint has one digest whatever dtype it is loaded in.
  """
  kind = QuantizedArray if rounded else ()
  leaves = jax.tree_util.tree_leaves_with_path(
    params, is_leaf=lambda leaf: isinstance(leaf, kind)
  )
  sums = jax.device_get([_checksum(leaf, rounded) for _, leaf in leaves])
  digest = hashlib.sha256()
  for (path, leaf), value in zip(leaves, sums, strict=True):
    dtype = 'rounded' if rounded else np.dtype(leaf.dtype).name
    name = f'{jax.tree_util.keystr(path)} {dtype} {list(leaf.shape)}\n'
    digest.update(name.encode())
    digest.update(np.asarray(value, '<u4').tobytes())
  return digest.hexdigest()


@functools.partial(jax.jit, static_argnames='rounded')
def _checksum(x: Any, rounded: bool) -> jax.Array:
  """`[2]` uint32 for a vector or matrix, `[E, 2]` for a stack of E."""
  if x.ndim > 2:
    # One by one, because a dequantised stack may not fit the memory.
    return lax.map(lambda one: _checksum(one, rounded), x)
  if rounded:
    x = dequantize(x, jnp.bfloat16).astype(jnp.bfloat16)
  flat = x.reshape(-1)
  # An odd step does not visit the same columns in every row.
  flat = flat[:: -(-flat.size // SAMPLE) | 1]
  bits = lax.bitcast_convert_type(flat, _UNSIGNED[flat.dtype.itemsize])
  bits = bits.astype(jnp.uint32)
  if rounded:
    # Some devices flush subnormal numbers to 0.
    bits = jnp.where(bits & 0x7F80 != 0, bits, 0)
  place = lax.iota(jnp.uint32, flat.size)
  odd = place * np.uint32(0x9E3779B2) + np.uint32(1)
  mixed = (odd ^ (odd >> 15)) * np.uint32(0x85EBCA6B)
  # Integer sums do not depend on the order. The first changes with any single
  # value; other changes leave both unchanged with a chance of 2^-32 or less.
  weights = jnp.stack([odd, mixed ^ (mixed >> 13)])
  return jnp.sum(bits[None] * weights, axis=1, dtype=jnp.uint32)
