"""Write small repositories with one bug each, as tasks in Harbor's format.

    python make_tasks.py FOLDER

Each task is a folder: the instruction, the limits, the repository as the model finds it, its tests,
and the repair. The tests call the repository in a process of its own and compare what it prints, so
that code in the repository cannot pass them by ending their process.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Repository:
    """A module, the line that is wrong in the task, and calls with their results."""

    name: str
    module: str
    right: str
    wrong: str
    calls: dict[str, object]
    report: str


REPOSITORIES = (
    Repository(
        "cart",
        '''"""Totals of a shopping cart. Prices are in cents."""


def total(items, discount=0):
    """The sum of the items, less a discount in percent."""
    amount = sum(price * count for price, count in items)
    return amount - amount * discount // 100
''',
        "amount - amount * discount // 100",
        "amount - discount",
        {"total([(250, 2)])": 500, "total([(250, 2)], 10)": 450, "total([], 50)": 0},
        "total([(250, 2)], 10) gives 490, but ten percent less than 500 is 450.",
    ),
    Repository(
        "words",
        '''"""Counts of words."""


def most_common(text):
    """The word that occurs most often, in small letters; the first of several."""
    words = text.lower().split()
    return max(words, key=words.count)
''',
        "words = text.lower().split()",
        "words = text.split()",
        {"most_common('a B b')": "b", "most_common('The the end')": "the", "most_common('x')": "x"},
        "most_common('a B b') gives 'a', although b occurs twice.",
    ),
    Repository(
        "ranges",
        '''"""Closed ranges of whole numbers."""


def overlap(first, second):
    """How many numbers are in both ranges."""
    low = max(first[0], second[0])
    high = min(first[1], second[1])
    return max(0, high - low + 1)
''',
        "max(0, high - low + 1)",
        "max(0, high - low)",
        {"overlap((1, 4), (3, 9))": 2, "overlap((1, 2), (2, 3))": 1, "overlap((1, 2), (3, 4))": 0},
        "overlap((1, 4), (3, 9)) gives 1, but both 3 and 4 are in both ranges.",
    ),
    Repository(
        "clock",
        '''"""Times of day."""


def add_minutes(time, minutes):
    """The time HH:MM that many minutes later, also on the next day."""
    hours, rest = map(int, time.split(":"))
    later = (hours * 60 + rest + minutes) % 1440
    return f"{later // 60:02}:{later % 60:02}"
''',
        "(hours * 60 + rest + minutes) % 1440",
        "hours * 60 + rest + minutes",
        {"add_minutes('08:50', 20)": "09:10", "add_minutes('23:50', 20)": "00:10"},
        "add_minutes('23:50', 20) gives '24:10'.",
    ),
)

TOML = """schema_version = "1.4"

[metadata]
needs_image = false

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0

[environment]
network_mode = "no-network"
memory_mb = 1024
storage_mb = 64
"""
DOCKERFILE = """FROM python:3.11-slim
WORKDIR /app
COPY . .
"""
TEST = """#!/bin/bash
# The share of the tests that pass. What the tested code may have written there is removed first.
share="$(python3 -I /tests/check.py)"
rm -rf /logs/verifier/reward.*
echo "${share:-0}" > /logs/verifier/reward.txt
"""
CHECK = '''"""Call the repository once for each test, in a process of its own; print the share that is right."""

import json
import pathlib
import subprocess
import sys

MODULE = {module!r}
cases = json.loads(pathlib.Path(__file__).with_name("cases.json").read_text())
passed = 0
for call, wanted in cases.items():
    code = f"import sys; sys.path.insert(0, '/app'); import {{MODULE}} as m; print(repr(m.{{call}}))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=10
        )
        passed += done.stdout.splitlines()[-1:] == [repr(wanted)]
    except subprocess.TimeoutExpired:
        pass
print(passed / len(cases))
'''


def write(folder: Path, repository: Repository) -> None:
    """Write one task."""
    name = repository.name
    files = {
        "instruction.md": f"The module {name}.py in the working directory has a bug: "
        f"{repository.report} Find the line and correct it.\n",
        "task.toml": TOML,
        "environment/Dockerfile": DOCKERFILE,
        f"environment/{name}.py": repository.module.replace(repository.right, repository.wrong),
        "tests/test.sh": TEST,
        "tests/check.py": CHECK.format(module=name),
        "tests/cases.json": json.dumps(repository.calls),
        "solution/solve.sh": f"#!/bin/bash\ncat > /app/{name}.py <<'END'\n{repository.module}END\n",
    }
    for path, text in files.items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def main() -> None:
    """Write all tasks, and print their folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for repository in REPOSITORIES:
        write(folder, repository)
    print(folder)


if __name__ == "__main__":
    main()
