"""What a run of ``recipes.py`` imports: a calculator as a tool, and a guessing game.

- ``recipe_tasks.py:calculate`` is a generate function: what the model writes between ``<calc>`` and
  ``</calc>`` is computed, and the result is the next message of the user.
- ``recipe_tasks.py:last_turn`` is the reward: 1 if the last number of the model's last turn is the
  label, so what the calculator said does not count, and no calculation that only repeats it.
- ``recipe_tasks.py:Guess`` is an environment: the model guesses a number and is told whether the
  number is higher or lower.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from recipe_data import GAME, GUESSES, NUMBERS

from slime.environments.base import Environment, Episode, Step, StepLimits, Task
from slime.rollout.multi_turn import TURNS, Conversation

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Sample
    from slime.types import SamplingParams

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LONGEST = 60
"""Characters of an expression. With products alone its value stays short, too."""


def value(text: str) -> str:
    """What the model reads: the value of sums, differences and products of whole numbers."""
    try:
        return f"= {_value(ast.parse(text.strip()[:LONGEST], mode='eval').body)}"
    except (SyntaxError, ValueError):
        return "error: not a calculation"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not a calculation")


async def calculate(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample:
    talk = Conversation(args, sample, sampling_params, evaluation)
    while (said := await talk.turn(stop=["</calc>"])) is not None:
        calls = CALL.findall(said)
        if not calls or not talk.reply([{"role": "user", "content": value(calls[-1])}]):
            break
    return sample


async def last_turn(args: Args, sample: Sample, **_: object) -> float:
    said = sample.metadata[TURNS][-1]["text"].replace(",", "")
    return float(re.findall(r"-?\d+", said)[-1:] == [sample.label] and not CALL.search(said))


class Guess(Environment):
    """The number lies from 1 to ``NUMBERS``; after ``GUESSES`` the game is lost, with the reward 0."""

    def __len__(self) -> int:
        return 2000

    def task(self, number: int) -> Task:
        return Task(list(GAME), label=str(self.wanted(number)))

    def wanted(self, number: int) -> int:
        return random.Random(number).randint(1, NUMBERS)

    async def start(self, number: int, limits: StepLimits) -> Episode:
        return Game(self.wanted(number))


class Game(Episode):
    def __init__(self, wanted: int) -> None:
        self.wanted, self.left = wanted, GUESSES

    async def step(self, text: str) -> Step:
        guess = int((re.findall(r"\d{1,6}", text) or ["0"])[0])
        self.left -= 1
        if guess == self.wanted or not self.left:
            return Step(reward=float(guess == self.wanted), done=True)
        hint = "higher" if guess < self.wanted else "lower"
        return Step([{"role": "user", "content": f"My number is {hint}."}])
