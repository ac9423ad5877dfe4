"""A text environment for Gymnasium: guess a number between 1 and 9; each answer says higher or
lower.

The guide (docs/en/environments.md) uses a shorter one.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Text


class Guess(gymnasium.Env[str, str]):
    """Reward 1 for the number, divided by the number of guesses; at most ``guesses`` guesses."""

    observation_space = Text(1000, charset=string.printable)
    action_space = Text(1000, charset=string.printable)

    def __init__(self, guesses: int = 4) -> None:
        self.guesses = guesses

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.used = int(self.np_random.integers(1, 10)), 0
        return "Guess a number from 1 to 9. Answer with the number only.", {"number": self.number}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.used += 1
        if action == "crash":
            raise OSError("the game is broken")
        if not action.isdigit():
            return "That is not a number.", -0.125, self.used >= self.guesses, False, {}
        if int(action) == self.number:
            return "Right.", 1.0 / self.used, True, False, {}
        hint = "higher" if int(action) < self.number else "lower"
        return f"It is {hint}.", 0.0, False, self.used >= self.guesses, {}


gymnasium.register("Guess-v0", entry_point=f"{__name__}:Guess", disable_env_checker=True)
