"""Under which licence a folder of sources is, from what it says itself."""

import email.parser
import pathlib
import re

# SPDX ids that allow redistribution of what is derived, with attribution.
PERMISSIVE = (
  '0BSD',
  'Apache-2.0',
  'BSD-2-Clause',
  'BSD-3-Clause',
  'CC0-1.0',
  'CNRI-Python',
  'HPND',
  'ISC',
  'LLVM-exception',
  'MIT',
  'MIT-0',
  'MIT-CMU',
  'PSF-2.0',
  'Python-2.0',
  'Unlicense',
  'ZPL-2.1',
  'Zlib',
)
_CLASSIFIERS = {
  'Apache Software License': 'Apache-2.0',
  'BSD License': 'BSD-3-Clause',
  'Historical Permission Notice and Disclaimer (HPND)': 'HPND',
  'ISC License (ISCL)': 'ISC',
  'MIT License': 'MIT',
  'MIT No Attribution License (MIT-0)': 'MIT-0',
  'Python Software Foundation License': 'PSF-2.0',
  'The Unlicense (Unlicense)': 'Unlicense',
  'Zope Public License': 'ZPL-2.1',
  'zlib/libpng License': 'Zlib',
}
# What people write into the free field `License`, in lower case.
_NAMES = {
  'apache 2': 'Apache-2.0',
  'apache 2.0': 'Apache-2.0',
  'apache license 2.0': 'Apache-2.0',
  'apache license version 2.0': 'Apache-2.0',
  'apache license, version 2.0': 'Apache-2.0',
  'apache software license': 'Apache-2.0',
  'apache software license 2.0': 'Apache-2.0',
  'bsd': 'BSD-3-Clause',
  'bsd license': 'BSD-3-Clause',
  'bsd 3-clause': 'BSD-3-Clause',
  'bsd 3-clause license': 'BSD-3-Clause',
  '3-clause bsd license': 'BSD-3-Clause',
  'bsd-3': 'BSD-3-Clause',
  'bsd 2-clause': 'BSD-2-Clause',
  'isc license': 'ISC',
  'mit license': 'MIT',
  'the mit license': 'MIT',
  'psf': 'PSF-2.0',
  'psfl': 'PSF-2.0',
  'zpl 2.1': 'ZPL-2.1',
}
# Of the texts themselves, where a folder has nothing but one.
_TEXTS = (
  ('PYTHON SOFTWARE FOUNDATION LICENSE', 'PSF-2.0'),
  ('Apache License Version 2.0', 'Apache-2.0'),
  ('Permission is hereby granted, free of charge', 'MIT'),
  ('Neither the name of', 'BSD-3-Clause'),
)
_LICENCE_FILES = ('LICENSE', 'LICENSE.txt', 'LICENSE.md', 'LICENCE', 'COPYING')


def licence_of_metadata(text: str) -> tuple[str, str | None]:
  """Name and permissive licence of a package.

  Args:
    text: of METADATA or PKG-INFO (core metadata, PEP 566 and 639).

  Returns:
    The package's name, and the SPDX expression, or None if there is none or
    one of the licences that all apply is not in `PERMISSIVE`.
  """
  fields = email.parser.HeaderParser().parsestr(text)
  name = fields.get('Name', 'unknown').strip()
  expression = fields.get('License-Expression')
  if expression is not None:
    return name, _permitted(expression)
  stated = [
    value.rsplit(' :: ', 1)[-1].strip()
    for value in fields.get_all('Classifier', [])
    if value.startswith('License :: ') and value != 'License :: OSI Approved'
  ]
  if stated:
    known = [_CLASSIFIERS.get(value) for value in stated]
    if None in known:
      return name, None
    return name, ' OR '.join(sorted({str(value) for value in known}))
  words = ' '.join(fields.get('License', '').split())
  spelled = _NAMES.get(words.lower(), _licence_of_text(words) or words)
  return name, _permitted(spelled)


def _permitted(expression: str) -> str | None:
  """An SPDX expression if one of its alternatives is permissive throughout."""
  text = ' '.join(expression.split())
  for alternative in re.split(r'\s+OR\s+', text.replace('(', ' ')):
    parts = re.split(r'\s+(?:AND|WITH)\s+', alternative.replace(')', ' '))
    if all(_canonical(part) is not None for part in parts):
      return text
  return None


def _canonical(name: str) -> str | None:
  lower = name.strip().lower()
  return next((spdx for spdx in PERMISSIVE if spdx.lower() == lower), None)


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
