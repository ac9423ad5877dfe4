"""The figures of GPU releases: benchmarks/history.jsonl has a row for each, the newest is on the pages.

    python tools/figures.py                                                   # write the pages
    python tools/figures.py --add benchmarks/results/h200_release_*.json      # a new row, then the pages
    python tools/figures.py --check                                           # status 1: slower, unexplained

A figure that is more than 5% worse than the last of the same part on the same card needs a
``reason`` in its row (``--reason``). Utilisation is not compared: the rate that it is a share of
differs by 5% from card to card.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HISTORY = ROOT / "benchmarks" / "history.jsonl"
BEGIN, END = "<!-- table: python tools/figures.py -->", "<!-- end of the table -->"
TOLERANCE, RATE = 0.05, "train_tokens_per_gpu_per_second"
TRAINING = (RATE, "train_mfu", "log_probs_mfu", "peak_gib", "gpus", "flash_attention_4")
COMPARED = {RATE: 1, "peak_gib": -1, "step_seconds": -1, "kilojoules": -1}
"""The figures that are held to the tolerance, and whether more is better (1) or worse (-1)."""
LABELS = {
    "mfu": "Qwen3-4B, FSDP",
    "mfu_0.6b": "Qwen3-0.6B, FSDP",
    "mfu_gpus": "Qwen3-4B, FSDP",
    "mfu_megatron_gpus": "Qwen3-4B, Megatron with TP2 and sequence parallelism",
}
FRONT = ("mfu", "mfu_gpus")
PHASES, FILES = ("rollout", "train", "update_weights"), "results"
Row = dict[str, Any]


def read_history() -> list[Row]:
    return [json.loads(line) for line in HISTORY.read_text(encoding="utf-8").splitlines()]


def row_of(paths: list[Path], reason: str = "") -> Row:
    """A row from one table or several of one commit.

    Raises:
        SystemExit: They are of different commits or cards, or no part has ended well.
    """
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if len({(table["commit"], table["card"]) for table in tables}) != 1:
        raise SystemExit("the tables are of different commits or cards: add one after the other")
    parts: dict[str, Row] = {}
    for name, part in ((name, part) for table in tables for name, part in table["parts"].items()):
        figures = part["figures"]
        if part["status"] == "exit 0" and name in LABELS:
            parts[name] = {key: figures[key] for key in TRAINING}
        elif part["status"] == "exit 0" and name == "step":
            times = figures["times"]
            parts[name] = {"step_seconds": times["step_seconds"], "phases": times["phases"]}
            if energy := figures.get("kilojoules"):
                parts[name]["kilojoules"] = energy["median"]
    if not parts:
        raise SystemExit(f"no part of {', '.join(map(str, paths))} that the pages show has ended")
    row = {key: tables[0][key] for key in ("commit", "date", "card")}
    ordered = {name: parts[name] for name in (*LABELS, "step") if name in parts}
    row |= {"files": [path.name for path in paths], "parts": ordered}
    return {**row, "reason": reason} if reason else row


def like(part: Row) -> tuple[Any, ...]:
    """Only figures of as many GPUs and the same kernel of attention are compared."""
    return part.get("gpus", 1), part.get("flash_attention_4", False)


def unexplained(rows: list[Row]) -> Iterator[str]:
    """The figures that are too much worse than the last ones, in rows that do not say why."""
    last: dict[Any, tuple[str, Row]] = {}
    for row in rows:
        for name, part in row["parts"].items():
            at = (row["card"], name, like(part))
            commit, old = last.get(at, ("", {}))
            for key in COMPARED.keys() & part.keys() & old.keys():
                change = part[key] / old[key] - 1
                if change * COMPARED[key] < -TOLERANCE and not row.get("reason"):
                    what = f"{row['commit']}, {name}: {key} {old[key]} ({commit}) -> {part[key]}"
                    yield f"{what} ({change:+.1%}); find the cause, or write a reason into the row"
            last[at] = row["commit"], old | part


def label(name: str, part: Row) -> str:
    gpus, attention = like(part)
    more = (f", {gpus} GPUs" if gpus > 1 else "") + (", FlashAttention 4" if attention else "")
    return LABELS[name] + more


def cells(name: str, part: Row) -> str:
    if name in LABELS:
        shares = f"{part['train_mfu']:.1%} | {part['log_probs_mfu']:.1%}"
        return f"{label(name, part)} | {part[RATE] / 1000:.1f}k | {shares} | {part['peak_gib']:.1f}"
    times = ", ".join(f"{key} {part['phases'][key]:.2f}" for key in PHASES)
    energy = f", {part['kilojoules']:.1f} kJ" if "kilojoules" in part else ""
    return f"a step with SGLang, {part['step_seconds']:.1f} s ({times}){energy} | | | |"


def table(rows: list[Row]) -> str:
    """One line for each part, the newest row first."""
    head = "| measured with | what | tokens/s per GPU | MFU | log-prob pass | peak GiB |"
    lines = [head, "|" + "---|" * 6]
    for row in reversed(rows):
        files = ", ".join(f"[{at}]({FILES}/{file})" for at, file in enumerate(row["files"], 1))
        head = f"{row['commit']}, {row['date']}, {row['card']} ({files})"
        lines += [f"| {head} | {cells(name, part)} |" for name, part in row["parts"].items()]
    return "\n".join(lines)


def front(row: Row) -> str:
    """The bullet of README.md: training with FSDP, on one GPU and on several."""
    rates = "; ".join(
        f"{label(name, part)}: **{part[RATE] / 1000:.1f}k**, {part['train_mfu']:.1%}"
        for name, part in row["parts"].items()
        if name in FRONT
    )
    return (
        f"- **Training**, tokens/s of an {row['card']} and share of its matrix rate ({row['commit']}, "
        f"{row['date']}):\n  {rates}. [All rows](benchmarks/README.md#the-newest-release)."
    )


def pages(rows: list[Row]) -> dict[Path, str]:
    """What stands between the marks of each page."""
    new = table(rows[-1:])
    return {
        ROOT / "README.md": front(rows[-1]),
        ROOT / "benchmarks" / "README.md": new,
        ROOT / "benchmarks" / "history.md": table(rows[:-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, nargs="+", metavar="JSON", help="tables of one commit")
    parser.add_argument("--reason", default="", help="why its figures are lower, for --add")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    rows = read_history()
    if options.add:
        rows.append(row_of(options.add, options.reason))
    if problems := list(unexplained(rows)):
        raise SystemExit("\n".join(problems))
    if options.check:
        return
    HISTORY.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for path, text in pages(rows).items():
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
