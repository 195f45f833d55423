"""The choice of the target's token at every node, greedy or sampled.

A sample is the argmax of logits / temperature + Gumbel noise. The noise depends
on the request's key and the absolute position of the sampled token, on nothing
else: so it is the same for all siblings, and the same whether the position is
reached by an AR step or inside a tree. The output consists of the target's own
samples only, so it does not depend on the tree.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from kdtree_jax.errors import UserError
from kdtree_jax.schema import check_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
  """The sampling settings of one request.

  Attributes:
    temperature: 0 takes the most probable token.
    top_k: sample among the k most probable; 0 for all. Ties with the last one
      are kept.
    top_p: sample among the fewest most probable that together have at least
      this probability, after top_k; 1 for all.
    min_p: drop tokens whose probability is below this share of the highest.
    seed: the request's.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def __post_init__(self):
    check_types(self)
    temperature = self.temperature
    in_range = temperature == 0 or temperature >= 1e-4
    checks = (
      ('temperature', in_range, '0 or at least 0.0001'),
      ('top_k', 0 <= self.top_k < 2**31, 'at least 0; 0 keeps all'),
      ('top_p', 1e-6 <= self.top_p <= 1, 'in 0.000001..1'),
      ('min_p', 0 <= self.min_p <= 1, 'in 0..1'),
      ('seed', 0 <= self.seed < 2**32, 'in 0..2^32 - 1'),
    )
    for name, holds, wanted in checks:
      if not holds:
        raise UserError(f'{name}={getattr(self, name)} must be {wanted}')
    if temperature == 0:
      for name, neutral in (('top_k', 0), ('top_p', 1.0), ('min_p', 0.0)):
        if getattr(self, name) != neutral:
          raise UserError(
            f'{name}={getattr(self, name)} has no effect at temperature 0'
          )


GREEDY = SamplingConfig()


class Sampling(flax.struct.PyTreeNode):
  """The fields of B `SamplingConfig`s as operands: new ones compile nothing.

  `key` is the data of the key that each seed gives.
  """

  temperature: Float32[Array, ' B']
  top_k: Int32[Array, ' B']
  top_p: Float32[Array, ' B']
  min_p: Float32[Array, ' B']
  key: UInt32[Array, 'B 2']

  @classmethod
  def of(cls, configs: list[SamplingConfig]) -> 'Sampling':
    """The stacked requests of a batch."""

    def column(name, dtype):
      return jnp.asarray(np.array([getattr(c, name) for c in configs], dtype))

    keys = jax.vmap(jax.random.key)(column('seed', np.uint32))
    return cls(
      temperature=column('temperature', np.float32),
      top_k=column('top_k', np.int32),
      top_p=column('top_p', np.float32),
      min_p=column('min_p', np.float32),
      key=jax.random.key_data(keys),
    )


def greedy_tokens(
  logits: Float32[Array, '*batch V'],
) -> Int32[Array, '*batch']:
  """The most probable tokens, ties to the lowest id."""
  return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sampled_tokens(
  logits: Float32[Array, 'B N V'],
  depths: Int32[Array, 'B N'],
  first_position: Int32[Array, ' B'],
  sampling: Sampling,
  *,
  max_depth: int,
) -> Int32[Array, 'B N']:
  """The target's sample after every node.

  Args:
    logits: the target's at the nodes.
    depths: 0..max_depth.
    first_position: the position of the token that is sampled at depth 0.
    sampling: the requests.
    max_depth: static.
  """
  noise = position_noise(
    sampling.key, first_position, max_depth + 1, logits.shape[-1]
  )
  temperature = sampling.temperature[:, None, None]
  scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
  noisy = scaled + jnp.take_along_axis(noise, depths[:, :, None], axis=1)
  sampled = jnp.argmax(
    jnp.where(kept_tokens(scaled, sampling), noisy, -jnp.inf), axis=-1
  ).astype(jnp.int32)
  return jnp.where(temperature[:, :, 0] > 0, sampled, greedy_tokens(logits))


def position_noise(
  key: UInt32[Array, 'B 2'],
  first_position: Int32[Array, ' B'],
  count: int,
  vocab_size: int,
) -> Float32[Array, 'B {count} V']:
  """Gumbel noise for `count` positions, the same wherever one is sampled."""

  def at(key_data, position):
    request = jax.random.wrap_key_data(key_data)
    return jax.random.gumbel(
      jax.random.fold_in(request, position), (vocab_size,), jnp.float32
    )

  ahead = jnp.arange(count, dtype=jnp.int32)
  positions = first_position[:, None] + ahead[None, :]
  return jax.vmap(jax.vmap(at, in_axes=(None, 0)))(key, positions)


def kept_tokens(
  scaled: Float32[Array, 'B N V'], sampling: Sampling
) -> Bool[Array, 'B N V']:
  """The tokens that top_k, then top_p, then min_p keep.

  Thresholds are found by bisection over the bits of the logits, which needs no
  sort, and only if some request sets top_k or top_p. A neutral setting keeps
  every token, whatever other requests of the batch set, and does not depend on
  how a sum is rounded.
  """
  top_k, top_p, min_p = (
    x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p)
  )
  some_k, some_p = (top_k > 0) & (top_k < scaled.shape[-1]), top_p < 1

  def truncate(scaled):
    order = _ordered_bits(scaled)
    least = _threshold(order, jnp.ones_like(scaled), top_k.astype(jnp.float32))
    kept = (order >= least) | ~some_k
    probs = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
    # Where rounding keeps the sum below top_p, the threshold is 0.
    return kept & ((order >= _threshold(order, probs, top_p)) | ~some_p)

  def keep_all(scaled):
    return jnp.ones(scaled.shape, jnp.bool_)

  kept = lax.cond((some_k | some_p).any(), truncate, keep_all, scaled)
  # p >= min_p max(p), in logits.
  floor = scaled.max(axis=-1, keepdims=True) + jnp.log(min_p)
  return kept & ((scaled >= floor) | (min_p <= 0))


def _ordered_bits(
  x: Float32[Array, '*batch'],
) -> UInt32[Array, '*batch']:
  """Integers in the order of the floats; -0 and 0 are one value."""
  bits = lax.bitcast_convert_type(x + 0.0, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _threshold(
  order: UInt32[Array, 'B N V'],
  mass: Float32[Array, 'B N V'],
  wanted: Float32[Array, 'B 1 1'],
) -> UInt32[Array, 'B N 1']:
  """The largest t with `sum(mass where order >= t) >= wanted`, else 0.

  No mass is negative.
  """

  def step(i, found):
    trial = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
    held = jnp.where(order >= trial, mass, 0.0).sum(axis=-1, keepdims=True)
    return jnp.where(held >= wanted, trial, found)

  zero = jnp.zeros((*order.shape[:2], 1), jnp.uint32)
  return lax.fori_loop(0, 32, step, zero)
