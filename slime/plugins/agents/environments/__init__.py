"""Environments: ready-made tasks with their prompts, rewards and turns. Here is their
interface, and the environment that ``--environment NAME:WHAT?key=value`` names.

An environment has numbered tasks. :meth:`Environment.task` returns what the model sees first, and
:meth:`Environment.start` begins an episode, in which every text of the model is answered by a
:class:`Step`. An environment of single questions answers the first text with ``done=True`` and the
reward.

A class of the user's is chosen with ``--environment file.py:MyEnvironment?option=value``; options
are passed as keywords.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

import yaml

from slime.config.hooks import HookError, load_function
from slime.config.seeds import derive_seed
from slime.data.sample import Message, Sample
from slime.registry import find, parts
from slime.types import JsonValue


class EnvironmentProblem(ValueError):
    """An environment cannot be created; the message says what to change."""


class StepFailed(RuntimeError):
    """A step gave no result. The sample is left out and counted; it does not get the reward 0.

    Attributes:
        status: ``timeout``, ``crashed`` or ``error``, as in
            :class:`slime.rollout.verifier.pool.Verdict`.
    """

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class Task:
    """The beginning of an episode.

    Attributes:
        prompt: Messages, which the chat template of the model renders, or a text, which is used as
            it is.
        label: The answer, if the task has one. It is shown in files of samples; the reward does not
            depend on it.
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
        messages: What the model sees next, such as ``[{"role": "user", "content": "..."}]``. Not
            used if ``done``.
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
    """Numbered tasks and their episodes. The same number must give the same task in every process
    and run.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of tasks, which is the number of prompts of an epoch."""

    @abstractmethod
    def task(self, number: int) -> Task:
        """Return the task ``number``, from 0."""

    @abstractmethod
    async def start(self, number: int, limits: StepLimits) -> Episode:
        """Begin an episode of the task ``number``."""


def opening(system: str | None, text: str) -> list[Message]:
    """Return the first messages of a task: a system prompt, if there is one, and a text of the
    user.
    """
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


class SeededTasks(Environment):
    """Tasks that are seeds of ``reset``: the first observation is the prompt, and the text of the
    model the action.

    Args:
        name: Of the kind of environment; the seeds depend on it.
        tasks: Number of different seeds, which is the number of prompts of an epoch.
        seed: From which these seeds are derived.
        system: System prompt.
        tag: The action is the text between ``<tag>`` and ``</tag>``, the last ones of a turn; a
            turn without them is the action as a whole. Empty: the whole turn.
    """

    def __init__(self, name: str, tasks: int, seed: int, system: str, tag: str) -> None:
        if tasks < 1:
            raise EnvironmentProblem(f"tasks={tasks}: must be at least 1")
        self._name = name
        self._count = tasks
        self._seed = seed
        self._system = system
        self._inside = (
            re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL) if tag else None
        )

    def __len__(self) -> int:
        return self._count

    def task(self, number: int) -> Task:
        return Task(opening(self._system, self.first(number)))

    @abstractmethod
    def first(self, number: int) -> str:
        """Return the first observation of the task ``number``."""

    def reset_seed(self, number: int) -> int:
        """Return the seed of ``reset`` for a task."""
        return derive_seed(self._seed, self._name, number)

    def action(self, text: str) -> str:
        """Return the action in a turn of the model."""
        tagged = self._inside.findall(text) if self._inside else []
        return str(tagged[-1] if tagged else text).strip()


# --- the values of --environment ---


class Make(Protocol):
    """Creates an environment from what follows its name, and its options."""

    def __call__(self, what: str, /, **options: JsonValue) -> Environment: ...


