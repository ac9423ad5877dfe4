"""An environment server of OpenEnv: guess a number from 1 to 9. ``python openenv_server.py PORT
SESSIONS``.
"""

from __future__ import annotations

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=1, le=9)


class Hint(Observation):
    text: str


class Number(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: object) -> Hint:
        self.steps, self.number = 0, random.Random(seed).randint(1, 9)
        return Hint(
            text=f"Guess a number from 1 to 9. It is {'odd' if self.number % 2 else 'even'}."
        )

    def step(self, action: Guess, timeout_s: float | None = None, **more: object) -> Hint:
        self.steps += 1
        if action.number == self.number:
            return Hint(text="Right.", reward=1.0, done=True)
        return Hint(
            text="It is higher." if action.number < self.number else "It is lower.", reward=-0.125
        )

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_app(Number, Guess, Hint, env_name="number", max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
