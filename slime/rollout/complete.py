"""Responses to single prompts with the engines of a run, outside of any rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime.data.sample import Message, Sample
from slime.engines.http import HttpError
from slime.rollout.generate import generate
from slime.rollout.settings import seeded
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.config.args import Args

Prompt = str | list[Message]


class NotCompleted(ValueError):
    """A prompt or a sampling parameter was refused; nothing is wrong with the run."""


async def complete(
    args: Args, prompts: Sequence[Prompt], n: int = 1, changes: Mapping[str, object] | None = None
) -> list[list[Sample]]:
    """Generate ``n`` responses to each prompt, with the sampling parameters of the run.

    Neither the user's generate function nor a reward is called. With ``--deterministic``, the same weights give the
    same responses.

    Args:
        prompts: Texts, which are sent as they are, or messages, which the chat template renders.
        changes: SGLang's sampling parameters that differ from those of the run (``temperature``, ``max_new_tokens``).

    Returns:
        The samples of each prompt, with token ids and the engine's log-probs.

    Raises:
        NotCompleted: The chat template or the engine refused a prompt, or the engine refused a parameter.
    """
    state = GenerateState(args)
    params = state.sampling_params.copy()
    params.update(changes or {})  # type: ignore[typeddict-item]  # the engine checks names that it does not know
    kwargs = dict(args.apply_chat_template_kwargs or {})

    async def one(place: int, position: int) -> Sample:
        sample = Sample(prompt=prompts[place], group_index=place, index=place * n + position)
        sample.apply_chat_template_kwargs = kwargs
        async with state.semaphore:
            return await _answered(
                place, generate(args, sample, seeded(state.seed, params, sample, position, "complete"))
            )

    asked = [asyncio.ensure_future(one(place, number)) for place in range(len(prompts)) for number in range(n)]
    try:
        made = await asyncio.gather(*asked)
    finally:
        for task in asked:  # after an error, the others would go on
            task.cancel()
    return [list(made[place * n : (place + 1) * n]) for place in range(len(prompts))]


async def _answered(place: int, answer: Awaitable[Sample]) -> Sample:
    """Await a response to the prompt ``place``."""
    try:
        return await answer
    except HttpError as error:
        if error.retryable:
            raise
        raise NotCompleted(str(error)) from error
    except (TypeError, ValueError) as error:
        raise NotCompleted(f"prompt {place}: {type(error).__name__}: {error}") from error
