"""The curriculum: what it gives, when a level opens, and that a restored one goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_scripts import load_example
from hypothesis import given, settings
from hypothesis import strategies as st
from make_args import make_args

from slime.config.args import Args
from slime.plugins.tools.commands.make_data import make_products

curriculum = load_example("custom_data_source/curriculum.py")


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Args:
    train, _ = make_products(tmp_path_factory.mktemp("data"), seed=1)
    return make_args(
        prompt_data=str(train), rollout_seed=42, n_samples_per_prompt=4, apply_chat_template=False
    )


def factors(groups: list[Any]) -> list[tuple[int, int]]:
    return [(group[0].metadata["a"], group[0].metadata["b"]) for group in groups]


def test_it_begins_with_the_easiest_and_numbers_groups_and_samples(args: Args) -> None:
    groups = curriculum.Curriculum(args).get_samples(20)
    assert all(max(pair) <= 3 for pair in factors(groups)) and len(set(factors(groups))) > 3
    assert [group[0].group_index for group in groups] == list(range(20))
    assert [sample.index for group in groups for sample in group] == list(range(80))
    assert all(
        sample.label == str(a * b)
        for group, (a, b) in zip(groups, factors(groups), strict=True)
        for sample in group
    )


def test_a_level_opens_when_the_newest_is_solved_and_not_before(args: Args) -> None:
    source = curriculum.Curriculum(args)
    source.learn(0, [0.0] * 17 + [1.0] * 15)
    assert source.level == 0, "15 of 32 are less than half"
    source.learn(1, [1.0] * 32)
    assert source.level == 0, "another level's samples do not count"
    source.learn(0, [1.0])
    assert source.level == 1 and not source.recent
    pairs = factors(source.get_samples(60))
    assert {max(pair) <= 3 for pair in pairs} == {True, False} and max(map(max, pairs)) == 5
    for level in (1, 2, 3):
        source.learn(level, [1.0] * 32)
    assert source.level == 3, "there is no level after the last"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 16)), max_size=8), st.integers(0, 8))
def test_a_restored_source_gives_what_the_other_one_gives(
    args: Args, rollouts: list[tuple[int, int]], stop: int
) -> None:
    """Stopped after any rollout, with groups that came back in its buffer."""

    def step(source: Any, count: int, right: int) -> list[Any]:
        groups = source.get_samples(count)
        curriculum.learn(args, [scored(group, right) for group in groups[1:]], source)
        source.add_samples(groups[:1])
        return factors(groups)

    straight, stopped = curriculum.Curriculum(args), curriculum.Curriculum(args)
    wanted = [step(straight, *rollout) for rollout in rollouts]
    given_before = [step(stopped, *rollout) for rollout in rollouts[:stop]]
    restored = curriculum.Curriculum(args)
    restored.load_state_dict(stopped.state_dict())
    assert given_before + [step(restored, *rollout) for rollout in rollouts[stop:]] == wanted
    np.testing.assert_equal(restored.state_dict(), straight.state_dict())


def scored(group: list[Any], right: int) -> list[Any]:
    for position, sample in enumerate(group):
        sample.reward = float((sample.index + position) % 16 < right)
    return group


def test_a_file_without_a_level_is_refused(args: Args, tmp_path: Path) -> None:
    file = tmp_path / "easy.jsonl"
    file.write_text(
        json.dumps({"prompt": "What is 1 times 1?", "label": "1", "metadata": {"a": 1, "b": 1}})
    )
    with pytest.raises(ValueError, match=r"easy\.jsonl"):
        curriculum.Curriculum(args.with_values(prompt_data=str(file)))


def test_runs_are_compared_number_by_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = load_example("custom_data_source/compare.py")
    row = {key: 1.0 for key in compare.KEYS}
    for name, last in (("a", 0.5), ("b", 0.5), ("c", 0.25)):
        (tmp_path / name).mkdir()
        lines = [
            {**row, "rollout/step": 0},
            {"eval/x": 1},
            {**row, "rollout/step": 1, "train/loss": last},
        ]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    assert compare.main(tmp_path / "a", tmp_path / "b") == 0
    assert compare.main(tmp_path / "a", tmp_path / "c") == 1
    assert "step 1" in capsys.readouterr().out
