"""`--mode=make_bundle`: a bundle with random weights and golden outputs."""

import hashlib

from kdtree_jax import reference
from kdtree_jax.config import ModelConfig
from kdtree_jax.errors import UserError
from kdtree_jax.io.huggingface import num_parameters
from kdtree_jax.io.kdtr import Bundle, write_bundle
from kdtree_jax.io.paths import check_output
from kdtree_jax.modes.options import MakeBundleFlags
from kdtree_jax.modes.status import status
from kdtree_jax.named_configs import load_config

PROMPT_LENGTH = 8
GOLDEN_TOKENS = 128
# NumPy makes weights and decodes in a minute up to this size.
MAX_PARAMETERS = 50_000_000


def run(flags: MakeBundleFlags) -> int:
  """Writes the bundle to `--output`, by default `<variant>.kdtr`."""
  variant, path = flags.variant, flags.output
  if path is None:
    path = f'{variant}.kdtr'
  check_output(path)
  with status(f'generating {variant}'):
    bundle = make_bundle(variant, flags.seed)
    assert bundle.target is not None  # `make_bundle` fills it.
    write_bundle(path, bundle)
  print(
    f'wrote {path}: {variant}, {len(bundle.target)} tensors, '
    f'{len(bundle.golden["ar_tokens"])} golden tokens'
  )
  return 0


def make_bundle(variant: str, seed: int | None = None) -> Bundle:
  """A bundle with weights, prompt and outputs for `configs/<variant>.py`.

  All of it comes from the NumPy reference, so that the outputs can check the
  engine.

  Args:
    variant: name of a config.
    seed: seed of weights and prompt; default: derived from the name.

  Raises:
    UserError: no such variant, or a model that is too large.
  """
  model = load_config(variant)
  if not can_generate(model):
    raise UserError(
      f'variant {variant} has {num_parameters(model):,} parameters; bundles '
      f'are generated in NumPy up to {MAX_PARAMETERS:,}'
    )
  if seed is None:
    digest = hashlib.sha256(variant.encode()).digest()
    seed = int.from_bytes(digest[:4], 'little')
  fields = model.to_dict()
  tensors = reference.random_tensors(fields, seed)
  room = model.max_position_embeddings - PROMPT_LENGTH
  golden = reference.make_golden(
    fields, tensors, PROMPT_LENGTH, min(GOLDEN_TOKENS, room), seed
  )
  return Bundle(
    name=variant,
    config=model,
    target=tensors,
    golden=golden,
    drafter_config=None,
    drafter=None,
    recipe={'generator': 'kdtree_jax.reference', 'seed': seed},
  )


def can_generate(config: ModelConfig) -> bool:
  """Whether NumPy can make a bundle of this size."""
  return num_parameters(config) <= MAX_PARAMETERS
