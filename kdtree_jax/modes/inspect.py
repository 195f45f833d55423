"""`--mode=inspect`: the contents of a bundle or a checkpoint."""

import collections
import dataclasses
import io
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterable
from typing import Any

import jax
import rich.console
import rich.table

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.io.checkpoint_config import (
  model_config,
  quantization,
)
from kdtree_jax.io.checkpoint_extras import read_extras
from kdtree_jax.io.checkpoint_tensors import (
  Match,
  match_drafter,
  match_target,
  num_parameters,
)
from kdtree_jax.io.drafter_config import drafter_config, is_drafter
from kdtree_jax.io.files import file_kind, show
from kdtree_jax.io.kdtr import Bundle, read_bundle
from kdtree_jax.io.quantization import Quantization
from kdtree_jax.io.stop_ids import StopIds, bundle_stop_ids, read_stop_ids
from kdtree_jax.io.tensors import (
  FLOAT_DTYPES,
  ITEM_BYTES,
  CheckpointError,
  MappingSource,
  SafetensorsSource,
  TensorSource,
  read_json,
)
from kdtree_jax.modes.options import InspectFlags

_EXPERT = re.compile(r'(.*\.experts\.)([0-9]+)(\..*)')


@dataclasses.dataclass(frozen=True)
class _Row:
  """A row of the table: a tensor, or that of several experts."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  count: int = 1

  @property
  def values(self) -> int:
    return self.count * math.prod(self.shape)

  @property
  def bytes(self) -> int:
    return self.values * ITEM_BYTES.get(self.dtype, 0)


def run(flags: InspectFlags) -> int:
  """Prints a description of `--target`."""
  print(describe(flags.target))
  return 0


def describe(path: os.PathLike[str] | str) -> str:
  """Describes a `.kdtr` bundle or the folder of a checkpoint.

  Reads only configs and headers of a checkpoint, but all of a bundle, to check
  its digests.

  Args:
    path: a `.kdtr` file, or a folder with a target or a DFlash drafter.

  Returns:
    Lines of `key: value`, then a table of tensors; no trailing newline.

  Raises:
    UserError: the path is neither, or cannot be loaded.
  """
  path = pathlib.Path(path)
  kind = file_kind(path)
  if kind == 'folder':
    return '\n'.join(_describe_folder(path))
  if kind is not None and path.suffix != '.kdtr':
    raise CheckpointError(
      f'{path}: neither a .kdtr bundle nor the folder of a checkpoint'
    )
  return '\n'.join(_describe_bundle(path, read_bundle(path)))


def _describe_folder(path: pathlib.Path) -> list[str]:
  raw = read_json(path / 'config.json')
  describe_kind = _describe_drafter if is_drafter(raw) else _describe_target
  return describe_kind(path, raw)


def _describe_target(path: pathlib.Path, raw: dict[str, Any]) -> list[str]:
  where = str(path / 'config.json')
  config = model_config(raw, where)
  source = SafetensorsSource(path)
  found = quantization(raw, where)
  match = match_target(
    config,
    source,
    source_name=str(path),
    quantization=found,
    extras=read_extras(raw, where),
  )
  rows = _rows(source, match.names.values())
  return [
    f'{path}: checkpoint, model_type {raw["model_type"]}',
    *_target_lines(config),
    *_quantization_lines(found),
    *_size_lines(rows, config),
    _fit_line(rows),
    *_stop_lines(read_stop_ids(path, raw)),
    *_skipped_lines(match, source),
    *_table(rows),
  ]


def _describe_drafter(path: pathlib.Path, raw: dict[str, Any]) -> list[str]:
  where = str(path / 'config.json')
  config = drafter_config(raw, where)
  source = SafetensorsSource(path)
  config = _without_last(config, source, raw, where)
  match = match_drafter(config, source, source_name=str(path))
  rows = _rows(source, match.names.values())
  return [
    f'{path}: DFlash drafter',
    *_drafter_lines(config),
    *_size_lines(rows, None),
    *_skipped_lines(match, source),
    *_table(rows),
  ]


def _without_last(
  config: DrafterConfig, source: TensorSource, raw: dict[str, Any], where: str
) -> DrafterConfig:
  """The config without its last layer id, if `fc` is too narrow for it.

  In speculators' layout that id may be the end of the target instead of a tap.
  Without the target, only the width of `fc`, one hidden size per tap, shows it.
  """
  widths = [
    source.shape(name)[-1]
    for name in ('fc.weight', 'model.fc.weight')
    if name in source.names() and source.shape(name)
  ]
  taps = len(config.target_layer_ids)
  if not config.own_embedding or widths != [(taps - 1) * config.hidden_size]:
    return config
  return drafter_config(raw, where, config.target_layer_ids[-1] + 1)


def _quantization_lines(found: Quantization | None) -> list[str]:
  if found is None:
    return []
  rows, columns = found.block
  return [f'quantisation: {found.format}, a scale for {rows} x {columns}']


def _skipped_lines(match: Match, source: TensorSource) -> list[str]:
  reasons = collections.defaultdict(list)
  for name, reason in match.skipped.items():
    reasons[reason].append(name)
  lines = []
  for reason, names in sorted(reasons.items()):
    size = sum(row.bytes for row in _rows(source, names))
    lines.append(
      f'skipped: {len(names)} ({reason}), {size:,} bytes, first '
      f'{show(names[0])}'
    )
  return lines or ['skipped: none']


def _describe_bundle(path: pathlib.Path, bundle: Bundle) -> list[str]:
  lines = [f'{path}: KDTR bundle {show(bundle.name)}']
  tables = []
  if bundle.config is None or bundle.target is None:
    lines.append('target: none')
  else:
    target = MappingSource(bundle.target)
    rows = _rows(target, target.names())
    lines += _target_lines(bundle.config)
    lines += _size_lines(rows, bundle.config)
    lines += _stop_lines(bundle_stop_ids(bundle, str(path)))
    lines.append(_tokenizer_line(bundle))
    tables += _table(rows)
  if bundle.drafter_config is None or bundle.drafter is None:
    lines.append('drafter: none')
  else:
    drafter = MappingSource(bundle.drafter)
    drafter_rows = _rows(drafter, drafter.names())
    section = _drafter_lines(bundle.drafter_config)
    section += _size_lines(drafter_rows, None)
    lines += [f'drafter {line}' for line in section]
    tables += _table(drafter_rows, 'drafter ')
  lines.append(_golden_line(bundle))
  lines += [f'recipe {k}: {show(v)}' for k, v in sorted(bundle.recipe.items())]
  return lines + tables


def _target_lines(c: ModelConfig) -> list[str]:
  sparse = sum(c.is_moe_layer(i) for i in range(c.num_hidden_layers))
  lines = [
    f'architecture: {c.num_hidden_layers} layers '
    f'({c.num_hidden_layers - sparse} dense, {sparse} MoE), '
    f'hidden {c.hidden_size}, {c.num_attention_heads} heads '
    f'(nope {c.qk_nope_head_dim}, rope {c.qk_rope_head_dim}, '
    f'v {c.v_head_dim}), q_lora {c.q_lora_rank or "none"}, '
    f'kv_lora {c.kv_lora_rank}, vocabulary {c.vocab_size}'
  ]
  if sparse:
    lines.append(
      f'experts: {c.num_experts_per_tok} of {c.n_routed_experts} '
      f'({c.topk_group} of {c.n_group} groups), {c.n_shared_experts} shared, '
      f'width {c.moe_intermediate_size}, {c.scoring_func} {c.topk_method}, '
      f'scale {c.routed_scaling_factor:g}'
    )
  return [*lines, _rope_line(c)]


def _drafter_lines(c: DrafterConfig) -> list[str]:
  taps = ', '.join(map(str, c.target_layer_ids))
  return [
    f'architecture: {c.num_hidden_layers} layers, hidden {c.hidden_size}, '
    f'{c.num_attention_heads} heads on {c.num_key_value_heads} of '
    f'{c.head_dim}, width {c.intermediate_size}, vocabulary {c.vocab_size}',
    f'block: {c.block_size} tokens, mask id {c.mask_token_id}, taps after '
    f'layers {taps} of {c.num_target_layers}',
    _rope_line(c),
  ]


def _rope_line(c: ModelConfig | DrafterConfig) -> str:
  line = f'rope: theta {c.rope_theta:g}'
  if c.rope_scaling is not None:
    context = c.rope_scaling.original_max_position_embeddings
    line += f', YaRN factor {c.rope_scaling.factor:g} over {context}'
  return f'{line}, at most {c.max_position_embeddings} positions'


def _stop_lines(stops: StopIds) -> list[str]:
  """All stop ids, then those of each source."""
  lines = [f'stop ids: {", ".join(map(str, stops.ids)) or "none"}']
  for source, ids in stops.sources.items():
    lines.append(f'  by {source}: {", ".join(map(str, ids))}')
  if stops.problem is not None:
    lines.append(f'  the tokenizer was not read: {stops.problem}')
  return lines


def _tokenizer_line(bundle: Bundle) -> str:
  files = sorted(bundle.tokenizer.items())
  items = [f'{name} {len(data):,} bytes' for name, data in files]
  return f'tokenizer: {", ".join(items) or "none"}'


def _golden_line(bundle: Bundle) -> str:
  if not bundle.golden:
    return 'golden: none'
  items = [
    f'{show(name)[1:-1]} {list(value.shape)}'
    for name, value in sorted(bundle.golden.items())
  ]
  return f'golden: {", ".join(items)}'


def _size_lines(rows: list[_Row], config: ModelConfig | None) -> list[str]:
  """Counts of parameters and bytes; `config` is None for a drafter."""
  sizes, kinds = collections.Counter(), collections.Counter()
  for row in rows:
    sizes[row.dtype] += row.bytes
    kinds[_kind(row.name)] += row.bytes
  lines = [f'bytes: {_amounts(sizes)}']
  if config is None:
    # Integer maps between two vocabularies are not parameters.
    total = sum(row.values for row in rows if row.dtype in FLOAT_DTYPES)
    return [f'parameters: {total:,}', *lines]
  total = num_parameters(config)
  line = f'parameters: {total:,}'
  if config.n_routed_experts:
    idle = config.n_routed_experts - config.num_experts_per_tok
    layers = sum(map(config.is_moe_layer, range(config.num_hidden_layers)))
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    line += f' ({total - layers * idle * expert:,} active per token)'
  return [line, *lines, f'bytes by kind: {_amounts(kinds)}']


def _amounts(counter: collections.Counter[str]) -> str:
  return ', '.join(f'{key} {size:,}' for key, size in sorted(counter.items()))


def _kind(name: str) -> str:
  """The part of the target that a tensor belongs to."""
  for part, kind in (
    ('norm.', 'norms'),
    ('.self_attn.', 'attention'),
    ('.mlp.experts.', 'experts'),
    ('.mlp.shared_experts.', 'shared experts'),
    ('.mlp.gate.', 'router'),
    ('.mlp.', 'dense'),
  ):
    if part in name:
      return kind
  return 'embedding and head'


def _fit_line(rows: list[_Row]) -> str:
  """A line that compares the stored weights with the device's memory."""
  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  memory = stats.get('bytes_limit')
  if memory is None:
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  need = sum(row.bytes for row in rows)
  verdict = 'fit' if need < memory else 'DO NOT FIT'
  return (
    f'memory: weights of {need / 2**30:,.2f} GiB as stored {verdict} the '
    f'{memory / 2**30:,.1f} GiB of {device.device_kind}; the cache comes on top'
  )


