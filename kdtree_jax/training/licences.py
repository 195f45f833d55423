"""Under which licence a folder of sources is, from what it says itself."""

import pathlib
import re

from packaging.licenses import (
  InvalidLicenseExpression,
  canonicalize_license_expression,
)
from packaging.metadata import parse_email

# SPDX ids that allow redistribution of what is derived, with attribution.
PERMISSIVE = frozenset(
  '0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause CC0-1.0 CNRI-Python HPND ISC '
  'LLVM-exception MIT MIT-0 MIT-CMU PSF-2.0 Python-2.0 Unlicense ZPL-2.1 '
  'Zlib'.split()
)
# Names in classifiers and in the free field `License`, in lower case and
# without the words that `_known` drops.
_NAMES = {
  'apache 2': 'Apache-2.0',
  'apache 2.0': 'Apache-2.0',
  'apache software': 'Apache-2.0',
  'apache software 2.0': 'Apache-2.0',
  'bsd': 'BSD-3-Clause',
  'bsd 3-clause': 'BSD-3-Clause',
  '3-clause bsd': 'BSD-3-Clause',
  'bsd-3': 'BSD-3-Clause',
  'bsd 2-clause': 'BSD-2-Clause',
  'historical permission notice and disclaimer (hpnd)': 'HPND',
  'isc': 'ISC',
  'isc (iscl)': 'ISC',
  'mit': 'MIT',
  'mit no attribution (mit-0)': 'MIT-0',
  'psf': 'PSF-2.0',
  'psfl': 'PSF-2.0',
  'python software foundation': 'PSF-2.0',
  'unlicense (unlicense)': 'Unlicense',
  'zlib/libpng': 'Zlib',
  'zope public': 'ZPL-2.1',
  'zpl 2.1': 'ZPL-2.1',
}
# Words of licence texts, for a folder that has nothing but one.
_TEXTS = (
  ('PYTHON SOFTWARE FOUNDATION LICENSE', 'PSF-2.0'),
  ('Apache License Version 2.0', 'Apache-2.0'),
  ('Permission is hereby granted, free of charge', 'MIT'),
  ('Neither the name of', 'BSD-3-Clause'),
)
_LICENCE_FILES = ('LICENSE', 'LICENSE.txt', 'LICENSE.md', 'LICENCE', 'COPYING')


def licence_of_metadata(text: str) -> tuple[str, str | None]:
  """The name and the permissive licence of a package.

  Args:
    text: the contents of METADATA or PKG-INFO (core metadata).

  Returns:
    The package's name, and the SPDX expression, or None if there is none or
    one of the licences that all apply is not in `PERMISSIVE`.
  """
  fields, _ = parse_email(text)
  name = fields.get('name', 'unknown')
  expression = fields.get('license_expression')
  if expression is not None:
    return name, _permitted(expression)
  stated = [
    value.rsplit(' :: ', 1)[-1]
    for value in fields.get('classifiers', [])
    if value.startswith('License :: ') and value != 'License :: OSI Approved'
  ]
  if stated:
    known = [_known(value) or '' for value in stated]
    return name, ' OR '.join(sorted(set(known))) if all(known) else None
  free = fields.get('license', '')
  return name, _known(free) or _licence_of_text(free) or _permitted(free)


def _known(name: str) -> str | None:
  """The SPDX id of a licence by one of the names that people give it."""
  words = re.split(r'[\s,]+', name.lower().strip())
  dropped = ('the', 'license', 'version')
  return _NAMES.get(' '.join(word for word in words if word not in dropped))


def _permitted(expression: str) -> str | None:
  """An SPDX expression if one of its alternatives is permissive throughout."""
  try:
    expression = canonicalize_license_expression(expression)
  except InvalidLicenseExpression:
    return None
  # SPDX's operators bind like those of Python; an exception must be known too.
  operators = {'AND': 'and', 'OR': 'or', 'WITH': 'and', '(': '(', ')': ')'}
  words = re.findall(r'[()]|[^\s()]+', expression)
  logic = [operators.get(word, str(word in PERMISSIVE)) for word in words]
  return expression if eval(' '.join(logic)) else None


def licence_of_folder(folder: pathlib.Path) -> str | None:
  """The permissive licence of a source tree by PKG-INFO or licence text."""
  info = folder / 'PKG-INFO'
  if info.is_file():
    _, licence = licence_of_metadata(info.read_text(errors='replace'))
    if licence is not None:
      return licence
  for name in _LICENCE_FILES:
    path = folder / name
    if path.is_file():
      return _licence_of_text(path.read_text(errors='replace'))
  return None


def _licence_of_text(text: str) -> str | None:
  """What a licence's own words give away; None if it may be copyleft."""
  text = ' '.join(text.split())
  if 'GENERAL PUBLIC LICENSE' in text and 'PYTHON SOFTWARE' not in text:
    return None
  return next((spdx for mark, spdx in _TEXTS if mark in text), None)
