"""Odd rows, flags and prompts of a program: each is refused with all of its problems, or can be
used as it is.
"""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from config_parts import Workplace
from odd_values import TEXTS, numbers, value

from slime.api import arguments
from slime.api.arguments import RowsError, check_prompts, parse
from slime.config.args import FLAGS
from slime.config.parser import ConfigError
from slime.data.rows import RowFile

CHUNKS = 10
OBJECTS = (
    *(
        b"x",
        object(),
        {"x"},
        np.int64(3),
        np.float32("nan"),
        np.array([[1.0, 2.0]]),
        np.array(["a", None], object),
    ),
    *(
        np.datetime64("NaT"),
        date(2020, 1, 1),
        1j,
        range(3),
        print,
        int,
        Path("x"),
        "\ud83d",
        "a\udfff",
        10**5000,
    ),
    *(MappingProxyType({"a": 1}), (1, 2), float("-inf"), np.float64, iter(())),
)
NAMES = (
    *FLAGS,
    "model",
    "data",
    "reward",
    "generate",
    "filter",
    "eval_data",
    "sglang_mem_fraction_static",
    "no_flag",
)
Random = random.Random


def odd(random_: Random, depth: int = 0) -> Any:
    """Anything that a program can hold."""
    kind = random_.randrange(6)
    if kind < 2:
        return random_.choice(OBJECTS)
    if kind == 2 and depth < 3:
        return {
            random_.choice((*TEXTS[:8], 1, None, ("a",), "\ud83d")): odd(random_, depth + 1)
            for _ in range(2)
        }
    if kind == 3 and depth < 3:
        return [odd(random_, depth + 1) for _ in range(random_.randrange(3))]
    return value(random_)


def rows(random_: Random) -> Any:
    kind = random_.random()
    if kind < 0.1:
        return odd(random_)
    columns = ("prompt", "label", "metadata", "\ud83d" if random_.random() < 0.1 else "other")
    made: list[Any] = [
        {name: odd(random_) if random_.random() < 0.4 else value(random_) for name in columns}
        for _ in range(random_.randrange(1, 4))
    ]
    if kind < 0.3:
        made[random_.randrange(len(made))] = odd(random_)
    return made


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_rows(tmp_path: Path, chunk: int) -> None:
    for case in numbers(chunk, CHUNKS):
        data = rows(Random(f"rows {case}"))
        try:
            path = arguments.file_of(data, tmp_path / "data.jsonl")
        except RowsError as error:
            told = str(error).splitlines()
            assert told and all(0 < len(one) < 5000 for one in told), case
            str(error).encode()
            continue
        except Exception as error:
            raise AssertionError(f"case {case}") from error
        if path == str(tmp_path / "data.jsonl"):
            file = RowFile(path)
            assert all(row.decode() is not None for row in file.read(range(len(file)))), case
            json.dumps(
                [json.loads(line) for line in Path(path).read_text().splitlines()], allow_nan=False
            )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_keywords(workplace: Workplace, tmp_path: Path, chunk: int) -> None:
    for case in numbers(chunk, CHUNKS):
        random_ = Random(f"keywords {case}")
        keywords: dict[str, Any] = {
            "model": str(tmp_path / "model"),
            "data": [{"prompt": "1 + 1 =", "label": "2"}],
        }
        for _ in range(random_.randrange(1, 5)):
            keywords[random_.choice(NAMES)] = odd(random_)
        try:
            parse(keywords, tmp_path)
        except ConfigError as error:
            assert error.problems and all(isinstance(one, str) and one for one in error.problems), (
                case
            )
        except Exception as error:
            raise AssertionError(f"case {case}: {sorted(keywords)}") from error


def test_prompts() -> None:
    for case in numbers():
        random_ = Random(f"prompts {case}")
        message = {"role": random_.choice(("user", odd(random_))), "content": odd(random_)}
        asked = random_.choice(
            (odd(random_), [message], [[message], odd(random_)], "x", ["x", "y"])
        )
        n = random_.choice((1, 2, odd(random_)))
        sampling = {"temperature": odd(random_)} if random_.random() < 0.3 else {}
        try:
            found = check_prompts(asked, n, sampling)
        except ValueError as error:
            str(error).encode()
            assert str(error), case
        except Exception as error:
            raise AssertionError(f"case {case}: {asked!r:.500}") from error
        else:
            json.dumps([found, sampling], allow_nan=False, ensure_ascii=False).encode()
            assert 1 <= n <= 10_000, case
