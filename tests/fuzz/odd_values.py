"""Values that programs forget about."""

from __future__ import annotations

import os
import random
from typing import Any

CASES = int(os.environ.get("SLIME_FUZZ_CASES", "40"))
"""The number of cases of each fuzzer. CONTRIBUTING has the command for more of them."""
FIRST = int(os.environ.get("SLIME_FUZZ_FIRST", "0"))
"""The number of the first case. A case is the same by its number, whatever the first one is."""


def numbers(chunk: int = 0, chunks: int = 1, each: int = 1) -> range:
    """The numbers of the cases of a chunk; one of ``each`` where a case takes long."""
    return range(FIRST // each + chunk, (FIRST + CASES) // each, chunks)


TEXTS = (
    *(
        "",
        " ",
        "x",
        "nan",
        "inf",
        "-1",
        "0",
        "1e999",
        "9" * 400,
        "true",
        "null",
        "None",
        "[]",
        "{}",
        '{"a": [1]}',
        "a b",
    ),
    *(
        "x" * 300,
        "~nobody-of-this-name/x",
        "/",
        "..",
        "/dev/null",
        "a\nb",
        "é漢😀",
        "%s%n{0}",
        "$(true)",
        "--lr",
        "a:b",
        "x.py:f",
    ),
    *(
        "@[1:2]",
        "f@[a:b]",
        "{rollout_id}",
        "{",
        '{"a":' * 3000,
        "0x10",
        "1_000",
        "--",
        "=",
        "\u202e",
        "\x07",
    ),
)
NUMBERS = (0, -1, 1, 2, 1.5, -0.5, 1e308, 2**31, 2**63, 10**30, float("nan"), float("inf"))


def value(random_: random.Random, depth: int = 0) -> Any:
    """Anything that JSON or YAML can hold, and a little more."""
    kind = random_.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return random_.choice(NUMBERS)
    if kind in (1, 2):
        return random_.choice(TEXTS)
    if kind == 3:
        return random_.choice((True, False, None))
    if kind == 4:
        return random_.randrange(-5, 300)
    if kind in (5, 6):
        return [value(random_, depth + 1) for _ in range(random_.randrange(4))]
    return {
        random_.choice(TEXTS)[:20]: value(random_, depth + 1) for _ in range(random_.randrange(3))
    }
