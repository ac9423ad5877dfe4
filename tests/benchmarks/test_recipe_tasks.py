"""The calculator and the guessing game of the recipes, and the rows of their tasks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import recipe_data
import recipe_tasks

from slime.environments.base import Step, StepLimits


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("37 * 24 + 18", "= 906"),
        ("12-(3-4)", "= 13"),
        ("2 ** 99", "error: not a calculation"),
        ("__import__('os')", "error: not a calculation"),
        ("1 / 0", "error: not a calculation"),
        ("3 *", "error: not a calculation"),
        ("True + 1", "error: not a calculation"),
    ],
)
def test_the_calculator(text: str, answer: str) -> None:
    assert recipe_tasks.value(text) == answer


def play(number: int, guesses: list[str]) -> list[Step]:
    async def steps() -> list[Step]:
        game = await recipe_tasks.Guess().start(number, StepLimits())
        return [await game.step(guess) for guess in guesses]

    return asyncio.run(steps())


def test_guesses_in_the_middle_win_every_game() -> None:
    for number in range(60):
        low, high, won = 1, recipe_data.NUMBERS, False
        said: list[str] = []
        while not won:
            said.append(f"It is {(low + high) // 2}.")
            last = play(number, said)[-1]
            won = last.reward == 1.0
            assert last.done == (won or len(said) == recipe_data.GUESSES)
            assert won or not last.done
            if not won:
                up = "higher" in str(last.messages)
                low, high = ((low + high) // 2 + 1, high) if up else (low, (low + high) // 2 - 1)


def test_a_game_ends_after_the_last_guess() -> None:
    steps = play(0, ["no number"] * recipe_data.GUESSES)
    assert [step.done for step in steps] == [False] * (recipe_data.GUESSES - 1) + [True]
    assert sum(step.reward for step in steps) == 0.0


def test_warm_up_of_the_calculator(tmp_path: Path) -> None:
    """One half calculates with a result that is right, and no question is one of the task."""
    talks = [
        json.loads(line) for line in recipe_data.write_calls(tmp_path).read_text().splitlines()
    ]
    task = (tmp_path / "train.jsonl").read_text() + (tmp_path / "held_out.jsonl").read_text()
    calls = 0
    for messages in (talk["messages"] for talk in talks):
        assert json.dumps(messages[1]["content"]) not in task
        if len(messages) == 3:
            continue
        calls += 1
        said = recipe_tasks.CALL.findall(messages[2]["content"])
        assert (
            messages[3]["content"] == recipe_tasks.value(said[0]) == f"= {messages[4]['content']}"
        )
    assert calls == len(talks) // 2
