"""`quantization_config` of a checkpoint, and the tensors that it implies."""

import dataclasses
from collections.abc import Mapping

from kdtree_jax.io.fields import Fields, is_inert
from kdtree_jax.io.files import show
from kdtree_jax.io.tensors import CheckpointError

Shapes = dict[str, tuple[int, ...]]

SUPPORTED = 'compressed-tensors INT4 pack-quantized, FP8 e4m3 in blocks'

# Tensors that a quantised checkpoint has instead of `weight`.
PACKED, SCALE, SHAPE = 'weight_packed', 'weight_scale', 'weight_shape'
SCALE_INV = 'weight_scale_inv'
FP8_DTYPE = 'F8_E4M3'

# Usual names of methods and formats that are refused.
_METHOD_NAMES = {
  'awq': 'AWQ',
  'gptq': 'GPTQ',
  'mxfp4': 'MXFP4',
  'modelopt': 'ModelOpt',
  'modelopt_fp4': 'NVFP4',
  'bitsandbytes': 'bitsandbytes',
}
_FORMAT_NAMES = {
  'nvfp4-pack-quantized': 'NVFP4',
  'mxfp4-pack-quantized': 'MXFP4',
  'float-quantized': 'compressed-tensors FP8',
  'int-quantized': 'compressed-tensors INT8',
}
# Which weights are quantised is read from the tensors. These keys repeat it, or
# describe how the scales were found.
_IGNORED = {
  'global_compression_ratio',
  'ignore',
  'ignored_layers',
  'modules_to_not_convert',
  'quantization_status',
  'scale_dtype',
  'version',
}
_IGNORED_IN_WEIGHTS = {'observer', 'observer_kwargs', 'scale_dtype', 'zp_dtype'}


@dataclasses.dataclass(frozen=True)
class Quantization:
  """How the quantised weights of a checkpoint are stored.

  Attributes:
    format: `int4` or `fp8`, as in `pallas_kernels.quantized`.
    block: rows and columns that share a scale.
  """

  format: str
  block: tuple[int, int]

  def part_shapes(self, shape: tuple[int, ...]) -> Shapes:
    """Shapes of the tensors of a weight of this shape, without `SHAPE`."""
    rows, columns = shape
    scales = (-(-rows // self.block[0]), -(-columns // self.block[1]))
    if self.format == 'int4':
      return {PACKED: (rows, -(-columns // 8)), SCALE: scales}
    return {'weight': shape, SCALE_INV: scales}


def read_quantization(fields: Fields, where: str) -> Quantization | None:
  """Reads `quantization_config`; None if it is absent or empty.

  Raises:
    CheckpointError: a method or a variant that this engine does not have.
  """
  raw = fields.get('quantization_config')
  if raw is None or is_inert(raw):
    return None
  if not isinstance(raw, Mapping):
    raise fields.error('quantization_config', f'is {show(raw)}, no object')
  inner = Fields(raw, f'{where}: quantization_config')
  method = inner.get('quant_method')
  if method == 'fp8':
    return _read_fp8(inner)
  if method == 'compressed-tensors':
    return _read_compressed(inner, f'{where}: quantization_config')
  raise _refused(inner, 'quant_method', _name_of(raw, method))


def _name_of(raw: Mapping[str, object], method: object) -> str:
  """The usual name of a method that is refused."""
  name = show(method, 40)
  if isinstance(method, str):
    name = _METHOD_NAMES.get(method, name)
  algorithm = raw.get('quant_algo')
  return name if algorithm is None else f'{name} {show(algorithm, 40)}'


def _refused(fields: Fields, key: str, name: str) -> CheckpointError:
  return fields.error(key, f'is {name}, unsupported; supported: {SUPPORTED}')


def _read_fp8(fields: Fields) -> Quantization:
  if fields.string('fmt', 'e4m3') != 'e4m3':
    raise _refused(fields, 'fmt', show(fields.get('fmt')))
  # Activations stay unquantised here, which dynamic quantisation approximates.
  fields.fixed('activation_scheme', 'dynamic')
  # The scales are powers of two, but are stored as float32.
  fields.fixed('scale_fmt', 'ue8m0')
  block = fields.tuple_of(int, 'weight_block_size')
  if len(block) != 2 or min(block) < 1:
    raise fields.error('weight_block_size', f'is {show(block)}, no block')
  fields.finish(_IGNORED)
  return Quantization('fp8', block)


def _read_compressed(fields: Fields, where: str) -> Quantization:
  _check_format(fields)
  groups = fields.get('config_groups')
  if not isinstance(groups, Mapping) or len(groups) != 1:
    raise fields.error('config_groups', f'is {show(groups)}, not one group')
  ((name, raw),) = groups.items()
  where = f'{where}: {show(name)[1:-1]}'
  group = Fields(raw, where)
  _check_format(group)
  if group.tuple_of(str, 'targets') != ('Linear',):
    raise group.error('targets', 'is not ["Linear"]')
  weights = Fields(group.get('weights', {}), f'{where}: weights')
  bits, kind = weights.integer('num_bits'), weights.string('type', 'int')
  if (bits, kind) != (4, 'int'):
    raise _refused(weights, 'num_bits', f'{bits} bits of type {show(kind)}')
  if not weights.boolean('symmetric', True):
    raise _refused(weights, 'symmetric', 'asymmetric INT4')
  weights.fixed('strategy', 'group')
  weights.fixed('dynamic', False)
  size = weights.integer('group_size', least=1)
  if size % 8:
    raise weights.error('group_size', f'is {size}, no multiple of 8')
  for key in ('actorder', 'block_structure'):
    if weights.get(key) is not None:
      raise weights.error(key, f'is {show(weights.get(key))}; only null is')
  weights.finish(_IGNORED_IN_WEIGHTS)
  group.finish()
  fields.finish(_IGNORED)
  return Quantization('int4', (1, size))


def _check_format(fields: Fields) -> None:
  form = fields.string('format', 'pack-quantized')
  if form != 'pack-quantized':
    name = _FORMAT_NAMES.get(form, show(form, 40))
    raise _refused(fields, 'format', name)
