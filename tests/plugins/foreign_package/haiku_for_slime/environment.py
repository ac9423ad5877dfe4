"""An environment: its tasks ask for a number, and pay for any digit."""

from __future__ import annotations

from slime.environments.base import Environment, Episode, Step, StepLimits, Task
from slime.types import JsonValue


class Counting(Environment):
    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return self.tasks

    def task(self, number: int) -> Task:
        return Task(prompt=f"Count to {number % self.tasks}.")

    async def start(self, number: int, limits: StepLimits) -> Episode:
        return _Turn()


class _Turn(Episode):
    async def step(self, text: str) -> Step:
        return Step(reward=float(any(letter.isdigit() for letter in text)), done=True)


def make(what: str, **options: JsonValue) -> Environment:
    return Counting(int(what))
