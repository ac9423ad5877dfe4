"""``--environment`` through the real command: several turns, and a resumed run that goes on with
the same tasks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train import assert_good, digests, same_numbers

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

LETTERS = '''
from slime.plugins.agents.environments import Environment, Episode, Step, Task

class Letters(Environment):
    """Two turns; the reward of each is the share of a letter in it."""

    def __init__(self, count=16):
        self.count = count

    def __len__(self):
        return self.count

    def task(self, number):
        return Task([{"role": "user", "content": f"{number}: write {'abcd'[number % 4]}."}], "abcd"[number % 4])

    async def start(self, number, limits):
        return Turns("abcd"[number % 4])

class Turns(Episode):
    def __init__(self, letter):
        self.letter, self.turns = letter, 0

    async def step(self, text):
        self.turns += 1
        reward = text.count(self.letter) + 0.01 * (len(text) % 7)
        return Step([{"role": "user", "content": "More."}], reward, self.turns == 2)
'''


@pytest.fixture
def letters(tmp_path: Path, tiny_model: Path) -> list[object]:
    (tmp_path / "letters_env.py").write_text(LETTERS)
    return [
        "--hf-checkpoint", tiny_model, "--environment", "letters_env.py:Letters?count=12", "--rollout-batch-size", 4,
        "--n-samples-per-prompt", 4, "--rollout-max-response-len", 60, "--lr", "1e-3", "--train-backend", "fsdp",
        "--rollout-backend", "embedded", "--rollout-shuffle", "--deterministic",
    ]  # fmt: skip


def test_a_resumed_run_goes_on_with_the_same_tasks(runner, letters) -> None:
    flags = [*letters, "--num-rollout", 4, "--save-interval", 1]
    whole = runner.inline(*flags, "--save", runner.tmp / "whole", name="whole")
    assert_good(whole)
    assert any(row["rollout/raw_reward"] > 0 for row in whole.metrics())
    on = ["--load", runner.tmp / "whole", "--ckpt-step", 1, "--save", runner.tmp / "parts"]
    resumed = runner.inline(*flags, *on, name="resumed")
    assert_good(resumed)
    assert same_numbers(whole.metrics()[-2:], resumed.metrics()[-2:]) == []
    assert digests(runner.tmp / "whole" / "iter_0000003") == digests(
        runner.tmp / "parts" / "iter_0000003"
    )


def test_an_epoch_of_the_environment_is_the_length_of_the_run(runner, letters) -> None:
    result = runner.inline(*letters)
    assert_good(result)
    assert len(result.metrics()) == 3, "12 tasks, 4 a rollout"


def test_mistakes_are_told_together_and_before_anything_starts(runner, letters) -> None:
    result = runner.inline(*letters, "--environment", "letters_env.py:Letters?size=3", "--lr", "-1")
    assert result.code == 2 and not result.folder.exists()
    assert (
        "--environment letters_env.py:Letters?size=3: it cannot be created: TypeError"
        in result.output
    )
    assert "--lr -1" in result.output
