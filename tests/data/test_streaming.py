"""Rows read when they are needed: the same prompts in the same order as all at once, in memory that
does not grow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.config.args import Args
from slime.data import chunks as chunks_module
from slime.data.chunks import shuffled
from slime.data.dataset import Dataset
from slime.data.prompts import Report, RowKeys
from slime.data.rows import DataError, RowFile
from slime.data.source import RolloutDataSourceWithBuffer

CHECKOUT = Path(__file__).resolve().parents[2]


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(
        self, texts: list[str], add_special_tokens: bool = True
    ) -> dict[str, list[list[str]]]:
        return {"input_ids": [text.split() for text in texts]}

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return (
            "".join(f"<{message['role']}> {message['content']} " for message in messages)
            + "<assistant>"
        )


def write(path: Path, count: int) -> Path:
    """Rows of one to four words, with blank lines between some."""
    lines = []
    for i in range(count):
        lines.append(
            json.dumps({"prompt": f"p{i}" + " x" * (i % 4), "label": i, "metadata": {"row": i}})
        )
        lines += [""] * (i % 3 == 1)
    path.write_text("\n".join(lines))
    return path


def source(path: Path, shuffle: bool, **options: Any) -> RolloutDataSourceWithBuffer:
    args = Args(n_samples_per_prompt=1, rollout_shuffle=shuffle)
    return RolloutDataSourceWithBuffer(args, Dataset(str(path), Words(), seed=7, **options))


def taken(source: RolloutDataSourceWithBuffer, counts: list[int]) -> list[Any]:
    return [
        (group[0].prompt, group[0].label, group[0].group_index)
        for count in counts
        for group in source.get_samples(count)
    ]


# --- the order
# ---------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(0, 2**31 - 1))
def test_every_row_comes_once(count: int, seed: int) -> None:
    order = shuffled(range(count), count, seed)
    assert sorted(order) == list(range(count))
    middle = range(count // 3, count // 2)
    assert shuffled(middle, count, seed) == order[count // 3 : count // 2], "from any place"


def test_orders_are_as_likely_as_each_other() -> None:
    for count, orders in ((2, 2), (3, 6), (4, 24)):
        seen = Counter(tuple(shuffled(range(count), count, seed)) for seed in range(100 * orders))
        assert len(seen) == orders
        chi_square = sum((n - 100) ** 2 / 100 for n in seen.values())
        assert chi_square < 2.2 * orders + 8, "beyond one in a thousand for a fair draw"


def test_neighbours_are_torn_apart() -> None:
    order = shuffled(range(10_000), 10_000, 3)
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 15
    fixed = sum(i == row for i, row in enumerate(order))
    assert fixed < 10, "of a random order one entry stays where it was"


# --- rows by number
# ----------------------------------------------------------------------------------


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 99), max_size=40), st.booleans())
def test_rows_from_anywhere(tmp_path: Path, wanted: list[int], bom: bool) -> None:
    path = write(tmp_path / "rows.jsonl", 100)
    if bom:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    file = RowFile(str(path))
    assert len(file) == 100
    for row, raw in zip(wanted, file.read(wanted), strict=True):
        assert raw.decode()["metadata"]["row"] == row
        assert lines[int(raw.where.rpartition(":")[2]) - 1].encode() == raw.content


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.lists(st.integers(0, 2999), max_size=20), max_size=4),
    st.sampled_from([7, 1000, 5000]),
)
def test_parquet_rows_from_anywhere(tmp_path: Path, parts: list[list[int]], group: int) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / f"{group}.parquet"
    if not path.exists():
        table = pyarrow.Table.from_pylist(
            [{"prompt": str(i), "metadata": {"row": i}} for i in range(3000)]
        )
        pyarrow.parquet.write_table(table, path, row_group_size=group)
    file = RowFile(f"{path}@[10:-10]")
    assert len(file) == 2980
    for part in parts:
        wanted = [row for row in part if row < 2980]
        for row, raw in zip(wanted, file.read(wanted), strict=True):
            assert raw.content == {"prompt": str(row + 10), "metadata": {"row": row + 10}}
            assert raw.where == f"{path}, row {row + 11}"


def test_a_file_that_changes_under_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 5)
    file = RowFile(str(path))
    write(path, 4)
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        file.read([0])


# --- prompts
# -----------------------------------------------------------------------------------------

lengths = st.lists(st.integers(1, 400), min_size=1, max_size=5)


@settings(
    deadline=None,
    max_examples=of_all(20, 8),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths,
    st.integers(0, 5),
    st.sampled_from([1, 5, 300]),
    st.booleans(),
    st.sampled_from([None, 2, 4]),
)
def test_any_split_and_resume_gives_the_same_prompts_either_way(
    tmp_path: Path, counts: list[int], split: int, rows: int, shuffle: bool, max_length: int | None
) -> None:
    path = write(tmp_path / f"{rows}.jsonl", rows)
    whole = taken(source(path, shuffle, max_length=max_length), counts)
    for streaming in (False, True):
        options: dict[str, Any] = {"streaming": streaming, "max_length": max_length}
        first = source(path, shuffle, **options)
        history = taken(first, counts[:split])
        state = json.loads(json.dumps(first.state_dict()))
        second = source(path, shuffle, **options)
        second.load_state_dict(state)
        assert history + taken(second, counts[split:]) == whole


@pytest.mark.real
def test_worker_processes_change_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 1500)
    counts, options = [700, 300, 2500], {"apply_chat_template": True, "max_length": 4}
    expected = taken(source(path, True, **options), counts)
    for streaming in (False, True):
        made = source(path, True, streaming=streaming, workers=2, **options)
        begun = taken(made, counts[:1])
        state = made.state_dict()
        assert begun + taken(made, counts[1:]) == expected
        made.dataset._chunks.close()  # type: ignore[union-attr]
        other = source(path, True, streaming=streaming, **options)
        other.load_state_dict(state)
        assert begun + taken(other, counts[1:]) == expected, (
            "resumed by another number of processes"
        )
    bad = path.read_text().split("\n")
    bad[900], bad[40] = "{", '{"label": 3}'
    path.write_text("\n".join(bad))
    errors = []
    for workers in (0, 2):
        with pytest.raises(DataError) as caught:
            Dataset(str(path), workers=workers)
        errors.append(caught.value.problems)
    assert errors[0] == errors[1] and [error.split(": ")[0] for error in errors[0]] == [
        f"{path}:41",
        f"{path}:901",
    ]


def test_a_bad_row_is_named_when_it_is_reached(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 900)
    lines = path.read_text().split("\n")
    lines[1000] = lines[1000][:-1]
    path.write_text("\n".join(lines))
    made = source(path, False, streaming=True)
    assert len(taken(made, [500])) == 500
    with pytest.raises(DataError, match=f"{path}:1001.*JSON"):
        made.get_samples(300)
    path.write_text("\n".join(["{", *lines]))
    with pytest.raises(DataError, match=f"{path}:1.*JSON"):
        source(path, False, streaming=True)


def test_only_too_long_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 9)
    with pytest.raises(DataError, match=r"9 prompts.*--rollout-max-prompt-len"):
        source(path, True, streaming=True, max_length=0).get_samples(1)


MEASURE = """
import resource, sys
from slime.config.args import Args
from slime.data.dataset import Dataset
from slime.data.source import RolloutDataSource
from slime.data.validate import check_data
from slime.rollout.rm_hub import check_label
args = Args(n_samples_per_prompt=8, rollout_shuffle=True, prompt_data=sys.argv[1], streaming_data=True,
    input_key="prompt", label_key="label", rm_type="random")
