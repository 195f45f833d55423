"""Decoding along given texts, to measure drafts on real text."""

import dataclasses

from kdtree_jax.api import LoadedDrafter, Target, check_pair
from kdtree_jax.checks import integer
from kdtree_jax.decode import GenerateResult, drivers
from kdtree_jax.errors import UserError
from kdtree_jax.generation import (
  Prompts,
  collect,
  golden_params,
  ids_of,
  prepare,
  results,
)
from kdtree_jax.options import GenerateOptions


@dataclasses.dataclass(frozen=True)
class TeacherForcedResult:
  """The result of teacher forcing along one text.

  Attributes:
    along_text: accepts drafts that agree with the text, its output.
    along_target: accepts drafts that agree with the target's own tokens, from
      the same roots.
  """

  along_text: GenerateResult
  along_target: GenerateResult


def teacher_forced(
  target: Target,
  drafter: LoadedDrafter,
  texts: Prompts,
  prompt_length: int,
  options: GenerateOptions,
) -> list[TeacherForcedResult]:
  """Decodes B texts with teacher forcing: rounds commit the given tokens.

  Args:
    target: the model.
    drafter: one that needs no golden continuation.
    texts: B sequences of at least `prompt_length + max_new_tokens` ids.
    prompt_length: number of leading tokens of each text that are its prompt.
    options: how to decode; stop ids are ignored.

  Raises:
    UserError: bad input, such as a text that is too short.
  """
  options = dataclasses.replace(options, stop_ids=())
  check_pair(target, drafter)
  if drafter is None or drafter.drafter.needs_golden:
    name = drafter and drafter.name
    raise UserError(
      f'drafter {name} does not work with teacher forcing; give a DFlash one'
    )
  prompt_length = integer(prompt_length, 'prompt_length', 1)
  texts = ids_of(target, texts, 'texts')
  least = prompt_length + options.max_new_tokens
  if min((len(text) for text in texts), default=least) < least:
    raise UserError(f'a text for teacher forcing has fewer than {least} tokens')
  prompts = [text[:prompt_length] for text in texts]
  request = prepare(target, drafter, prompts, options)
  text = golden_params(request.engine, texts)['golden']
  steps = drivers.traced(request.engine, request.params, request.state, text)
  state, seconds, along, own = collect(steps, len(texts))
  found = []
  for along_text, rounds in zip(
    results(state, options, seconds, along), own, strict=True
  ):
    along_target = dataclasses.replace(
      along_text,
      acceptance_lengths=[len(record.accepted_indices) for record in rounds],
      rounds=rounds,
    )
    found.append(TeacherForcedResult(along_text, along_target))
  return found