_TEXTS = ("system", "tag")
"""Options of the adapters that are texts. YAML would cut them at `` #`` and make a mapping of one
with a colon.
"""
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """A parsed value of ``--environment``: ``NAME:WHAT?key=value&key=value``.

    Attributes:
        name: The name of a registered environment, or the path of the user's own class; then
            ``what`` is empty.
        options: Values by name. A value is read as YAML, so ``3`` is a number and ``[1, 2]`` a
            list. The texts of the adapters (``system``, ``tag``) are taken as they are, unless they
            stand in quotes.
    """

    name: str
    what: str
    options: Mapping[str, JsonValue]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse a value of the flag.

        Raises:
            EnvironmentProblem: An option is not ``key=value``, or there is no name.
        """
        # The name of a user's class may have a colon itself (file.py:Class).
        head, _, query = text.partition("?")
        name, _, what = head.partition(":")
        if name not in parts("environment") and "." in head:
            name = head
            what = ""
        options: dict[str, JsonValue] = {}
        # Each option once, as key=value.
        for part in filter(None, query.split("&")):
            key, equals, value = part.partition("=")
            if not (equals and key.isidentifier() and value):
                raise EnvironmentProblem(f"the option {part!r} is not of the form key=value")
            if key in options:
                raise EnvironmentProblem(f"the option {key} is given twice")
            # A system prompt is text as it stands; YAML would read a colon in it as a mapping.
            value = unquote(value)
            if name in parts("environment") and key in _TEXTS and not _QUOTED.fullmatch(value):
                options[key] = value
                continue
            try:
                options[key] = yaml.safe_load(value)
            except RecursionError:
                raise EnvironmentProblem(f"the value of {key} is nested too deeply") from None
            # PyYAML raises a ValueError for an impossible date
            except (yaml.YAMLError, ValueError) as error:
                raise EnvironmentProblem(
                    f"the value of {key} cannot be read: {' '.join(str(error).split())}"
                ) from None
        if not name:
            raise EnvironmentProblem("it has no name; the form is NAME:WHAT?key=value")
        return cls(name, what, options)


def own_seed(text: str, seed: int) -> str:
    """Return the value of ``--environment`` in its full form, with the seed of the run if it has no
    ``seed`` of its own. The user's own environments get no option that they do not ask for."""
    spec = Spec.parse(text)
    if spec.name not in parts("environment") or "seed" in spec.options:
        return text
    return f"{text}{'&' if '?' in text else '?'}seed={seed}"


@functools.cache
def environment(text: str) -> Environment:
    """Create the environment of a value of ``--environment``, or return the one that this process
    has created.

    Raises:
        EnvironmentProblem: The name or an option is unknown, or a package is missing.
    """
    spec = Spec.parse(text)
    try:
        made: object
        if spec.name in parts("environment"):
            make: Make = find("environment", spec.name)
            made = make(spec.what, **spec.options)
        else:
            made = _own(spec.name)(**spec.options)
        count = len(made) if isinstance(made, Environment) else 1
    except EnvironmentProblem:
        raise
    # Packages and users' classes raise what they like for options that they do not accept. A script
    # without a guard for __main__ may exit, which would end the run without a word.
    except (Exception, SystemExit) as error:
        raise EnvironmentProblem(
            f"it cannot be created: {type(error).__name__}: {error}"[:2000]
        ) from error
    if not isinstance(made, Environment):
        raise EnvironmentProblem(
            f"{spec.name} gives a {type(made).__name__}, not a slime.environments.base.Environment"
        )
    if count < 1:
        raise EnvironmentProblem("it has no tasks")
    return made


def _own(name: str) -> Callable[..., object]:
    if "." not in name:
        known = ", ".join(parts("environment"))
        raise EnvironmentProblem(
            f"there is no environment {name!r}: known are {known}, and file.py:Class of your own"
        )
    try:
        environment_class: Callable[..., object] = load_function(name)
    except HookError as error:
        raise EnvironmentProblem(str(error)) from error
    except (Exception, SystemExit) as error:  # The user's file can raise anything.
        raise EnvironmentProblem(
            f"importing {name} failed with {type(error).__name__}: {error}"
        ) from error
    return environment_class


def missing_package(package: str, error: ImportError) -> EnvironmentProblem:
    """The error for a package that is not installed, or that lacks a part."""
    return EnvironmentProblem(
        f"the package {package} cannot be imported ({error}): install it with pip install "
        f"'slime-rl[{package}]', or pip install {package}"
    )


SPEC = "environment"
NUMBER = "environment_task"
"""Keys of ``Sample.metadata``: the environment in its full form, and the number of the task."""


def task_sample(spec: str, number: int) -> Sample:
    """Return the task ``number`` of an environment (in its full form, see :func:`own_seed`) as a
    sample.
    """
    task = environment(spec).task(number)
    tools = {"tools": [dict(tool) for tool in task.tools]} if task.tools else {}
    return Sample(
        prompt=task.prompt,
        label=task.label,
        metadata={**task.metadata, **tools, SPEC: spec, NUMBER: number},
    )
