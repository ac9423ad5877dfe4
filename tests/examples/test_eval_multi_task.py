"""The evaluation sets that the example writes, as slime reads them: settings per set, labels that
are right.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_scripts import load_example, small_datasets
from make_args import make_args

from slime.config.args import Args
from slime.data.eval_config import resolve_eval_datasets
from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample

prepare = load_example("eval_multi_task/prepare.py")


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_each_set_has_settings_of_its_own(tmp_path: Path) -> None:
    config = prepare.prepare(tmp_path, None, rows=5)
    args = Args(
        eval_config=str(config),
        n_samples_per_eval_prompt=3,
        rollout_temperature=1.0,
        rm_type="math",
    )
    sets = {entry.name: entry for entry in resolve_eval_datasets(args)}
    assert {
        name: (s.n_samples_per_eval_prompt, s.temperature, s.max_response_len)
        for name, s in sets.items()
    } == {
        "sum": (1, 0.0, 16),
        "difference": (4, 0.8, 16),
        "product": (8, 0.8, 24),
    }
    assert {entry.rm_type for entry in sets.values()} == {"last_number"}
    assert all(entry.apply_chat_template for entry in sets.values())
    questions = [row["prompt"][0]["content"] for entry in sets.values() for row in rows(entry.path)]
    assert len(questions) == 15 and len(set(questions)) > 10


def test_answers_are_right_and_the_same_each_time(tmp_path: Path) -> None:
    for name, (template, _) in prepare.OWN.items():
        made = list(prepare.made(name, template, 20))
        assert made == list(prepare.made(name, template, 20))
        for row in made:
            _, _, a, word, b = row["prompt"][0]["content"].rstrip("?").split()
            sign = {"plus": "+", "minus": "-", "times": "*"}[word]
            assert eval(f"{a} {sign} {b}") == int(row["label"]) >= 0


async def test_the_shared_sets_keep_labels_that_their_verifiers_read(tmp_path: Path) -> None:
    config = prepare.prepare(tmp_path / "out", small_datasets(tmp_path / "sets"), rows=1)
    sets = resolve_eval_datasets(Args(eval_config=str(config)))
    assert [entry.name for entry in sets] == ["gsm8k", "math500", "aime"]
    for entry in sets:
        (row,) = rows(entry.path)
        args = make_args(rm_type=entry.rm_type, reward_timeout=30.0, reward_workers=1)
        sample = Sample(response="so it is \\boxed{8}", label=row["label"])
        assert await async_rm(args, sample) == 1, entry.name


@pytest.mark.needs_datasets
def test_the_real_sets_are_read_whole(datasets_dir: Path, tmp_path: Path) -> None:
    config = prepare.prepare(tmp_path, datasets_dir, rows=10_000)
    counts = [
        len(rows(entry.path)) for entry in resolve_eval_datasets(Args(eval_config=str(config)))
    ]
    assert counts == [1319, 500, 30]
