"""A real encoder that judges meanings, and what brevity makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_scripts import load_example

from slime.rollout.rm_hub.custom import check_class

meaning = load_example("reward_model/meaning.py")


def test_a_short_true_answer_earns_most(minilm: Path) -> None:
    model = meaning.BriefMeaning(str(minilm))
    true, wordy = "A kitten is a young cat.", "A kitten is a young cat, " + "and so on " * 6
    false = "A kitten is a kind of ladder."
    rewards = model.compute_reward([""] * 4, [true, wordy, false, ""], ["a young cat"] * 4)
    assert rewards[0] > 0.7 > rewards[2] > rewards[3] == 0.0
    assert rewards[1] < 0.6 * rewards[0]


def test_it_is_a_class_that_a_run_takes() -> None:
    check_class(meaning.BriefMeaning, "models/all-MiniLM-L6-v2")
    with pytest.raises(ValueError):
        check_class(meaning.BriefMeaning, None)


@pytest.mark.parametrize(("words", "factor"), [(0, 0.0), (1, 1.0), (8, 1.0), (16, 0.5), (80, 0.1)])
def test_brevity(words: int, factor: float) -> None:
    assert meaning.brevity("word " * words) == pytest.approx(factor)


def test_words_are_asked_once() -> None:
    rows = meaning.rows()
    assert (
        len({row["prompt"][0]["content"] for row in rows})
        == len({row["label"] for row in rows})
        == len(rows)
    )
    assert len(rows) > 3 * meaning.HELD_OUT and rows == meaning.rows()
