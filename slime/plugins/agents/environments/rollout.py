"""The generate function of ``--environment``: the model and the environment speak in turn."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.data.reasoning import after_thinking, opened_by_ids
from slime.data.sample import Sample
from slime.observability.trace_utils import trace_span
from slime.rollout.ends import text_of
from slime.rollout.generate import generate as generate_text
from slime.rollout.rm_hub.outcome import mark_unscored, raised_at
from slime.rollout.state import GenerateState
from slime.types import SamplingParams

from ..conversation import Conversation, ModelTurn
from ..rollout import generate as play
from ..trajectory import without_response
from . import (
    NUMBER,
    SPEC,
    Episode,
    Step,
    StepFailed,
    StepLimits,
    environment,
)
from .played import Played

if TYPE_CHECKING:
    from slime.config.args import Args

_CLOSE_SECONDS = 10.0


async def generate(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one episode of the task that the sample's metadata names; a sample without a task
    gets one response. An environment that speaks with the model by itself is an agent program.

    The reward is the sum over the steps, unless ``--custom-rm-path`` is given, which then scores
    the sample. The sum is in ``metadata["environment_return"]`` in any case. A sample whose
    environment gave no result is left out and counted, see
    :func:`slime.rollout.rm_hub.outcome.mark_unscored`.
    """
    if SPEC not in sample.metadata:
        return await generate_text(args, sample, sampling_params)
    if isinstance(environment(sample.metadata[SPEC]), Played):
        return await play(args, sample, sampling_params, evaluation)
    limits = StepLimits(args.environment_timeout, args.reward_workers)
    try:
        episode = await _start(sample, limits)
    except StepFailed as failed:
        return give_up(GenerateState(args), sample, failed)
    try:
        total = await _converse(
            Conversation(args, sample, sampling_params, evaluation), episode, limits
        )
    except StepFailed as failed:
        if sample.status is Sample.Status.ABORTED:  # it would be continued again and again
            sample.status = Sample.Status.FAILED
        mark_unscored(sample, failed.status, str(failed))
        return sample
    finally:
        await _close(episode)
    if sample.status is not Sample.Status.ABORTED and not sample.reward_timed_out:
        sample.metadata["environment_return"] = total
        own = sample.custom_rm_path  # "" for a data set that does without that of the run
        sample.reward = None if (args.custom_rm_path if own is None else own) else total
    return sample


async def _converse(talk: Conversation, episode: Episode, limits: StepLimits) -> float:
    """Speak until the episode ends or the model has no room left, and return the sum of the
    rewards.
    """
    total = 0.0
    for number, turn in enumerate(talk.turns, start=1):
        # an aborted sample continues: bring the new episode to where the old one was
        if turn["answered"]:
            step = await _step(talk.sample, episode, said(talk, turn), limits)
            if step.done or not talk.was_reply(turn, step.messages):
                # The reward would be that of another episode than the one which the model saw.
                answer = "ended the episode" if step.done else "answered otherwise"
                raise StepFailed(
                    "error",
                    f"a new episode {answer} at turn {number} than the one of the aborted sample: "
                    "--partial-rollout needs environments that answer the same texts alike",
                )
            total += step.reward
    while await talk.turn() is not None:
        step = await _step(talk.sample, episode, said(talk, talk.turns[-1]), limits)
        total += step.reward
        if step.done:
            # The environment ended the episode, so nothing is missing even if the last token used
            # up the room.
            if talk.sample.status is not Sample.Status.TRUNCATED:
                talk.sample.status = Sample.Status.COMPLETED
            break
        if not talk.reply(step.messages):
            break
    return total


def said(talk: Conversation, turn: ModelTurn) -> str:
    """Return what the model said in a turn, without its reasoning and the token that ended it."""
    tokens = talk.sample.tokens
    state = talk.state
    first = len(tokens) - talk.sample.response_length
    begin = first + turn["start"]
    end = None if turn["end"] is None else first + turn["end"]
    opened = opened_by_ids(state.tokenizer, tokens[:begin])
    return after_thinking(text_of(state.tokenizer, state.end_token_ids, tokens[begin:end]), opened)


async def _start(sample: Sample, limits: StepLimits) -> Episode:
    made = environment(sample.metadata[SPEC])
    with _failures("an episode cannot begin: ", "no episode began", limits):
        async with asyncio.timeout(limits.seconds):
            return await made.start(int(sample.metadata[NUMBER]), limits)


async def _step(sample: Sample, episode: Episode, text: str, limits: StepLimits) -> Step:
    began = asyncio.get_running_loop().time()
    try:
        with _failures("", "no answer", limits), trace_span(sample, "environment"):
            step = await episode.step(text)
            # NumPy's numbers cannot be written as JSON
            step = replace(step, reward=float(step.reward))
    finally:
        sample.non_generation_time += asyncio.get_running_loop().time() - began
    if not math.isfinite(step.reward):
        raise StepFailed("error", f"the environment gave the reward {step.reward}")
    return step


@contextlib.contextmanager
def _failures(what: str, late: str, limits: StepLimits) -> Iterator[None]:
    """Turn any error into a :class:`StepFailed`: environments are programs of others, and one
    sample must not end the run.

    Args:
        what: Begins the message of an error.
        late: Begins the message when the deadline has passed.
    """
    try:
        yield
    except StepFailed:
        raise
    except TimeoutError as error:
        raise StepFailed(
            "timeout", f"{late} in {limits.seconds:g} s (--environment-timeout)"
        ) from error
    except Exception as error:
        raise StepFailed("error", f"{what}{raised_at(error)}") from error


def give_up(state: GenerateState, sample: Sample, failed: StepFailed) -> Sample:
    """Leave out a sample whose episode could not begin."""
    sample.reset_response()
    without_response(state, sample)
    sample.status = Sample.Status.FAILED
    mark_unscored(sample, failed.status, str(failed))
    return sample


async def _close(episode: Episode) -> None:
    # The episode has ended, and its result does not depend on this.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await episode.close()
