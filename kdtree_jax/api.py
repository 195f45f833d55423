"""The library as a user calls it: load, look, generate."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax import registry
from kdtree_jax.config import DecodeConfig, ModelConfig
from kdtree_jax.decode import Engine, GenerateResult, RoundRecord, init_state
from kdtree_jax.decode import generate as drivers
from kdtree_jax.decode.programs import PROGRAMS
from kdtree_jax.decode.state import DecodeState, check_prompt, token_slots
from kdtree_jax.drafters import Drafter
from kdtree_jax.drafters.dflash import DFlashDrafter
from kdtree_jax.errors import UserError
from kdtree_jax.io import huggingface, kdtr
from kdtree_jax.io.tensors import MappingSource, SafetensorsSource

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}
DEFAULT_BLOCK_SIZE = 8
DEFAULT_TREE_BUDGET = 64
MIN_CAPACITY = 64
PREFILL_CHUNK = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
  """A target in memory.

  Attributes:
    name: for messages and tables.
    config: the architecture.
    params: the nested dict of linen.
    dtype: that the model computes in.
    stop_ids: the checkpoint's own.
    golden: of a bundle: `prompt`, `ar_tokens`, per-layer checks; else empty.
  """

  name: str
  config: ModelConfig
  params: Any
  dtype: Any
  stop_ids: tuple[int, ...]
  golden: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
  """A drafter bound to parameters that fit one target."""

  name: str
  drafter: Drafter
  params: Any

  @property
  def block_size(self) -> int:
    return self.drafter.block_size


def load_target(path: str | os.PathLike, dtype: str = 'float32') -> Target:
  """Loads a KDTR bundle or a checkpoint folder in the Hugging Face layout.

  Args:
    path: a `.kdtr` file, or a folder with `config.json` and safetensors.
    dtype: `float32` or `bfloat16`: of weights, caches and arithmetic.

  Raises:
    UserError: what is wrong with the path or the checkpoint.
  """
  path = pathlib.Path(path)
  jax_dtype = _dtype(dtype)
  if _is_bundle(path):
    bundle = kdtr.read_bundle(path)
    config, golden = bundle.config, bundle.golden
    params = huggingface.target_params(
      config,
      MappingSource(bundle.target),
      jax_dtype,
      source_name=str(path),
    )
    return Target(
      bundle.name, config, params, jax_dtype, config.eos_token_id, golden
    )
  raw = huggingface.read_json(_folder(path, 'target') / 'config.json')
  config = huggingface.model_config(raw)
  params = huggingface.target_params(
    config, SafetensorsSource(path), jax_dtype, source_name=str(path)
  )
  stop_ids = huggingface.stop_ids(path, raw)
  return Target(path.name, config, params, jax_dtype, stop_ids, {})


def load_drafter(
  path_or_name: str | os.PathLike,
  target: Target,
  block_size: int | None = None,
) -> LoadedDrafter:
  """Loads a DFlash drafter, or makes a stub by its name.

  Args:
    path_or_name: a DFlash folder, a `.kdtr` file with a drafter, or a name
      from `registry.names('drafter')`.
    target: that it will draft for.
    block_size: 1 + positions drafted a round. Default: the trained block, 8
      for a stub. A smaller one uses the first positions of the trained block.

  Raises:
    UserError: no such drafter, or one that does not fit the target.
  """
  name = str(path_or_name)
  if name in registry.names('drafter'):
    size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
    _check_block_size(size, None)
    drafter = registry.get('drafter', name).create(target.config, size)
    params = drafter.init_params(jax.random.key(0), target.dtype)
    return LoadedDrafter(name, drafter, params)
  path = pathlib.Path(path_or_name)
  if _is_bundle(path):
    bundle = kdtr.read_bundle(path)
    if bundle.drafter is None:
      raise UserError(f'{path}: the bundle holds no drafter')
    config, source = bundle.drafter_config, MappingSource(bundle.drafter)
  else:
    if not path.exists():
      known = ', '.join(registry.names('drafter'))
      raise UserError(f'drafter {name!r} is neither a path nor one of {known}')
    folder = _folder(path, 'drafter')
    config = huggingface.drafter_config(
      huggingface.read_json(folder / 'config.json')
    )
    source = SafetensorsSource(folder)
  _check_fit(config, target.config, name)
  size = config.block_size if block_size is None else block_size
  _check_block_size(size, config.block_size)
  params = huggingface.drafter_params(
    config, source, target.dtype, source_name=name
  )
  return LoadedDrafter(name, DFlashDrafter(config, size), params)


def forward_logits(
  target: Target,
  ids: Sequence[int],
  *,
  prefill_chunk: int | None = None,
  kernels: str = 'auto',
) -> np.ndarray:
  """`[T, V]` float32 logits of a full causal forward over T ids.

  Goes through the cache and the attention of decoding, chunk by chunk.

  Args:
    target: the model.
    ids: T token ids.
    prefill_chunk: tokens a step; default: `PREFILL_CHUNK`.
    kernels: `auto` or one implementation for all.
  """
  ids = [int(i) for i in ids]
  limit = target.config.max_position_embeddings
  check_prompt(ids, target.config.vocab_size, limit)
  decode = DecodeConfig(
    tree_budget=0,
    draft_depth=0,
    capacity=_bucket(len(ids), limit),
    prefill_chunk=PREFILL_CHUNK if prefill_chunk is None else prefill_chunk,
    kernels=kernels,
  )
  engine = Engine(target.config, None, decode)
  state = init_state(engine, [ids], [1], (), target.dtype)
  params = {'target': target.params, 'drafter': {}}
  program, _ = PROGRAMS.get(drivers.forward_logits, engine, params, state)
  return np.asarray(program(params, state)[: len(ids)])


def generate(
  target: Target,
  drafter: LoadedDrafter | None,
  prompt_ids: Sequence[int],
  *,
  max_new_tokens: int = 128,
  tree_budget: int = DEFAULT_TREE_BUDGET,
  tree_policy: str = 'best_first',
  stop_ids: Sequence[int] | None = None,
  capacity: int | None = None,
  prefill_chunk: int = PREFILL_CHUNK,
  kernels: str = 'auto',
  golden_ids: Sequence[int] | None = None,
  record_rounds: bool = False,
) -> GenerateResult:
  """Greedy continuation of one prompt.

  Args:
    target: the model.
    drafter: None decodes autoregressively, and the tree flags are not used.
    prompt_ids: at least one token id.
    max_new_tokens: at least 1; the output has exactly so many tokens unless a
      stop token or the capacity ends it.
    tree_budget: draft nodes a round, the root not counted.
    tree_policy: `best_first` (DDTree) or `chain` (DFlash); see the registry.
    stop_ids: tokens that end the output; default: the checkpoint's.
    capacity: most tokens of prompt and output; default: the next power of two
      that holds both. One program serves every prompt within a capacity.
    prefill_chunk: prompt tokens a prefill step.
    kernels: `auto` or one implementation for all.
    golden_ids: for drafters that need it, prompt and greedy continuation;
      default: found by decoding autoregressively first.
    record_rounds: keep every round's tree; decodes round by round.

  Raises:
    UserError: bad input, before anything is compiled.
  """
  prompt_ids = [int(i) for i in prompt_ids]
  engine = make_engine(
    target,
    drafter,
    len(prompt_ids) + max_new_tokens,
    tree_budget=tree_budget,
    tree_policy=tree_policy,
    capacity=capacity,
    prefill_chunk=prefill_chunk,
    kernels=kernels,
  )
  stop_ids = target.stop_ids if stop_ids is None else stop_ids
  state = init_state(
    engine, [prompt_ids], [max_new_tokens], stop_ids, target.dtype
  )
  params = {'target': target.params, 'drafter': {}}
  if drafter is not None:
    params['drafter'] = drafter.params
    if drafter.drafter.needs_golden:
      if golden_ids is None:
        golden_ids = golden_continuation(
          target,
          prompt_ids,
          max_new_tokens + drafter.block_size,
          capacity=engine.decode.capacity,
          kernels=kernels,
        )
      params['drafter'] = golden_params(engine, [golden_ids])
  if record_rounds:
    return _recorded(engine, params, state, max_new_tokens)
  state, seconds = drivers.generate(engine, params, state)
  return drivers.result_of(state, 0, max_new_tokens, seconds)


def make_engine(
  target: Target,
  drafter: LoadedDrafter | None,
  num_tokens: int,
  *,
  tree_budget: int,
  tree_policy: str,
  capacity: int | None,
  prefill_chunk: int,
  kernels: str,
) -> Engine:
  """The program's description for sequences of up to `num_tokens` tokens."""
  registry.get('tree_policy', tree_policy)
  if capacity is None:
    capacity = _bucket(num_tokens, target.config.max_position_embeddings)
  depth = drafter.block_size - 1 if drafter else 0
  decode = DecodeConfig(
    tree_budget=tree_budget if drafter else 0,
    draft_depth=depth,
    tree_policy=tree_policy if drafter else 'best_first',
    capacity=capacity,
    prefill_chunk=min(prefill_chunk, capacity),
    kernels=kernels,
  )
  return Engine(target.config, drafter.drafter if drafter else None, decode)


