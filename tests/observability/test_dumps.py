"""Sample texts and debug dumps: what is written is what comes back."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.config.observability import log_samples_count
from slime.data.sample import Sample
from slime.observability import files
from slime.observability.debug_data import (
    DebugDataError,
    load_rollout,
    save_rollout,
    save_train_data,
    subsample,
)
from slime.observability.metrics import write_evaluation
from slime.observability.samples import (
    KeptTexts,
    preview,
    read_samples,
    sample_files,
    write_samples,
)


@pytest.fixture(autouse=True)
def no_failure_yet() -> None:
    files._failures.clear()
    files.take_warnings()


def make(index: int, group: int | None, reward: float = 0.0) -> Sample:
    prompt = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": f"What is {index}?"},
    ]
    return Sample(
        group_index=group,
        index=index,
        prompt=prompt,
        tokens=[1, 2, 3 + index],
        response=f"It is {index}.\nSure.",
        response_length=1,
        label=str(index),
        reward=reward,
        loss_mask=[1],
        rollout_log_probs=[-0.5],
        status=Sample.Status.COMPLETED,
    )


def arguments(folder: Path, **more: object) -> SimpleNamespace:
    template = str(folder / "dump_{rollout_id}.pt")
    more = {"debug_rollout_only": False, **more}
    return SimpleNamespace(
        dump_details=None,
        save_debug_rollout_data=template,
        load_debug_rollout_data=template,
        **more,
    )


def test_a_rollout_comes_back_as_it_was_grouped_by_value(tmp_path: Path) -> None:
    groups = [[make(0, 5), make(1, 5)], [make(2, 9)], [[make(3, 7), make(4, 7)]]]
    args = arguments(tmp_path)
    path = save_rollout(12, groups, args, args)
    assert path == tmp_path / "dump_12.pt"
    raw = torch.load(path, weights_only=False)
    assert raw["rollout_id"] == 12 and [sample["index"] for sample in raw["samples"]] == [
        0,
        1,
        2,
        3,
        4,
    ]
    loaded = load_rollout(args.load_debug_rollout_data, 12)
    assert [[sample.index for sample in group] for group in loaded] == [[0, 1], [2], [3, 4]]
    assert [sample.to_dict() for group in loaded for sample in group] == raw["samples"]
    assert loaded[0][0].status is Sample.Status.COMPLETED


def test_evaluations_have_names_of_their_own_and_missing_dumps_are_named(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert save_rollout("eval_3", [[make(0, 0)]], args, args).name == "dump_eval_3.pt"
    with pytest.raises(DebugDataError, match=r"dump_8\.pt for rollout 8"):
        load_rollout(args.load_debug_rollout_data, 8)
    torch.save([1, 2], tmp_path / "dump_8.pt")
    with pytest.raises(DebugDataError, match="samples"):
        load_rollout(args.load_debug_rollout_data, 8)
    args.save_debug_rollout_data = "x_{step}.pt"
    with pytest.raises(DebugDataError, match=r"\{rollout_id\}"):
        save_rollout(0, [], args, args)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.one_of(st.floats(0.01, 1.0), st.integers(1, 40)),
)
def test_subsample_keeps_whole_groups_of_head_and_tail_in_order(
    sizes: list[int], amount: float
) -> None:
    groups = [[(i, j) for j in range(size)] for i, size in enumerate(sizes)]
    kept = subsample(groups, amount)
    assert 1 <= len(kept) <= len(groups)
    head = (len(kept) + 1) // 2
    assert kept == groups[:head] + (
        groups[len(groups) - (len(kept) - head) :] if len(kept) > head else []
    )
    if amount == 1.0 and isinstance(amount, float):
        assert kept == groups


def test_subsample_by_flag(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    save_rollout(0, [[make(2 * g, g), make(2 * g + 1, g)] for g in range(6)], args, args)
    assert [
        group[0].group_index for group in load_rollout(args.load_debug_rollout_data, 0, 0.5)
    ] == [0, 1, 5]
    with pytest.raises(DebugDataError, match="subsample"):
        subsample([[1]], 0)


def shard(indices: list[int]) -> dict[str, object]:
    tokens = [torch.tensor([i]) for i in indices]
    return {
        "tokens": tokens,
        "sample_indices": indices,
        "raw_reward": [i / 10 for i in indices],
        "rollout_id": 4,
    }


def test_the_dump_of_the_trainers_is_in_order_of_the_samples(tmp_path: Path) -> None:
    path = save_train_data(
        str(tmp_path / "train_{rollout_id}.pt"), 4, 0, [shard([3, 0]), shard([2, 1])]
    )
    dump = torch.load(path, weights_only=False)
    assert dump["format_version"] == 2 and dump["rollout_id"] == 4 and len(dump["dp_shards"]) == 2
    assert [sample["sample_indices"] for sample in dump["samples"]] == [0, 1, 2, 3]
    assert dump["raw_reward"] == [0.0, 0.1, 0.2, 0.3]


def test_texts_are_one_json_row_a_sample(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 3, [[make(0, 0, 1.0), make(1, 0)], [make(2, 1)]])
    assert path is not None and path == tmp_path / "samples" / "rollout_000003.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["group_index"], row["index"], row["reward"]) for row in rows] == [
        (0, 0, 1.0),
        (0, 1, 0.0),
        (1, 2, 0.0),
    ]
    assert (
        rows[0]["response"] == ("It is 0.\nSure.")
        and rows[0]["status"] == "completed"
        and "tokens" not in rows[0]
    )
    write_samples(tmp_path, 3, [make(0, 0)], kind="eval-a/b")
    assert (tmp_path / "samples" / "eval-a-b_000003.jsonl").is_file()


def test_how_many_texts_are_written(tmp_path: Path) -> None:
    """The same positions in every run, so that files of two runs can be compared."""
    samples = [make(i, i // 4) for i in range(40)]

    def written(value: str, samples: list[Sample] = samples) -> list[int]:
        kept = KeptTexts(log_samples_count(value))
        path = write_samples(tmp_path, 0, samples, kept=kept)
        return [row["index"] for row in read_samples(path)] if path else []

    assert written("all") == list(range(40)) == written("40") == written("1000")
    assert written("10") == list(range(0, 40, 4))
    assert written("3") == [0, 13, 26]
    assert written("3", []) == []
    shutil.rmtree(tmp_path / "samples")
    assert written("none") == written("0") == []
    assert not (tmp_path / "samples").exists()


def test_compressed_texts_come_back_and_replace_plain_ones(tmp_path: Path) -> None:
    samples = [make(i, 0) for i in range(50)]
    samples[0].response = "a\u2028b\ud83d"  # a separator of lines, and half of a character
    plain = write_samples(tmp_path, 7, samples)
    assert plain is not None
    rows, size = read_samples(plain), plain.stat().st_size
    packed = write_samples(tmp_path, 7, samples, kept=KeptTexts(compressed=True))
    assert packed is not None and packed.name == "rollout_000007.jsonl.zst"
    assert (
        read_samples(packed) == rows
        and len(rows) == 50
        and rows[0]["response"] == samples[0].response
    )
    assert packed.stat().st_size < size / 4
    assert sample_files(tmp_path) == {"rollout_000007": packed}


def test_older_texts_are_removed_by_kind_and_not_those_of_a_later_step(tmp_path: Path) -> None:
    kept = KeptTexts(last=3)
    for step in (0, 5, 10, 15):
        write_samples(tmp_path, step, [make(0, 0)], "eval-aime_24", kept)
    for step in (*range(8), 3):  # a run that went back to step 3
        write_samples(tmp_path, step, [make(0, 0)], kept=kept)
    (tmp_path / "samples" / "notes_000001.txt").write_text("the user's own")
    write_samples(tmp_path, 4, [make(0, 0)], kept=kept)
    assert list(sample_files(tmp_path)) == [
        "eval-aime_24_000005", "eval-aime_24_000010", "eval-aime_24_000015",
        "rollout_000003", "rollout_000004", "rollout_000005", "rollout_000006", "rollout_000007",
    ]  # fmt: skip
    for step in range(5, 9):
        write_samples(tmp_path, step, [make(0, 0)], kept=kept)
    assert list(sample_files(tmp_path, "rollout")) == [
        "rollout_000006",
        "rollout_000007",
        "rollout_000008",
    ]
    assert (tmp_path / "samples" / "notes_000001.txt").exists()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_does_not_fit_leaves_the_older_one_and_no_rest(
    tmp_path: Path, small_disk: Callable[[int], None], compressed: bool
) -> None:
    """What was written of it would take the last of the room."""
    kept = KeptTexts(compressed=compressed)
    path = write_samples(tmp_path, 1, [make(0, 0)], kept=kept)
    assert path is not None
    large = [make(i, 0) for i in range(3000)]
    for sample in large:
        sample.response = os.urandom(20).hex()
    small_disk(20_000)
    write_samples(tmp_path, 1, large, kept=kept)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert len(read_samples(path)) == 1


def test_a_dump_that_does_not_fit_ends_only_a_run_that_makes_nothing_else(
    tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    groups = [[make(i, i) for i in range(200)]]
    small_disk(1000)
    args = arguments(tmp_path)
    save_rollout(0, groups, args, args)
    save_train_data(str(tmp_path / "train_{rollout_id}.pt"), 0, 0, [shard([3, 0])])
    assert list(tmp_path.iterdir()) == []
    told = files.take_warnings()
    assert [
        "--save-debug-rollout-data" in line or "--save-debug-train-data" in line for line in told
    ] == [True, True]
    args.debug_rollout_only = True
    with pytest.raises(OSError):
        save_rollout(0, groups, args, args)


def test_warnings_are_handed_on_once(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    for _ in range(3):
        write_samples(tmp_path, 0, [make(0, 0)])
    told = files.take_warnings()
    assert told and all("the texts of samples could not be written" in line for line in told)
    assert files.take_warnings() == []


def test_the_preview_shows_best_and_worst_on_one_line_each() -> None:
    lines = preview([make(i, 0, reward=i / 10) for i in range(5)], count=2)
    assert len(lines) == 2 and all("\n" not in line for line in lines)
    assert lines[0].startswith("reward 0.4") and lines[1].startswith("reward 0 ")
    assert "What is 4? → It is 4. Sure." in lines[0] and lines[0].endswith("label 4")
    assert preview([], 2) == []
    rendered = make(0, 0)
    rendered.prompt = (
        "<|im_start|>system\n"
        "Brief.<|im_end|>\n"
        "<|im_start|>user\n"
        "What is 9\n"
        "times 3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    rendered.response = "9 × 3 = 27<|im_end|>"
    assert preview([rendered], 1) == ["reward 0 │ What is 9 times 3? → 9 × 3 = 27 │ label 0"]
    odd = make(0, 0)
    odd.reward, odd.prompt = {"score": 1.0}, "plain " * 100
    (line,) = preview([odd], 1, width=40)
    asked = line.split("│")[1].split("→")[0].strip()
    assert asked == "plain pla…lain plain", "both ends stay"


def test_the_preview_is_short_and_harmless_to_a_terminal() -> None:
    """A label may be the tests of a program, and a response anything that a model samples."""
    sample = make(0, 0)
    sample.response, sample.label = (
        "\x1b]0;title\x07\x1b[2J a\ud83db \u0645\u06cc\u200c\u0634",
        "tests\n" * 50_000,
    )
    sample.reward = {"score": 1.0, "why": "w" * 10_000}
    (line,) = preview([sample], 1)
    assert (
        "→ �]0;title��[2J a�b \u0645\u06cc\u200c\u0634 │" in line
        and len(line) < 400
        and "\n" not in line
    )


def test_texts_of_samples_are_written_whatever_is_in_them(tmp_path: Path) -> None:
    """Half of a surrogate pair, keys that JSON has not, and values that hold themselves."""
    ring: dict[str, Any] = {}
    ring["self"] = ring
    odd = [Sample(prompt="p", response="a\ud83db"), Sample(prompt="p", metadata={("a", 1): 2, "kept": 3}),
           Sample(prompt="p", response="whole", metadata={"ring": ring})]  # fmt: skip
    path = write_samples(tmp_path, 0, odd)
    assert path is not None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert (
        lines[0]["response"] == "a\ud83db"
        and "kept" in lines[1]["metadata"]
        and lines[2]["response"] == "whole"
    )


def test_a_full_disk_costs_the_file_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full refuses every write as a full disk does."""
    (tmp_path / "samples").write_text("a file where the folder should be")
    (tmp_path / "eval").write_text("here as well")
    write_samples(tmp_path, 0, [Sample(prompt="p", response="r")])
    write_evaluation(tmp_path, 0, {"math": {"rewards": [1.0]}}, {"eval/math": 1.0})
    for _ in range(5):
        with files.best_effort("something"), open("/dev/full", "w") as file:
            file.write("x")
            file.flush()
    told = [record.message for record in caplog.records if "the run continues" in record.message]
    assert sum("something" in line for line in told) == 3 and any(
        "texts of samples" in line for line in told
    )
    assert any("the evaluation's file" in line for line in told)


def test_the_file_of_an_evaluation_is_strict_json(tmp_path: Path) -> None:
    rewards = [1.0, math.inf, math.nan, numpy.float32(0.5)]
    metrics = {"eval/math": math.nan, "eval/math-pass@2": numpy.float32(0.25)}
    path = write_evaluation(
        tmp_path, 0, {"math": {"rewards": rewards, "n_samples_per_prompt": 2}}, metrics
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (found,) = json.loads(path.read_text(), parse_constant=refuse)["datasets"].values()
    assert found["rewards"] == [[1.0, None], [None, 0.5]]
    assert found["metrics"] == {"reward": None, "pass@2": 0.25}