def _rows(source: TensorSource, names: Iterable[str]) -> list[_Row]:
  """Rows in the order of the model, with one row for a layer's experts."""
  groups = collections.defaultdict(list)
  for name in sorted(names, key=_natural):
    dtype, shape = source.dtype(name), source.shape(name)
    expert = _EXPERT.fullmatch(name)
    key = (expert[1], expert[3]) if expert else (name, None)
    groups[key, dtype, shape].append(int(expert[2]) if expert else 0)
  rows = []
  for ((prefix, suffix), dtype, shape), experts in groups.items():
    if suffix is None:
      rows.append(_Row(prefix, dtype, shape))
    else:
      name = f'{prefix}{{{_span(experts)}}}{suffix}'
      rows.append(_Row(name, dtype, shape, len(experts)))
  return rows


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
  """A sort key that puts layer 10 after layer 9."""
  return tuple(
    (0, int(part), '') if part.isdecimal() else (1, 0, part)
    for part in name.split('.')
  )


def _span(numbers: list[int]) -> str:
  """Numbers as a range such as `0..15`, or as a list with gaps."""
  if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
    return f'{numbers[0]}..{numbers[-1]}'
  return ','.join(map(str, numbers))


def _table(rows: list[_Row], prefix: str = '') -> list[str]:
  """A table as wide as the terminal, or 80 columns; wraps long names."""
  table = rich.table.Table(box=None, pad_edge=False, padding=(0, 1))
  table.add_column(f'{prefix}tensor', overflow='fold')
  for title in ('dtype', 'shape'):
    table.add_column(title, no_wrap=True)
  table.add_column('bytes', justify='right', no_wrap=True)
  for row in rows:
    table.add_row(row.name, row.dtype, _shape_text(row), f'{row.bytes:,}')
  width = shutil.get_terminal_size().columns
  text = io.StringIO()
  console = rich.console.Console(file=text, width=width, markup=False)
  console.print(table)
  return ['', *(line.rstrip() for line in text.getvalue().splitlines())]


def _shape_text(row: _Row) -> str:
  text = str(list(row.shape))
  return text if row.count == 1 else f'{row.count} x {text}'
