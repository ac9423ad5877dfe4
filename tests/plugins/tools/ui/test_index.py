"""The index of samples, the columns of metrics, and the reader of growing files."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
import zstandard

from slime.data.sample import Sample
from slime.observability import samples
from slime.observability.samples import KeptTexts, write_samples
from slime.plugins.tools.ui import NotFound, answer, path_of
from slime.plugins.tools.ui.follow import MARK, Series, Tail
from slime.plugins.tools.ui.index import SampleIndex, reward_number
from slime.plugins.tools.ui.runs import Runs


def sample(
    index: int, reward: object = 1.0, response: str = "two", prompt: object = "1 + 1?"
) -> Sample:
    made = Sample(
        group_index=index // 2, index=index, prompt=prompt, response=response, response_length=3
    )  # type: ignore[arg-type]
    made.reward, made.status, made.version_spans = reward, Sample.Status.COMPLETED, [("0.1", 0, 3)]  # type: ignore[assignment]
    return made


def count(index: SampleIndex) -> object:
    return index.rows("select count(*) as n from samples")[0]["n"]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_sample_is_found_by_its_place(tmp_path: Path, compressed: bool) -> None:
    texts = ["line\nbreak and \u2028", "\ud83d lone surrogate", "<script>alert(1)</script>", ""]
    write_samples(
        tmp_path,
        3,
        [sample(i, response=text) for i, text in enumerate(texts)],
        kept=KeptTexts(compressed=compressed),
    )
    index = SampleIndex(tmp_path, None)
    assert index.refresh() == 0
    for position, text in enumerate(texts):
        found = index.sample("rollout", 3, position)
        assert found is not None and found["response"] == text
    row = index.rows("select * from samples where position = 1")[0]
    assert (row["group_index"], row["sample_index"], row["length"], row["staleness"]) == (
        0,
        1,
        3,
        2,
    )
    assert index.sample("rollout", 3, 4) is None and index.sample("rollout", 4, 0) is None


def test_a_kind_of_a_request_reaches_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "secret_000001.jsonl").write_text('{"response": "x"}\n')
    index = SampleIndex(tmp_path, None)
    for kind in ("../secret", "samples/../../secret", "/etc/secret", "", ".."):
        assert index.sample(kind, 1, 0) is None


def test_the_index_is_kept_and_only_changed_files_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        write_samples(tmp_path, step, [sample(i) for i in range(4)])
    first = SampleIndex(tmp_path, tmp_path / "cache")
    first.refresh()
    assert count(first) == 12
    first.close()
    read: list[str] = []
    original = SampleIndex.read_file
    monkeypatch.setattr(
        SampleIndex,
        "read_file",
        lambda self, kind, step, path: (read.append(path.name), original(self, kind, step, path)),
    )
    write_samples(tmp_path, 1, [sample(i, reward=0.5) for i in range(6)])
    (tmp_path / "samples" / "rollout_000002.jsonl").unlink()
    again = SampleIndex(tmp_path, tmp_path / "cache")
    again.refresh()
    assert read == ["rollout_000001.jsonl"] and count(again) == 10
    assert again.rows("select avg(reward) as r from samples where step = 1")[0]["r"] == 0.5


def test_a_file_that_is_not_indexed_yet_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    for step in range(3):
        write_samples(tmp_path, step, [sample(i) for i in range(2)])
    index = SampleIndex(tmp_path, None)
    assert index.refresh(most=1) == 2  # the newest comes first
    assert index.rows("select distinct step from samples")[0]["step"] == 2
    assert index.sample("rollout", 0, 1) is not None


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, [sample(0)])
    SampleIndex(tmp_path, tmp_path / "cache").close()
    file = next((tmp_path / "cache").iterdir())
    file.write_bytes(b"no database" * 100)
    index = SampleIndex(tmp_path, tmp_path / "cache")
    index.refresh()
    assert count(index) == 1
    index.close()
    assert sqlite3.connect(file).execute("select count(*) from samples").fetchone() == (1,)


def test_without_a_cache_folder_the_index_is_in_memory(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, [sample(0)])
    (tmp_path / "file").write_text("")
    index = SampleIndex(tmp_path, tmp_path / "file" / "cache")
    index.refresh()
    assert count(index) == 1


def test_a_missing_label_is_empty(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, [sample(0)])
    index = SampleIndex(tmp_path, None)
    index.refresh()
    assert index.rows("select label from prompts")[0]["label"] == ""


def test_a_line_that_is_no_sample_is_counted(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 0, [sample(0), sample(1)])
    assert path is not None
    path.write_bytes(path.read_bytes() + b'{"cut": \n[1]\n')
    index = SampleIndex(tmp_path, None)
    index.refresh()
    assert index.rows("select bad from files")[0]["bad"] == 2 and count(index) == 2


def test_a_file_that_cannot_be_read_does_not_keep_others_from_the_index(tmp_path: Path) -> None:
    for step in range(3):
        write_samples(tmp_path, step, [sample(0)], kept=KeptTexts(compressed=True))
    (damaged,) = (tmp_path / "samples").glob("rollout_000001*")
    damaged.write_bytes(b"no zstandard")
    index = SampleIndex(tmp_path, None)
    assert index.refresh() == 0 and count(index) == 2


def test_a_small_file_that_becomes_huge_is_not_read_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(samples, "MOST_BYTES", 2**20)
    for step in range(2):
        write_samples(tmp_path, step, [sample(0)], kept=KeptTexts(compressed=True))
    (huge,) = (tmp_path / "samples").glob("rollout_000001*")
    huge.write_bytes(zstandard.ZstdCompressor().compress(b" " * 2**24))
    index = SampleIndex(tmp_path, None)
    assert index.refresh() == 0 and count(index) == 1
    assert "GiB" in caplog.text
    caplog.clear()
    assert (
        index.ensure("rollout", 1) == huge
        and index.sample("rollout", 1, 0) is None
        and not caplog.text
    )
    with pytest.raises(ValueError, match="is not read"):
        samples.read_samples(huge)


def test_an_index_of_more_than_64_bits_is_unknown(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, [sample(2**63)])
    index = SampleIndex(tmp_path, None)
    index.refresh()
    assert index.rows("select sample_index from samples")[0]["sample_index"] is None


@pytest.mark.parametrize(
    ("reward", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        ({"text": "x", "a": 0.5, "b": 2}, 0.5),
        (None, None),
        ("x", None),
        (float("nan"), None),
    ],
)
def test_a_reward_as_a_number(reward: object, number: float | None) -> None:
    assert reward_number(reward) == number  # type: ignore[arg-type]


def test_the_reward_is_the_one_that_was_trained_or_evaluated(tmp_path: Path) -> None:
    reward = {"length": 812, "score": 0.5, "accuracy": 1.0}
    for kind in ("rollout", "eval-math"):
        write_samples(tmp_path, 0, [sample(0, reward), sample(1, {"length": 3})], kind)
    query = "select reward from samples order by kind desc, position"
    for settings, expected in (
        ({"reward_key": "score", "eval_reward_key": "accuracy"}, [0.5, None, 1.0, None]),
        ({"reward_key": "accuracy"}, [1.0, None, 1.0, None]),
        ({}, [0.5, 3.0, 0.5, 3.0]),
    ):
        index = SampleIndex(tmp_path, None, settings)
        index.refresh()
        assert [row["reward"] for row in index.rows(query)] == expected


def test_a_tail_reads_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_bytes(b"1\n2\n3")
    assert tail.read() == (False, [b"1", b"2"])
    with path.open("ab") as file:
        file.write(b"3\n4\n")
    assert tail.read() == (False, [b"33", b"4"])
    assert tail.read() == (False, [])


def test_a_tail_notices_that_a_file_was_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1\n2\n")
    tail = Tail(path)
    tail.read()
    with path.open("r+b") as file:  # cut, and longer again before it is looked at
        file.truncate(2)
        file.seek(2)
        file.write(b"x\ny\n")
    assert tail.read() == (True, [b"1", b"x", b"y"])
    (tmp_path / "g").write_bytes(b"1\nx\ny\nz\n")
    os.replace(tmp_path / "g", path)
    assert tail.read() == (True, [b"1", b"x", b"y", b"z"])
    path.unlink()
    assert tail.read() == (True, [])


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_curves_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = Series(path)
    write_rows(
        path,
        [{"rollout/step": step, "time": 100.0 + step, "a": step, "b": None} for step in range(3)],
    )
    write_rows(path, [{"eval/step": 2, "time": 103.0, "eval/x": 0.5}])
    series.refresh()
    curve = series.curve("a")
    assert (
        curve is not None
        and curve["values"] == [0.0, 1.0, 2.0]
        and curve["times"] == [0.0, 1.0, 2.0]
    )
    assert series.curve("b")["values"] == [None] * 3 and series.curve("c") is None  # type: ignore[index]
    assert series.at(2) == {"a": 2.0, "b": None, "eval/x": 0.5} and series.at(9) == {}
    assert (series.steps, series.last_step, series.latest("b"), series.total("a")) == (
        3,
        2,
        None,
        3.0,
    )
    with path.open("a") as file:
        file.write('broken\n{"no step": 1}\n')
    write_rows(path, [{"rollout/step": 3, "time": 104.0, "a": 7}])
    series.refresh()
    assert series.latest("a") == 7 and series.unreadable == 2


def test_a_long_curve_is_joined_and_keeps_its_extremes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(
        path,
        [{"rollout/step": i, "time": i, "a": 100.0 if i == 777 else i % 2} for i in range(5000)],
    )
    series = Series(path)
    series.refresh()
    curve = series.curve("a", points=100)
    assert curve is not None and curve["count"] == 5000 and len(curve["values"]) == 100  # type: ignore[arg-type]
    assert curve["values"][0] == 0.5 and max(curve["high"]) == 100 and min(curve["low"]) == 0  # type: ignore[index,call-overload]


def spoil(path: Path, keep: slice) -> None:
    """Overwrite all of a file except for some bytes, and let it look unchanged."""
    before, content = path.stat(), path.read_bytes()
    spoilt = bytearray(b"#" * len(content))
    spoilt[keep] = content[keep]
    with path.open("r+b") as file:
        file.write(spoilt)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_no_view_reads_a_whole_file_again(tmp_path: Path) -> None:
    """Of a run that is in the index, a sample is read at its place, and of metrics.jsonl only what
    is new.
    """
    folder = tmp_path / "outputs" / "long"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("rollout_batch_size: 5\n")
    for step in range(20):
        write_samples(
            folder, step, [sample(i, response=f"answer {i} of {step}") for i in range(10)]
        )
    write_rows(
        folder / "metrics.jsonl",
        [{"rollout/step": step, "time": 100.0 + step, "a": step} for step in range(20)],
    )
    runs = Runs([folder], None)
    runs.refresh()
    text = folder / "samples" / "rollout_000007.jsonl"
    lines = text.read_bytes().splitlines(keepends=True)
    begin = sum(map(len, lines[:4]))
    spoil(text, slice(begin, begin + len(lines[4])))
    for step in set(range(20)) - {7}:
        spoil(folder / "samples" / f"rollout_{step:06d}.jsonl", slice(0, 0))
    metrics = folder / "metrics.jsonl"
    spoil(metrics, slice(metrics.stat().st_size - MARK, None))
    write_rows(metrics, [{"rollout/step": 20, "time": 120.0, "a": 20}])
    runs.refresh()
    ask = lambda *parts: answer(runs, path_of("run", "long", *parts))  # noqa: E731
    assert ask("overview")["samples"] == 200 and ask("series", "a")["values"] == list(range(21))
    assert len(ask("step", 3)["groups"]) == 5
    assert ask("prompts")["prompts"][0]["n"] == 200  # type: ignore[index]
    assert ask("sample", "rollout", 7, 4)["record"]["response"] == "answer 4 of 7"  # type: ignore[index]
    with pytest.raises(NotFound):
        ask("sample", "rollout", 7, 5)
    runs.close()


def bytes_read() -> int:
    """The bytes that this process has read so far, from files, the cache of the system included."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(),
    reason="the bytes that a process reads are counted by Linux only",
)
def test_views_read_little_of_large_files(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "large"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("rollout_batch_size: 5\n")
    for step in range(20):
        write_samples(folder, step, [sample(i, response="x" * 50_000) for i in range(10)])
    rows = [
        {"rollout/step": step, "time": step, **{f"m{i}": step / 7 for i in range(500)}}
        for step in range(200)
    ]
    write_rows(folder / "metrics.jsonl", rows)  # type: ignore[arg-type]
    runs = Runs([folder], None)
    runs.refresh()
    before = bytes_read()
    write_rows(folder / "metrics.jsonl", [{"rollout/step": 200, "time": 200.0, "m1": 1.0}])
    runs.refresh()
    for parts in (
        ("overview",),
        ("series", "m1"),
        ("steps",),
        ("step", 3),
        ("prompts",),
        ("sample", "rollout", 7, 4),
    ):
        answer(runs, path_of("run", "large", *parts))
    read = bytes_read() - before
    runs.close()
    assert 50_000 < read < 150_000, "the one sample that is shown, and not the 10 MB of all"
