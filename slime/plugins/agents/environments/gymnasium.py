"""``gymnasium:ENV_ID``: environments with Gymnasium's ``reset`` and ``step`` whose observations and
actions are texts.

``gymnasium:module:ENV_ID`` imports the module that registers the environment first. A task is a
seed of ``reset``: its observation is the prompt, the model's text is the action, and each further
observation is a message of the user. Every episode has an environment of its own, whose calls run
in a thread, since they may block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.types import JsonValue

from ..program import in_thread
from . import (
    Environment,
    EnvironmentProblem,
    Episode,
    SeededTasks,
    Step,
    StepLimits,
    missing_package,
)

T = TypeVar("T")


def make(
    what: str,
    /,
    tasks: int = 1000,
    seed: int = 0,
    system: str = "",
    tag: str = "",
    **options: JsonValue,
) -> Environment:
    """Create the environment.

    Args:
        what: Id of the environment, with ``module:`` before it if a module has to be imported.
        tasks: Number of different seeds of ``reset``, which is the number of prompts of an epoch.
        seed: From which these seeds are derived.
        system: System prompt.
        tag: The action is the text between ``<tag>`` and ``</tag>``, the last ones of a turn; a
            turn without them is the action as a whole. Default: The whole turn.
        options: Keywords of ``gymnasium.make``.

    Raises:
        EnvironmentProblem: The package is missing, there is no such environment, or it does not
            speak in texts.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise missing_package("gymnasium", error) from error
    keywords: dict[str, Any] = dict(options)  # gymnasium checks them

    def create() -> Any:
        return gymnasium.make(what, **keywords)

    try:
        made = Gymnasium(create, tasks, seed, system, tag)
        made.task(0)
    except (gymnasium.error.Error, ImportError) as error:
        raise EnvironmentProblem(f"gymnasium:{what}: {type(error).__name__}: {error}") from error
    return made


class Gymnasium(SeededTasks):
    """Text environments that ``create`` makes. The other arguments are as in :func:`make`."""

    def __init__(
        self, create: Callable[[], Any], tasks: int, seed: int, system: str, tag: str
    ) -> None:
        super().__init__("gymnasium", tasks, seed, system, tag)
        self._create = create
        self._first = create()  # shows the first observations
        self._lock = threading.Lock()

    def first(self, number: int) -> str:
        with self._lock:
            observation, _ = self._first.reset(seed=self.reset_seed(number))
        return _text(observation)

    async def start(self, number: int, limits: StepLimits) -> Episode:
        def begin() -> Any:
            made = self._create()
            try:
                made.reset(seed=self.reset_seed(number))
            except BaseException:
                made.close()
                raise
            return made

        return _Episode(self, await _call(begin, limits, lambda made: made.close()), limits)


@dataclass(eq=False)
class _Episode(Episode):
    tasks: Gymnasium
    made: Any
    limits: StepLimits

    async def step(self, text: str) -> Step:
        action = self.tasks.action(text)
        observation, reward, ended, cut, _ = await _call(
            lambda: self.made.step(action), self.limits
        )
        if ended or cut:
            return Step(reward=float(reward), done=True)
        return Step([{"role": "user", "content": _text(observation)}], float(reward))

    async def close(self) -> None:
        await _call(self.made.close, self.limits)


def _text(observation: object) -> str:
    if isinstance(observation, str) and observation:
        return observation
    raise EnvironmentProblem(
        f"the observation {observation!r:.80} is a {type(observation).__name__}, not a text: wrap "
        "the environment so that observations and actions are texts "
        "(gymnasium.ObservationWrapper, gymnasium.ActionWrapper)"
    )


async def _call(
    call: Callable[[], T], limits: StepLimits, abandon: Callable[[T], object] = lambda result: None
) -> T:
    """Run a call that may block in a thread; see :func:`in_thread`.

    Raises:
        TimeoutError: It took longer than the limit. The thread is abandoned, since a thread cannot
            be ended.
    """
    async with asyncio.timeout(limits.seconds):
        return await in_thread(call, "slime-environment", abandon)