assert check_data(args, check_label) == []
data = Dataset(sys.argv[1], streaming=True)
source = RolloutDataSource(args, data)
for _ in range(int(sys.argv[2])):
    source.get_samples(64)
print(len(data), source.epoch_id, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak_mib(path: Path, rollouts: int) -> float:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", MEASURE, str(path), str(rollouts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[2])


@pytest.mark.real
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    """A file a hundred times as large, also larger than all the process holds."""
    peaks = []
    for rows in (100, 10_000):
        path = tmp_path / f"{rows}.{suffix}"
        texts = ({"prompt": f"{i} " + "word " * 4000, "label": str(i)} for i in range(rows))
        if suffix == "jsonl":
            with path.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in texts)
            assert rows < 1000 or path.stat().st_size > 190e6
        else:
            import pyarrow
            import pyarrow.parquet

            schema = pyarrow.schema([("prompt", pyarrow.string()), ("label", pyarrow.string())])
            with pyarrow.parquet.ParquetWriter(path, schema) as writer:
                for _ in range(rows // 100):
                    part = [next(texts) for _ in range(100)]
                    writer.write_table(pyarrow.Table.from_pylist(part, schema))
        peaks.append(peak_mib(path, rollouts=5))
    assert peaks[1] - peaks[0] < 60, peaks


def test_a_worker_that_stands_still_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = RowFile(str(write(tmp_path / "rows.jsonl", 3)))
    chunks = chunks_module.Chunks(rows, lambda raws: ([], Report(RowKeys())), list, workers=0)
    chunks.held[0] = Future()  # of a worker, never done
    monkeypatch.setattr(chunks_module, "CHUNK_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match=r"rows.jsonl.*--num-data-workers.*0.01 s"):
        chunks[0]
