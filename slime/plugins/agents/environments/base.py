"""The interface of an environment.

An environment has numbered tasks. :meth:`Environment.task` returns what the model sees first, and
:meth:`Environment.start` begins an episode, in which every text of the model is answered by a :class:`Step`. An
environment of single questions answers the first text with ``done=True`` and the reward.

A class of the user's is chosen with ``--environment file.py:MyEnvironment?option=value``; options are passed as
keywords.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.data.sample import Message
from slime.types import JsonValue


class EnvironmentProblem(ValueError):
    """An environment cannot be created; the message says what to change."""


class StepFailed(RuntimeError):
    """A step gave no result. The sample is left out and counted; it does not get the reward 0.

    Attributes:
        status: ``timeout``, ``crashed`` or ``error``, as in :class:`slime.rollout.verifier.Verdict`.
    """

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class Task:
    """The beginning of an episode.

    Attributes:
        prompt: Messages, which the chat template of the model renders, or a text, which is used as it is.
        label: The answer, if the task has one. It is shown in files of samples; the reward does not depend on it.
        metadata: Entries for ``Sample.metadata``; JSON values.
        tools: Schemas for the chat template.
    """

    prompt: list[Message] | str
    label: JsonValue = None
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Step:
    """The answer of an environment to one text of the model.

    Attributes:
        messages: What the model sees next, such as ``[{"role": "user", "content": "..."}]``. Not used if ``done``.
        reward: Reward of this step. The reward of a sample is the sum over its steps.
        done: Whether the episode ends here.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class StepLimits:
    """Limits of the steps of an environment.

    Attributes:
        seconds: Deadline of one step (``--environment-timeout``).
        workers: Maximum number of verifier processes (``--reward-workers``).
    """

    seconds: float = 60.0
    workers: int | None = None


class Episode(ABC):
    """One attempt of the model at a task."""

    @abstractmethod
    async def step(self, text: str) -> Step:
        """Answer what the model wrote in its turn.

        Raises:
            StepFailed: There is no result, for a reason that lies outside of the model's text.
        """

    async def close(self) -> None:
        """Release what the episode holds. It is called once, also after an error."""
        return None


class Environment(ABC):
    """Numbered tasks and their episodes. The same number must give the same task in every process and run."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of tasks, which is the number of prompts of an epoch."""

    @abstractmethod
    def task(self, number: int) -> Task:
        """Return the task ``number``, from 0."""

    @abstractmethod
    async def start(self, number: int, limits: StepLimits) -> Episode:
        """Begin an episode of the task ``number``."""
