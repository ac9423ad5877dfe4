"""Damaged and odd data files: rows, or problems that name the file; the check and the data set
agree.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from engine_parts import make_tokenizer
from odd_values import TEXTS, numbers, value

from slime.config.files import first_row
from slime.data.dataset import Dataset
from slime.data.prompts import Report, RowKeys, parse_rows
from slime.data.rows import DataError, RowFile

CHUNKS = 10
COLUMNS = ("prompt", "label", "metadata", "tools", "images")
MOST_ROWS = 200


def row(random_: random.Random) -> Any:
    if random_.random() < 0.6:
        good: dict[str, Any] = {"prompt": "What is 2 + 2?", "label": "4"}
        if random_.random() < 0.3:
            good["prompt"] = [
                {"role": "user", "content": [{"type": "text", "text": "hi"}, value(random_)]}
            ]
        if random_.random() < 0.3:
            good[random_.choice(COLUMNS)] = value(random_)
        return good
    return value(random_)


def damaged(random_: random.Random, content: bytes) -> bytes:
    """Flipped, cut, doubled or foreign bytes, in about half of the cases."""
    for _ in range(random_.choice((0, 0, 1, 1, 3))):
        at = random_.randrange(len(content) + 1)
        kind = random_.randrange(5)
        if kind == 0:
            content = content[:at]
        elif kind == 1 and at < len(content):
            content = (
                content[:at]
                + bytes([content[at] ^ (1 << random_.randrange(8))])
                + content[at + 1 :]
            )
        elif kind == 2:
            content = (
                content[:at]
                + random_.choice((b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"NaN"))
                + content[at:]
            )
        elif kind == 3:
            content += content[at:]
        else:
            content = content[:at] + json.dumps("\ud800").encode() + content[at:]
    return content


def write(random_: random.Random, folder: Path) -> Path:
    rows = [row(random_) for _ in range(random_.randrange(6))]
    kind = random_.choice((".jsonl", ".jsonl", ".parquet", ".json"))
    file = folder / f"data{kind}"
    if kind == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = [random_.choice(TEXTS) or "x" for _ in range(20)]
        pq.write_table(
            pa.table({"prompt": texts, "label": [str(i) for i in range(20)]}),
            file,
            row_group_size=5,
        )
        content = file.read_bytes()
    elif kind == ".json":
        content = json.dumps(rows).encode()
    else:
        content = b"".join(json.dumps(one).encode() + b"\n" for one in rows)
    file.write_bytes(damaged(random_, content))
    return file


def checked(file: Path) -> Report | None:
    """What the check before the start finds; None where the file cannot be read at all."""
    keys = RowKeys()
    try:
        rows = RowFile(str(file))
        return parse_rows(rows.read(range(min(len(rows), MOST_ROWS))), keys)[1]
    except DataError as error:
        assert all(str(file) in problem and len(problem) < 2000 for problem in error.problems), (
            error.problems
        )
        return None


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_data_files(tmp_path: Path, chunk: int) -> None:
    tokenizer = make_tokenizer()
    for case in numbers(chunk, CHUNKS):
        random_ = random.Random(f"data {case}")
        file = write(random_, tmp_path)
        try:
            first_row(str(file))
            report = checked(file)
            if file.suffix == ".parquet" and report is not None and report.rows >= MOST_ROWS:
                continue  # a damaged footer may promise any number of rows
            try:
                data = Dataset(
                    str(file), tokenizer, apply_chat_template=random_.random() < 0.5, max_length=400
                )
            except DataError as error:
                assert error.problems and all(
                    isinstance(problem, str) for problem in error.problems
                )
            else:
                assert report is not None and not report.wrong.count
                for sample in data.samples[:5]:
                    text = (
                        sample.prompt
                        if isinstance(sample.prompt, str)
                        else json.dumps(sample.prompt)
                    )
                    tokenizer(text)
        except Exception as error:
            raise AssertionError(f"case {case}: {file.read_bytes()[:300]!r}") from error
