"""``reasoning_gym:DATASET``: the procedural tasks of reasoning-gym, with its own scorers.

An answer is what stands between ``<answer>`` and ``</answer>``, or the whole response if it has no
such tags. Scorers run in the killable processes of :mod:`slime.rollout.verifier`, since some of
them are symbolic and can take long.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from slime.rollout.verifier.pool import shared_pool
from slime.types import JsonValue

from . import (
    Environment,
    EnvironmentProblem,
    Episode,
    Step,
    StepFailed,
    StepLimits,
    Task,
    missing_package,
    opening,
)

SCORE = "slime.plugins.agents.environments.reasoning_gym.score"
SYSTEM = "none"


def make(what: str, /, system: str = SYSTEM, seed: int = 0, **options: JsonValue) -> Environment:
    """Create the environment.

    Args:
        what: Name of a data set of reasoning-gym, such as ``chain_sum``.
        system: Name of a system prompt of reasoning-gym (``default``, ``simple``, ``direct``, ...),
            ``none``, or a system prompt of several words.
        seed: Seed of the tasks.
        options: Fields of the data set's configuration, such as ``min_terms``, and ``size``, the
            number of tasks.

    Raises:
        EnvironmentProblem: The package is missing, or a name or an option is not valid.
    """
    if type(seed) is not int:
        raise EnvironmentProblem(f"seed={seed}: must be a whole number")
    return ReasoningGym(what, system, {**options, "seed": seed})


class ReasoningGym(Environment):
    """One data set of reasoning-gym. Arguments as in :func:`make`."""

    def __init__(self, what: str, system: str, options: dict[str, JsonValue]) -> None:
        self._key = json.dumps([what, options], sort_keys=True)
        self._tasks = _tasks(self._key)
        self._system = _system(system)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, number: int) -> Task:
        entry = self._tasks[number]
        answer = entry["answer"]
        return Task(
            opening(self._system, entry["question"]), None if answer is None else str(answer)
        )

    async def start(self, number: int, limits: StepLimits) -> Episode:
        return _Question(self._key, number, limits)


@dataclass(eq=False)
class _Question(Episode):
    """A task of one turn: the first text of the model is scored."""

    key: str
    number: int
    limits: StepLimits

    async def step(self, text: str) -> Step:
        pool = shared_pool(self.limits.workers)
        verdict = await pool.run(SCORE, self.key, self.number, text, timeout=self.limits.seconds)
        if not verdict.ok:
            raise StepFailed(verdict.status, verdict.detail)
        assert isinstance(verdict.value, float)
        return Step(reward=verdict.value, done=True)


def score(key: str, number: int, text: str) -> float:
    """Score a response in a verifier process.

    Args:
        key: JSON of the data set's name and its options.
        number: The task, which is generated again from the seed.
        text: The response.

    Returns:
        The score of the data set, usually between 0 and 1.
    """
    from reasoning_gym.utils import extract_answer

    tasks = _tasks(key)
    extracted = extract_answer(text)
    return float(
        tasks.score_answer(text.strip() if extracted is None else extracted, tasks[number])
    )


@functools.cache
def _tasks(key: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise missing_package("reasoning-gym", error) from error
    name, options = json.loads(key)
    if name not in DATASETS:
        raise EnvironmentProblem(
            f"reasoning_gym has no data set {name!r}; it has {', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (TypeError, AssertionError, ValueError) as error:
        fields = ", ".join(sorted(DATASETS[name][1].__dataclass_fields__))
        raise EnvironmentProblem(
            f"reasoning_gym:{name}: {error}; its options are {fields}, and system"
        ) from error


def _system(name: str) -> str | None:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name == SYSTEM:
        return None
    if " " in name:
        return name
    if name not in SYSTEM_PROMPTS:
        known = ", ".join(SYSTEM_PROMPTS)
        raise EnvironmentProblem(
            f"reasoning_gym has no system prompt {name!r}; known are {SYSTEM}, {known}"
        )
    text: str = SYSTEM_PROMPTS[name]
    return text
