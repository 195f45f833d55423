"""DDTree speculative decoding for MLA+MoE language models.

python run.py
    The demo: autoregressive (AR) and DDTree decoding of a tiny model give
    the same tokens, DDTree in an eighth of the target forwards; then a small
    model trained on Python continues code, with its own drafter.

python run.py --mode=generate --target=DIR --drafter=DIR --prompt_ids=1,2,3
    Continues a prompt by AR, DFlash chain and DDTree; one JSON line a run.

python run.py --mode=audit --target=DIR --drafter=DIR --prompt_ids=1,2,3
    Says whether DDTree's output is AR's, and judges a divergence by noise
    measured without the engine; exit status 1 if it is no near-tie.

python run.py --mode=bench --config=moonlight --output=moonlight.jsonl
    Times AR and rounds at several budgets and contexts, beside the bytes
    that they must move, on random weights of a config's shape.

python run.py --mode=make_bundle --variant=tiny
    Generates a random-weight bundle of configs/tiny.py with golden answers.

python run.py --mode=convert --target=DIR --output=FILE.kdtr
    A checkpoint folder in the Hugging Face layout to a bundle, or back, its
    tokenizer included; with --drafter in place of --target a drafter alone.

python run.py --mode=make_corpus --corpus_sources=DIR --corpus_sources=DIR
    --output=DIR
    Python sources and documentation as a tokenizer and token streams.

python run.py --mode=train_target --corpus=DIR --recipe=NAME --output=DIR
    Trains the model of configs/NAME.py, or goes on with it.

python run.py --mode=train_drafter --target=FILE --corpus=DIR --recipe=NAME
    --output=DIR
    Trains a DFlash drafter for a target, or goes on with it.

python run.py --mode=bench_acceptance --target=FILE --drafter=FILE --corpus=DIR
    How much of the drafts is accepted, by budget and temperature, on the
    model's own text and on real text; exit status 1 if an output is not AR's.

python run.py --mode=inspect --target=FILE.kdtr
    Says what is in a bundle or a checkpoint folder.

Compiled programs are kept in ~/.cache/kdtree_jax, by JAX, for the next time.
JAX_ENABLE_COMPILATION_CACHE=false keeps none, JAX_COMPILATION_CACHE_DIR=DIR
keeps them elsewhere.
"""

import dataclasses
import os
import pathlib
import sys

import jax
from absl import app, flags, logging

from kdtree_jax import registry
from kdtree_jax.api import WEIGHTS
from kdtree_jax.decode.engine import KERNELS
from kdtree_jax.errors import UserError
from kdtree_jax.modes import MODES
from kdtree_jax.modes.ending import exit_status, fail
from kdtree_jax.modes.run_config import RunConfig, check_paths
from kdtree_jax.named_configs import config_names

_STUBS = '|'.join(registry.names('drafter'))