def golden_continuation(
  target: Target,
  prompt_ids: Sequence[int],
  max_new_tokens: int,
  *,
  capacity: int | None = None,
  kernels: str = 'auto',
) -> list[int]:
  """Prompt and greedy continuation by autoregressive decoding, no stops."""
  result = generate(
    target,
    None,
    prompt_ids,
    max_new_tokens=max_new_tokens,
    stop_ids=(),
    capacity=capacity,
    kernels=kernels,
  )
  return [*prompt_ids, *result.output_ids]


def golden_params(
  engine: Engine, sequences: Sequence[Sequence[int]]
) -> dict[str, jax.Array]:
  """Parameters of a drafter that needs golden sequences, one for each row."""
  golden = np.full((len(sequences), token_slots(engine)), -1, np.int32)
  for row, ids in zip(golden, sequences, strict=True):
    count = min(len(ids), len(row))
    row[:count] = ids[:count]
  return {'golden': jnp.asarray(golden)}


def _recorded(
  engine: Engine, params: Any, state: DecodeState, max_new_tokens: int
) -> GenerateResult:
  """Drives round by round and keeps the trees; times include the host."""
  rounds: list[RoundRecord] = []
  compiled = drivers.stream_programs(engine, params, state).compile_seconds
  begin = time.perf_counter()
  for step in drivers.stream(engine, params, state):
    last, trace = step
    if trace is None:
      middle = time.perf_counter()
    else:
      rounds.append(RoundRecord.of(trace, 0))
  end = time.perf_counter()
  seconds = drivers.Seconds(middle - begin, end - middle, compiled)
  return drivers.result_of(last, 0, max_new_tokens, seconds, rounds)


