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


def test_warm_up_of_reasoning_gym_has_right_answers_and_no_held_out_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    held_out = recipe_data.write_gym(tmp_path).read_text()
    rows = recipe_data.write_gym_answers(tmp_path).read_text().splitlines()
    assert len(rows) == recipe_data.WARM_UP_ROWS
    for _, question, answer in (json.loads(row)["messages"] for row in rows):
        assert json.dumps(question["content"]) not in held_out
        terms = question["content"].split(":")[1].removesuffix(" =")
        assert str(eval(terms)) == answer["content"]


def test_solutions_of_gsm8k_end_with_the_number_that_is_rewarded(tmp_path: Path) -> None:
    row = {"question": "Two of 600?", "answer": "It is 2*600=<<2*600=1200>>1200.\nYes.\n#### 1,200"}
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    for path in recipe_data.write_questions(tmp_path / "data", tmp_path):
        assert json.loads(path.read_text())["label"] == "1200"
    solutions = recipe_data.write_solutions(tmp_path / "data", tmp_path)
    answer = json.loads(solutions.read_text())["messages"][-1]["content"]
    assert answer == "It is 2*600=1200. Yes. The answer is 1,200."
