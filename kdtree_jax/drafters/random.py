"""A stub of random logits, accepted about as often as chance."""

from jaxtyping import Array, Float32, Int32

from kdtree_jax.drafters.base import StubDrafter
from kdtree_jax.registry import register


@register('drafter', 'random')
class RandomDrafter(StubDrafter):
  """Normal logits keyed by position: wide trees, the same in every run."""

  def propose(
    self,
    tokens: Int32[Array, 'B T'],
    length: Int32[Array, ' B'],
    golden: Int32[Array, 'B D'],
  ) -> Float32[Array, 'B D V']:
    return self.noise(length)
