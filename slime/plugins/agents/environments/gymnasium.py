"""``gymnasium:ENV_ID``: environments with Gymnasium's ``reset`` and ``step`` whose observations and actions are texts.

``gymnasium:module:ENV_ID`` imports the module that registers the environment first. A task is a seed of ``reset``: its
observation is the prompt, the model's text is the action, and each further observation is a message of the user. Every
episode has an environment of its own, whose calls run in a thread, since they may block.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from slime.config.seeds import derive_seed
from slime.data.sample import Message
from slime.plugins.agents.environments.base import (
    Environment,
    EnvironmentProblem,
    Episode,
    Step,
    StepFailed,
    StepLimits,
    Task,
)
from slime.plugins.agents.environments.registry import missing_package
from slime.types import JsonValue

T = TypeVar("T")


def make(
    what: str, /, tasks: int = 1000, seed: int = 0, system: str = "", tag: str = "", **options: JsonValue
) -> Environment:
    """Create the environment.

    Args:
        what: Id of the environment, with ``module:`` before it if a module has to be imported.
        tasks: Number of different seeds of ``reset``, which is the number of prompts of an epoch.
        seed: From which these seeds are derived.
        system: System prompt.
        tag: The action is the text between ``<tag>`` and ``</tag>``, the last ones of a turn; a turn without them is
            the action as a whole. Default: The whole turn.
        options: Keywords of ``gymnasium.make``.

    Raises:
        EnvironmentProblem: The package is missing, there is no such environment, or it does not speak in texts.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise missing_package("gymnasium", error) from error
    if tasks < 1:
        raise EnvironmentProblem(f"tasks={tasks}: must be at least 1")

    keywords: dict[str, Any] = dict(options)  # gymnasium checks them

    def create() -> Any:
        return gymnasium.make(what, **keywords)

    try:
        made = Gymnasium(create, tasks, seed, system, tag)
        made.task(0)
    except (gymnasium.error.Error, ImportError) as error:
        raise EnvironmentProblem(f"gymnasium:{what}: {type(error).__name__}: {error}") from error
    return made


class Gymnasium(Environment):
    """Text environments that ``create`` makes. The other arguments are as in :func:`make`."""

    def __init__(self, create: Callable[[], Any], tasks: int, seed: int, system: str, tag: str) -> None:
        self._create, self._count, self._seed, self._system, self._tag = create, tasks, seed, system, tag
        self._first = create()  # shows the first observations
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def task(self, number: int) -> Task:
        with self._lock:
            observation, _ = self._first.reset(seed=self.reset_seed(number))
        prompt: list[Message] = [{"role": "user", "content": _text(observation)}]
        if self._system:
            prompt.insert(0, {"role": "system", "content": self._system})
        return Task(prompt)

    def reset_seed(self, number: int) -> int:
        """The seed of ``reset`` for a task."""
        return derive_seed(self._seed, "gymnasium", number)

    async def start(self, number: int, limits: StepLimits) -> Episode:
        def begin() -> Any:
            made = self._create()
            try:
                made.reset(seed=self.reset_seed(number))
            except BaseException:
                made.close()
                raise
            return made

        return _Episode(await in_thread(begin, limits.seconds, lambda made: made.close()), self._tag, limits)


class _Episode(Episode):
    def __init__(self, made: Any, tag: str, limits: StepLimits) -> None:
        self.made, self.limits = made, limits
        self._inside = re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL) if tag else None

    async def step(self, text: str) -> Step:
        found = self._inside.findall(text) if self._inside else []
        action = (found[-1] if found else text).strip()
        observation, reward, ended, cut, _ = await in_thread(lambda: self.made.step(action), self.limits.seconds)
        if ended or cut:
            return Step(reward=float(reward), done=True)
        return Step([{"role": "user", "content": _text(observation)}], float(reward))

    async def close(self) -> None:
        await in_thread(self.made.close, self.limits.seconds)


def _text(observation: object) -> str:
    if isinstance(observation, str) and observation:
        return observation
    raise EnvironmentProblem(
        f"the observation {observation!r:.80} is a {type(observation).__name__}, not a text: wrap the environment so "
        "that observations and actions are texts (gymnasium.ObservationWrapper, gymnasium.ActionWrapper)"
    )


async def in_thread(call: Callable[[], T], seconds: float, abandon: Callable[[T], object] = lambda result: None) -> T:
    """Run a call that may block in a daemon thread.

    Args:
        abandon: Called in a thread with a result that comes after ``seconds``, or after the caller was cancelled.

    Raises:
        StepFailed: It took longer than ``seconds``. The thread is abandoned, since a thread cannot be ended.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)
        elif error is None:
            threading.Thread(target=abandon, args=(result,), name="slime-environment", daemon=True).start()

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # any error is raised in the caller
            error = raised if isinstance(raised, Exception) else RuntimeError(f"it raised {raised!r}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="slime-environment", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await future
    except TimeoutError as error:
        raise StepFailed("timeout", f"no answer in {seconds:g} s (--environment-timeout)") from error
