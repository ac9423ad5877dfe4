"""``--environment gymnasium:…`` with the real package: several turns, their rewards, and
environments that fail.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.plugins.agents.environments import (
    EnvironmentProblem,
    StepLimits,
    environment,
)
from slime.plugins.agents.environments.gymnasium import Gymnasium
from slime.plugins.agents.environments.rollout import generate

pytest.importorskip("gymnasium", reason="pip install 'slime-rl[gymnasium]'")
GUESS = "gymnasium:guess_number:Guess-v0"


def hidden(number: int, spec: str = GUESS) -> int:
    """The number of a task, as the environment draws it."""
    import gymnasium

    made = gymnasium.make("guess_number:Guess-v0")
    seed = environment(f"{spec}{'&' if '?' in spec else '?'}seed=42").reset_seed(number)  # type: ignore[attr-defined]
    return int(made.reset(seed=seed)[1]["number"])


async def test_the_model_and_the_environment_speak_in_turn(play: Any) -> None:
    number = hidden(3)
    wrong = "9" if number < 9 else "1"
    hint = "lower" if wrong == "9" else "higher"
    sample, script = await play(GUESS, [wrong, "x", f" {number}\n"], number=3)
    assert (
        sample.reward == pytest.approx(-0.125 + 1 / 3) and sample.status is Sample.Status.COMPLETED
    )
    assert [turn.count("<user>") for turn in script.asked] == [1, 2, 3]
    last = f"<user>It is {hint}.<eos><assistant>x<eos><user>That is not a number.<eos><assistant>"
    assert script.asked[-1].endswith(last)
    assert script.trained(sample) == (f"{wrong}<eos>x<eos> {number}\n<eos>"), (
        "what the environment says has no loss"
    )


async def test_an_episode_that_the_environment_cuts_has_its_reward(play: Any) -> None:
    wrong = str(hidden(0) % 9 + 1)
    sample, _ = await play(f"{GUESS}?guesses=2", [wrong, "x"])
    assert sample.reward == -0.125 and sample.status is Sample.Status.COMPLETED


async def test_without_room_for_another_turn_the_reward_so_far_counts(play: Any) -> None:
    sample, script = await play(GUESS, ["x"], max_turns=1)
    assert (
        sample.reward == -0.125
        and sample.status is Sample.Status.TRUNCATED
        and len(script.asked) == 1
    )


async def test_a_tag_names_the_action(play: Any) -> None:
    number = hidden(1, f"{GUESS}?tag=act")
    sample, _ = await play(
        f"{GUESS}?tag=act", [f"first <act>0</act> then <act> {number} </act>."], number=1
    )
    assert sample.reward == 1.0


async def test_an_aborted_episode_continues_where_it_was(play: Any) -> None:
    number = hidden(3)
    sample, script = await play(GUESS, ["x", "ABORT"], number=3)
    assert sample.status is Sample.Status.ABORTED and sample.reward is None
    script.says = [f"{number}<eos>"]
    await generate(script.args, sample, script.params)
    assert sample.reward == pytest.approx(-0.125 + 1 / 2), (
        "the first guess was played again for the new episode"
    )


async def test_an_aborted_episode_that_cannot_be_played_again_ends(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ABORTED sample would be continued again and again, until too many attempts without a token
    end the run.
    """
    sample, script = await play(GUESS, ["x", "ABORT"], number=3)

    def broken(*_: object) -> None:
        raise OSError("the game is broken")

    monkeypatch.setattr("guess_number.Guess.step", broken)
    await generate(script.args, sample, script.params)
    assert (
        sample.status is Sample.Status.FAILED and sample.reward_timed_out and sample.remove_sample
    )


async def test_an_environment_that_fails_costs_its_sample_only(play: Any) -> None:
    sample, _ = await play(GUESS, ["crash"])
    assert sample.reward is None and sample.remove_sample
    told = r"error: OSError: the game is broken \(.*guess_number\.py:\d+\)"
    assert re.fullmatch(told, sample.metadata["reward_failure"])


@pytest.mark.parametrize("late", [False, True])
async def test_an_environment_whose_episode_cannot_begin_is_closed(late: bool) -> None:
    """It may hold processes or connections, and each sample makes another one."""
    go_on, closed = threading.Event(), threading.Event()

    class Stuck:
        def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
            if not late:
                raise OSError("the game is broken")
            go_on.wait(60)
            return "Guess.", {}

        def close(self) -> None:
            closed.set()

    with pytest.raises(TimeoutError if late else OSError):  # which the rollout counts
        await Gymnasium(Stuck, 1, 0, "", "").start(0, StepLimits(seconds=0.05 if late else 60.0))
    go_on.set()
    async with asyncio.timeout(30):
        while not closed.is_set():
            await asyncio.sleep(0.01)


async def test_a_custom_reward_replaces_the_environments(play: Any) -> None:
    sample, _ = await play(GUESS, ["x"], max_turns=1, custom_rm_path="mine.py:reward")
    assert sample.reward is None and sample.metadata["environment_return"] == -0.125


def test_tasks_repeat_and_differ() -> None:
    numbers = [hidden(number) for number in range(20)]
    assert numbers == [hidden(number) for number in range(20)] and len(set(numbers)) > 3
    assert len(environment(f"{GUESS}?tasks=7&seed=1")) == 7


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gymnasium:Nowhere-v0", "NameNotFound"),
        ("gymnasium:no_such_module:Guess-v0", "no_such_module"),
        ("gymnasium:CartPole-v1", "a ndarray"),
        (f"{GUESS}?tasks=0", r"tasks=0.*least 1"),
        (f"{GUESS}?gueses=3", "gueses"),
    ],
)
def test_mistakes_are_told(spec: str, said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        environment(spec)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'slime-rl\[gymnasium\]'"):
        environment("gymnasium:Guess-v0?seed=98765")


async def test_the_example_of_the_guide_is_an_environment(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Path(__file__).parents[4] / "docs" / "en" / "environments.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    for block in blocks:
        name = block.split('"""')[1].partition(":")[0]
        (tmp_path / name).write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    sample, _ = await play("gymnasium:higher_lower:HigherLower-v0", ["0"] * 4)
    assert (
        sample.reward == 0.0
        and sample.status is Sample.Status.COMPLETED
        and sample.response.count("It is higher.") == 3
    )
    sample, _ = await play(f"{tmp_path}/echo.py:Echo?count=3", ["no", "word2"], number=2)
    assert sample.reward == 1.0
