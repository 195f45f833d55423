"""Loads what `--mode=convert` saved in transformers and records its answer.

Needs torch and transformers, which the suite does not; so this is run by hand:

    python run.py --mode=convert --target=x.kdtr --output=folder
    python tests/peers/transformers_logits.py folder [ids] [answer.safetensors]

Prints the largest logit and the greedy token of every position, and writes
`input_ids` and `logits` where a third argument says so. `tests/io/peer_test.py`
compares the engine with a recorded answer.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

DEFAULT_IDS = '5,17,3,29,11,2,31,8,23,41,1,37'


def main(folder: str, ids: str = DEFAULT_IDS, answer: str = '') -> None:
  """See the module."""
  raw = json.loads((pathlib.Path(folder) / 'config.json').read_text())
  (name,) = raw['architectures']
  model = getattr(transformers, name).from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  tokens = torch.tensor([[int(token) for token in ids.split(',')]])
  with torch.no_grad():
    logits = model.eval()(tokens).logits[0].numpy()
  print(f'{name}, transformers {transformers.__version__}')
  print(f'largest logit {np.abs(logits).max():.6g}')
  print('greedy', *logits.argmax(-1))
  if answer:
    save_file(
      {'input_ids': tokens[0].numpy().astype(np.int32), 'logits': logits},
      answer,
    )


if __name__ == '__main__':
  main(*sys.argv[1:])
