"""Figures that are what their labels say, and a model that learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from figure_samples import geometry, need_torchvision
from PIL import ImageColor

from slime.data.sample import Sample


@pytest.mark.parametrize("grid", [False, True])
def test_a_figure_has_the_side_that_it_says(grid: bool) -> None:
    random = Random(0)
    for _ in range(50):
        figure = geometry.Square.random(random)
        pixels = np.asarray(figure.draw(grid))
        ink = [
            ~np.all(pixels == np.asarray(ImageColor.getrgb(name)), axis=-1)
            for name in ("white", "orange")
        ]
        rows, columns = np.nonzero(ink[0] & ink[1])
        unit = geometry.PIXELS
        assert (
            columns.min() // unit == figure.left
            and columns.max() // unit == figure.left + figure.side - 1
        )
        assert (
            rows.min() // unit == figure.top and rows.max() // unit == figure.top + figure.side - 1
        )


def test_the_same_seed_writes_the_same_questions(tmp_path: Path) -> None:
    rows = [
        json.loads(line)
        for line in geometry.write_rows(tmp_path, "train", 30, seed=3).read_text().splitlines()
    ]
    for row in rows:
        assert (
            row["label"] == str(row["metadata"]["figure"]["side"])
            and row["prompt"].count("<image>") == 1
        )
        assert Path(row["images"][0]).is_file()
    again = [
        json.loads(line)
        for line in geometry.write_rows(tmp_path, "train", 30, seed=3).read_text().splitlines()
    ]
    other = [
        json.loads(line)
        for line in geometry.write_rows(tmp_path, "eval", 30, seed=3).read_text().splitlines()
    ]
    assert rows == again and [r["metadata"] for r in rows] != [r["metadata"] for r in other]
    assert {row["label"] for row in rows} == {"1", "2", "3", "4"}


async def test_the_reward_wants_exactly_the_number() -> None:
    for response, reward in (("3", 1.0), ("33", 0.0), ("2", 0.0), ("", 0.0)):
        assert await geometry.score(None, Sample(response=response, label="3")) == reward


@pytest.mark.parametrize("architecture", geometry.ARCHITECTURES)
def test_the_warm_up_teaches_the_form_of_an_answer(architecture: str) -> None:
    need_torchvision(architecture)
    model, processor = geometry.make_model(seed=1, architecture=architecture)
    first = geometry.warm_up(model, processor, steps=1, seed=1, batch=8)
    last = geometry.warm_up(model, processor, steps=6, seed=1, batch=8)
    assert last < first / 2
