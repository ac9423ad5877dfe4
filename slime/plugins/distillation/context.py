"""Privileged text: the teacher reads it with the prompt, the student does not.

With a demonstration or solution of the row, this is SDFT (arXiv 2601.19897) and OPSD (2601.18734);
with a successful sample of the group, or feedback on a failed one, SDPO (2601.20802).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.data.rewards import PASS_ABOVE
from slime.data.sample import Group, Sample, flatten
from slime.rollout.prompts import encode, render_first
from slime.rollout.state import GenerateState
from slime.types import Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args

TEACHER_PROMPT = "teacher_prompt"
"""The key of ``Sample.train_metadata`` with the token ids that the teacher reads as the prompt."""
FEEDBACK = "feedback"
"""The key of ``Sample.metadata`` with a text about a failed response, which a reward function sets."""


async def no_reward(args: Args, sample: Sample, **kwargs: object) -> float:
    """Return 0: the teacher is all that is learned from."""
    return 0.0


def add_context(args: Args, sample: Sample, evaluation: bool = False) -> None:
    """Set what the teacher reads, from the label or metadata of the row
    (``--rollout-sample-hook-path``).

    Raises:
        ValueError: The row has no such text.
    """
    if evaluation:
        return
    name = args.distill_context
    text = sample.label if name == "label" else sample.metadata.get(name or "")
    if text is None or not str(text).strip():
        raise ValueError(f"--distill-context {name}: sample {sample.index} has no such text")
    _set_prompt(sample, str(text), args.distill_template, GenerateState(args).tokenizer)


def add_successes(args: Args, groups: Sequence[Group]) -> None:
    """Set what the teacher reads, from the samples of each group (``--rollout-sample-filter-path``).

    It is the first other sample whose reward is above 0.5, else ``metadata["feedback"]``. A sample
    without either is not trained.
    """
    tokenizer = GenerateState(args).tokenizer
    for group in groups:
        samples = flatten(group)
        good = [s for s in samples if s.get_reward_value(args) > PASS_ABOVE and s.response.strip()]
        for sample in samples:
            text = next((other.response for other in good if other is not sample), None)
            text = text or sample.metadata.get(FEEDBACK)
            if text:
                _set_prompt(sample, str(text).strip(), args.distill_template, tokenizer)
            else:
                sample.remove_sample = True


def _set_prompt(sample: Sample, context: str, template: str, tokenizer: Tokenizer) -> None:
    prompt = sample.prompt
    if isinstance(prompt, str):
        text = _filled(template, prompt, context)
    else:
        # The text is part of what the user says last.
        place = max((i for i, one in enumerate(prompt) if one["role"] == "user"), default=-1)
        words = prompt[place].get("content")
        if place < 0 or not isinstance(words, str):
            raise ValueError(
                f"--distill-context: sample {sample.index} has no message of a user that is a text"
            )
        message = {**prompt[place], "content": _filled(template, words, context)}
        stand_in = Sample(
            prompt=[*prompt[:place], message, *prompt[place + 1 :]],
            metadata=sample.metadata,
            apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        )
        text = render_first(tokenizer, stand_in)
    ids = encode(tokenizer, text)
    sample.train_metadata = {**(sample.train_metadata or {}), TEACHER_PROMPT: ids}


def _filled(template: str, prompt: str, context: str) -> str:
    # Not str.format: texts may have braces.
    before, _, after = template.partition("{prompt}")
    return before.replace("{context}", context) + prompt + after.replace("{context}", context)