flags.DEFINE_enum('mode', 'demo', sorted(MODES), 'What to do.')
flags.DEFINE_string(
  'bundle', None, 'demo: a .kdtr file; default: the tiny one that ships.'
)
flags.DEFINE_string(
  'target',
  None,
  'generate, audit, bench, inspect, convert, bench_acceptance, train_drafter: '
  'a checkpoint folder in the Hugging Face layout or a .kdtr file.',
)
flags.DEFINE_enum(
  'config',
  None,
  config_names(),
  'generate, audit, bench: instead of --target, random weights in the shape of '
  'a file in configs/, made on the device.',
)
flags.DEFINE_integer(
  'layers', None, 'with --config: its first so many layers only.'
)
flags.DEFINE_string(
  'drafter',
  None,
  f'demo, generate, audit, bench, bench_acceptance: a DFlash folder, or '
  f'{_STUBS}. oracle knows the answer, hit_rate now and then, adversarial '
  'avoids it, random and repeat look at nothing, silent proposes nothing, '
  'dflash by name is untrained. Default: oracle in the demo; bench: random '
  'weights, 5 layers.',
)
flags.DEFINE_float(
  'hit_rate',
  None,
  'generate, audit with --drafter=hit_rate, bench with --end_to_end: how often '
  'the drafter is right, 0..1. Default: 0.8.',
)
flags.DEFINE_list(
  'context',
  None,
  'bench: committed tokens before the step. Default: 512,2048,8192,32768.',
)
flags.DEFINE_bool(
  'end_to_end',
  None,
  'bench: also decode --max_new_tokens behind the first context by AR and by '
  'DDTree, with drafters that are told the answer but pay for a real draft.',
)
flags.DEFINE_list(
  'methods',
  None,
  'generate: any of ar,chain,ddtree. Default: all; ar without --drafter.',
)
flags.DEFINE_list(
  'prompt_ids', None, 'generate, audit: token ids of the prompt, as in 1,2,3.'
)
flags.DEFINE_string(
  'prompt',
  None,
  "generate, audit: the prompt as text, for the checkpoint's tokenizer. "
  'Special tokens that it spells out are those tokens, unless with --chat.',
)
flags.DEFINE_string(
  'prompts',
  None,
  'generate, audit, bench_acceptance: a JSONL file of prompts, a line '
  '{"id", "prompt"} or {"id", "turns": [...]}; several turns need --chat; - is '
  'the standard input.',
)
flags.DEFINE_bool(
  'chat',
  None,
  "generate, audit: put the prompt into the checkpoint's chat template; there "
  'special tokens that it spells out are plain text.',
)
flags.DEFINE_bool(
  'parse_special_in_messages',
  None,
  'generate, audit with --chat: special tokens that a message spells out are '
  'those tokens, not text.',
)
flags.DEFINE_integer(
  'max_new_tokens',
  None,
  'demo, generate, audit, bench_acceptance: tokens to produce. Default: 24 in'
  ' the demo, else 128.',
)
flags.DEFINE_integer(
  'block_size',
  None,
  'demo, generate, audit, bench_acceptance: 1 + positions drafted a round. '
  'Default: what the drafter was trained for; 8 for stubs.',
)
flags.DEFINE_list(
  'tree_budget',
  None,
  'demo, generate, audit, bench_acceptance: draft nodes verified a round, the'
  ' root not counted; a list gives one run each. Default: 16 in the demo, '
  'else 64.',
)
flags.DEFINE_enum(
  'tree_policy',
  None,
  registry.names('tree_policy'),
  'generate, audit: how ddtree grows its tree. Default: best_first.',
)
flags.DEFINE_enum(
  'dtype',
  None,
  ['float32', 'bfloat16'],
  'generate, audit, bench_acceptance: of weights, cache and arithmetic. '
  'Default: float32.',
)
flags.DEFINE_enum(
  'weights',
  None,
  WEIGHTS,
  'generate, audit, bench_acceptance: as_stored keeps quantised weights '
  'quantised and expands them where they are used; bfloat16 and float32 '
  'expand them while loading and round all weights to it. convert: likewise, '
  'in the file it writes. Default: as_stored.',
)
flags.DEFINE_float(
  'drafter_attention_factor',
  None,
  "generate, audit, bench_acceptance: replaces the amplitude of the drafter's"
  ' YaRN, about which engines disagree.',
)
flags.DEFINE_list(
  'stop_ids',
  None,
  'generate: token ids that end the output; empty for none. Default: those of '
  'the checkpoint.',
)
flags.DEFINE_bool(
  'ignore_eos',
  None,
  "generate, bench_acceptance: do not stop at the checkpoint's stop ids.",
)
flags.DEFINE_multi_string(
  'stop_strings',
  None,
  'generate: text that ends the output, across token borders too, taken as it '
  'is, blanks and commas included; give the flag once for each. Needs a '
  'tokenizer.',
)
flags.DEFINE_integer(
  'batch_size',
  None,
  'generate, bench_acceptance: prompts in one loop; those of one capacity go '
  'together. Default: 1.',
)
flags.DEFINE_list(
  'temperature',
  None,
  'generate: 0, the default, takes the most probable token; above it tokens '
  'are drawn, and AR and DDTree draw the same. bench_acceptance: a list; '
  'default: 0,0.8,1.',
)
flags.DEFINE_integer(
  'top_k', None, 'generate: draw among the k most probable; 0 for all.'
)
flags.DEFINE_float(
  'top_p',
  None,
  'generate: draw among the most probable that together reach this; 1 for all.',
)
flags.DEFINE_float(
  'min_p', None, "generate: drop tokens below this share of the best one's."
)
flags.DEFINE_bool(
  'chain_seed',
  None,
  'generate, audit: keep the most probable chain in every ddtree tree.',
)
flags.DEFINE_bool(
  'stream',
  None,
  'generate: show tokens on standard error as they are committed; Ctrl-C keeps '
  'what is there.',
)
flags.DEFINE_integer(
  'capacity',
  None,
  'generate: most tokens of prompt and output. Default: the next power of two '
  'that holds both.',
)
flags.DEFINE_integer(
  'prefill_chunk',
  None,
  'generate, bench_acceptance: prompt tokens a prefill step. Default: 64.',
)
flags.DEFINE_enum(
  'kernels',
  None,
  KERNELS,
  'generate, audit, bench_acceptance: auto, the default, takes the Mosaic '
  'kernels on a Hopper GPU and the plain reference elsewhere; a name insists '
  'on one of them.',
)
flags.DEFINE_string(
  'output',
  None,
  'generate: JSONL file, default: standard output. bench_acceptance: JSONL '
  'file, which is continued if it exists; the tables go beside it, as .md. '
  'audit: JSONL file, default: '
  'none. make_bundle: .kdtr file, default: VARIANT.kdtr. convert: the .kdtr '
  'file of a folder, or the new folder of a bundle. make_corpus: the folder. '
  'train_target, train_drafter: the folder of the run; one that exists is '
  'continued.',
)
flags.DEFINE_bool(
  'dump_trees', None, "generate: add every round's tree to the output."
)
flags.DEFINE_enum(
  'variant', None, config_names(), 'make_bundle: a file in configs/.'
)
flags.DEFINE_integer(
  'num_prompts',
  None,
  'bench_acceptance: passages of the test split, each of another document. '
  'Default: 100.',
)
flags.DEFINE_integer(
  'prompt_length',
  None,
  'bench_acceptance: tokens of a passage that are the prompt. Default: 128.',
)
flags.DEFINE_string(
  'plots',
  None,
  'bench_acceptance: a folder for acceptance.png and histogram.png; needs '
  'matplotlib, the extra plots.',
)
flags.DEFINE_integer(
  'seed',
  None,
  'generate, bench_acceptance: of the draws; prompt i has seed + i. Default: '
  '0. make_bundle: of weights and prompt. Default: from the variant name.',
)
flags.DEFINE_multi_string(
  'corpus_sources',
  None,
  'make_corpus: a folder of sources: site-packages, the standard library, '
  'unpacked source distributions; give the flag once for each. Only permissive '
  'licences are taken.',
)
flags.DEFINE_integer(
  'vocab_size', None, 'make_corpus: tokens of the BPE. Default: 4096.'
)
flags.DEFINE_integer(
  'max_tokens', None, 'make_corpus: most training tokens. Default: all.'
)
flags.DEFINE_string(
  'corpus',
  None,
  'train_target, train_drafter, bench_acceptance: a folder that make_corpus '
  'wrote.',
)
flags.DEFINE_enum(
  'recipe',
  None,
  config_names(),
  'train_target, train_drafter: a file in configs/ with one.',
)
flags.DEFINE_integer(
  'train_steps',
  None,
  'train_target, train_drafter: the length of the schedule. Default: that of '
  'the recipe.',
)


