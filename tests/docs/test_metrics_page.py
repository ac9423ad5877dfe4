"""The page of metrics names what recorded runs have written, and what the code writes by a constant
name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs/en/metrics.md").read_text(encoding="utf-8")
RUNS = sorted(CHECKOUT.glob("benchmarks/results/*metrics.jsonl"))


def patterns() -> list[str]:
    """A regular expression for each name of the page, with the prefix of its section."""
    found = []
    for section in PAGE.split("\n## ")[1:]:
        prefix = re.match(r"`(\w+/)`", section)
        assert prefix is not None, section[:40]
        for name in re.findall(r"`([^`\s]+)`", section.partition("\n")[2]):
            if not name.startswith("--"):
                whole = name if re.match(r"(train|passrate)/", name) else prefix[1] + name
                found.append(
                    re.sub(
                        r"<\w+>",
                        r"[\\w@.+-]+(/\\w+)*",
                        whole.replace("+", r"\+").replace(".", r"\."),
                    )
                )
    return found


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem)
def test_the_page_names_what_a_run_wrote(run: Path) -> None:
    rows = [json.loads(line) for line in run.read_text(encoding="utf-8").splitlines()]
    names = {name for row in rows for name in row} - {
        "time",
        "rollout/step",
        "eval/step",
        "train/step",
    }
    known = re.compile("|".join(patterns()))
    old = {"train/audit_logprob_diff"}  # of older code
    assert not sorted(name for name in names - old if not known.fullmatch(name))


def test_the_page_names_the_constants_of_the_code() -> None:
    known = re.compile("|".join(patterns()))
    code = [(file, file.read_text(encoding="utf-8")) for file in CHECKOUT.glob("slime/*/**/*.py")]
    written = r"(?:metrics|pending)\[\"((?:rollout|train|perf|eval)/[\w/@+.-]+)\"\] ="
    names = {
        name for file, text in code if "cli" not in file.parts for name in re.findall(written, text)
    }
    assert len(names) > 10
    assert not sorted(name for name in names if not known.fullmatch(name))