def _bucket(num_tokens: int, limit: int) -> int:
  """The next power of two, within what the positions allow."""
  power = 1 << max(num_tokens - 1, MIN_CAPACITY - 1).bit_length()
  return min(power, limit)


def _dtype(name: str) -> Any:
  if name not in DTYPES:
    raise UserError(f'dtype={name!r} is none of {", ".join(DTYPES)}')
  return DTYPES[name]


def _is_bundle(path: pathlib.Path) -> bool:
  return path.suffix == '.kdtr' or path.is_file()


def _folder(path: pathlib.Path, kind: str) -> pathlib.Path:
  if not path.exists():
    raise UserError(f'{kind} {path}: no such file or folder')
  return path


def _check_block_size(size: int, trained: int | None) -> None:
  DecodeConfig(tree_budget=0, draft_depth=size - 1)
  if trained is not None and size > trained:
    raise UserError(
      f'block_size={size} exceeds the {trained} that the drafter was trained '
      'for'
    )


def _check_fit(config, target: ModelConfig, name: str) -> None:
  """Refuses a drafter whose sizes are not the target's, naming both."""
  pairs = (
    ('hidden_size', config.hidden_size, target.hidden_size),
    ('vocab_size', config.vocab_size, target.vocab_size),
    ('num_target_layers', config.num_target_layers, target.num_hidden_layers),
  )
  for field, own, wanted in pairs:
    if own != wanted:
      raise UserError(
        f'drafter {name}: {field}={own} does not fit the target, which has '
        f'{wanted}'
      )
