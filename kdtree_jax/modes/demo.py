"""`--mode=demo`: AR and DDTree give the same tokens, in fewer forwards.

First with the oracle on random weights, which shows the mechanism; then with
the trained pair in the package, which shows the acceptance of a real drafter.
"""

from kdtree_jax import api, generation
from kdtree_jax.api import bundled
from kdtree_jax.decode import GenerateResult
from kdtree_jax.errors import UserError
from kdtree_jax.io.tokenizer import load_tokenizer
from kdtree_jax.modes import demo_pair
from kdtree_jax.modes.options import DemoFlags
from kdtree_jax.modes.status import status
from kdtree_jax.options import GenerateOptions

READING = (
  'How to read this: the oracle drafter knows the answer, which isolates the '
  'engine from a\ndrafter: {oracle:.2f} tokens per forward is the upper bound '
  'at this block size, and a real drafter\naccepts fewer. A verify of many '
  'rows costs more than an AR step on a real model, and on a\ntiny one wall '
  'time is launch overhead, so the seconds above are no speedup.'
)


def run(flags: DemoFlags) -> int:
  """Prints the runs; returns 1 if their tokens differ.

  Without `--bundle`, the trained pair follows.
  """
  path = flags.bundle or bundled('tiny')
  target = api.load_target(path, 'float32')
  prompt = target.golden.get('prompt')
  if prompt is None:
    raise UserError(f'--bundle={path}: the bundle has no golden prompt')
  prompt = prompt.tolist()
  drafter = api.load_drafter(flags.drafter, target, flags.block_size)
  count, budget = flags.max_new_tokens, flags.tree_budget
  _print_model(target, prompt)
  options = GenerateOptions(
    max_new_tokens=count, tree_budget=budget, stop_ids=()
  )
  with status('AR: compiling and decoding'):
    (ar,) = generation.continue_prompts(target, None, [prompt], options)
  _print_run('AR    ', ar)
  with status('DDTree: compiling and decoding'):
    (tree,) = generation.continue_prompts(
      target,
      drafter,
      [prompt],
      options,
      golden=_golden(target, prompt, count + drafter.block_size),
    )
  _print_run('DDTree', tree)
  same = ar.output_ids == tree.output_ids
  print(f'match: {"yes" if same else "NO"}, token for token')
  print(
    f'mean acceptance length: {tree.mean_acceptance_length:.2f} '
    f'(block size {drafter.block_size}, tree budget {budget}, '
    f'drafter {drafter.name})'
  )
  print(
    f'decode seconds: AR {ar.seconds.decode:.4f}, '
    f'DDTree {tree.seconds.decode:.4f}'
  )
  print(READING.format(oracle=min(drafter.block_size, budget + 1)))
  if flags.bundle is None:
    print()
    same &= _trained()
  return 0 if same else 1


def _trained() -> bool:
  """Shows the trained pair; returns whether all its tokens are equal."""
  path = bundled(demo_pair.TARGET)
  target = api.load_target(path, 'float32')
  drafter = api.load_drafter(bundled(demo_pair.DRAFTER), target)
  tokenizer = load_tokenizer(path)
  if tokenizer is None:
    raise UserError(f'{path}: the bundle has no tokenizer')
  return demo_pair.show_pair(target, drafter, tokenizer)


def _golden(
  target: api.Target, prompt: list[int], count: int
) -> list[list[int]] | None:
  """The bundle's golden sequence, if it is long enough for the oracle."""
  tokens = target.golden.get('ar_tokens', ())
  return [[*prompt, *tokens]] if len(tokens) >= count else None


def _print_model(target: api.Target, prompt: list[int]) -> None:
  c = target.config
  experts = f'experts={c.n_routed_experts}'
  if c.n_routed_experts:
    experts += f' top={c.num_experts_per_tok}'
  print(
    f'model: hidden={c.hidden_size} layers={c.num_hidden_layers} '
    f'heads={c.num_attention_heads} kv_lora={c.kv_lora_rank} {experts} '
    f'vocab={c.vocab_size} ({target.name}, float32)'
  )
  print(f'prompt({len(prompt)}): {_ids(prompt)}')


def _print_run(name: str, result: GenerateResult) -> None:
  forwards = result.target_forwards
  plural = '' if forwards == 1 else 's'
  print(
    f'{name} ({forwards} target forward{plural}): {_ids(result.output_ids)}'
  )


def _ids(tokens: list[int]) -> str:
  return ' '.join(str(token) for token in tokens)