# Flags of other engines that would need the history along every path.
_NOT_PER_PATH = ('repetition_penalty', 'presence_penalty', 'frequency_penalty')


def parse_flags(argv: list[str]) -> list[str]:
  """Parses; a wrong flag ends the program with one line."""
  try:
    rest = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    if error.flagname in _NOT_PER_PATH:
      sys.exit(
        fail(
          f'--{error.flagname} is not supported: it depends on the history '
          'along every path of the tree'
        )
      )
    sys.exit(fail(str(error)))
  except flags.Error as error:
    sys.exit(fail(str(error)))
  if len(rest) > 1:
    sys.exit(fail(f'unexpected argument {rest[1]!r}; flags begin with --'))
  return rest


def run_config() -> RunConfig:
  """The parsed flags.

  Raises:
    UserError: a flag was given that the mode does not use.
  """
  values = {}
  mode = flags.FLAGS.mode
  for field in dataclasses.fields(RunConfig):
    flag = flags.FLAGS[field.name]
    if flag.value is None:
      continue
    if field.name not in ('mode', *MODES[mode].FLAGS):
      raise UserError(f'--{field.name} is not used by --mode={mode}')
    value = flag.value
    values[field.name] = tuple(value) if isinstance(value, list) else value
  return RunConfig(**values)


def keep_compiled_programs() -> None:
  """Turns JAX's cache on disk on, unless its own settings name a folder.

  Where no folder can be made, nothing is kept.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  caches = os.environ.get('XDG_CACHE_HOME')
  try:
    folder = pathlib.Path(caches or pathlib.Path.home() / '.cache')
    folder = folder / 'kdtree_jax'
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):  # Read-only, or a user without a home.
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # The default of a second forgets most of what a small model compiles.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)


def main(argv: list[str]) -> None:
  del argv
  if not flags.FLAGS['verbosity'].present:
    # JAX reports at INFO every accelerator that it does not find.
    logging.set_verbosity(logging.WARNING)
  sys.exit(exit_status(_run))


def _run() -> int:
  config = run_config()
  check_paths(config)
  keep_compiled_programs()
  return MODES[config.mode].run(config)


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
