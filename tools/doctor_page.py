"""Write the tables of planted faults and of whole runs into benchmarks/doctor.md:

    python tools/doctor_page.py

Each fault of tests/plugins/tools/doctor/faults.py is planted into several recordings of healthy
runs. A diagnosis counts as right if it is the first finding in all of them. The healthy runs
themselves must have no finding but hints. The whole runs are those of benchmarks/doctor_runs.py, as
its results were recorded.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from slime.plugins.tools.doctor import diagnose  # noqa: E402
from tests.plugins.tools.doctor.faults import HEALTHY, HOSTS, Fault, faults, healthy  # noqa: E402

PAGE = ROOT / "benchmarks" / "doctor.md"
RUNS = ROOT / "benchmarks" / "results" / "doctor_runs_cpu.json"
PLANTED = "<!-- table: python tools/doctor_page.py -->"
WHOLE = "<!-- table of whole runs: python tools/doctor_page.py -->"
END = "<!-- end of the table -->"


def alarms(path: Path) -> list[str]:
    """Return the kinds of findings in a healthy run that are no hints: false alarms."""
    return [finding.kind for finding in diagnose(healthy(path)) if not finding.hint]


def first_kinds(fault: Fault) -> str:
    """Return the kinds of the first findings, with how often each came if they differ."""
    counts = Counter(
        found.kind if (found := fault.first(run)) is not None else "nothing" for run in fault.runs
    )
    if len(counts) == 1:
        return f"`{next(iter(counts))}`"
    return ", ".join(
        f"`{kind}` in {count} of {len(fault.runs)}" for kind, count in counts.most_common()
    )


def lines() -> Iterator[str]:
    """Yield the lines of the table, with a summary before it."""
    found = list(faults())
    right = sum(fault.right == len(fault.runs) for fault in found)
    healthy = sum(not alarms(path) for path in HEALTHY)
    yield (
        f"Planted: {len(found)} faults, each into {len(HOSTS)} recordings. The first diagnosis is "
        "right in all of"
    )
    yield f"them for **{right} of {len(found)}** faults. Healthy recordings without an alarm:"
    yield f"**{healthy} of {len(HEALTHY)}**."
    yield ""
    yield "| planted fault | first diagnosis | right |"
    yield "|---|---|---|"
    for fault in found:
        words = fault.words.replace("|", "\\|")
        yield (
            f"| {words} | {first_kinds(fault)} | "
            f"{'yes' if fault.right == len(fault.runs) else 'no'} |"
        )


def lines_of_runs() -> Iterator[str]:
    """Yield the lines of the table of whole runs, the faulty ones first."""
    runs = sorted(
        json.loads(RUNS.read_text(encoding="utf-8")).values(), key=lambda run: not run["expected"]
    )
    faulty = [run for run in runs if run["expected"]]
    alarms = sum(not run["right"] for run in runs if not run["expected"])
    right = sum(run["right"] for run in faulty)
    yield f"Faulty runs whose first finding is the right one: **{right} of {len(faulty)}**."
    yield f"Healthy runs with a finding: **{alarms} of {len(runs) - len(faulty)}**."
    yield ""
    yield "| whole run | steps | first finding | what the doctor says first | right |"
    yield "|---|---|---|---|---|"
    for run in runs:
        kind = f"`{run['first']}`" if run["first"] else "none"
        hints = (
            f" (hint: {', '.join(f'`{hint}`' for hint in run['hints'])})" if run["hints"] else ""
        )
        said = run["findings"].get(run["first"], "").replace("|", "\\|")
        what = run["what"] if run["expected"] else f"healthy: {run['what']}"
        yield (
            f"| {what} | {run['steps']} | {kind}{hints} | {said} | "
            f"{'yes' if run['right'] else 'no'} |"
        )


def page(text: str) -> str:
    """Return the page with the tables of now."""
    for begin, made in ((PLANTED, lines()), (WHOLE, lines_of_runs())):
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(END)
        text = f"{head}{begin}\n\n" + "\n".join(made) + f"\n\n{END}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
