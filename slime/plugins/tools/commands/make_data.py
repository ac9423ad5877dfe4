"""``slime make-data`` and ``slime init``: data with known answers, small enough to learn in minutes
on two CPU cores, and a commented folder to start from, with a reward, such data and a script that
trains."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from shlex import quote
from typing import Any

from slime.cli.command import CommandError, writing
from slime.config.seeds import derive_seed
from slime.observability.files import replacing

from . import Subparsers

SYSTEM_PROMPT = "Answer briefly."
DIGITS = range(1, 10)
STARTERS = Path(__file__).parents[1] / "starters"
HELD_OUT = 16
DATA = ("data.jsonl", "heldout.jsonl")
SUMS = 96
Row = dict[str, Any]
TOOL_PROMPT = "Use the calculator for every question, then give the number."


def add_make_data(commands: Subparsers) -> None:
    data = commands.add_parser(
        "make-data", help="write a procedural data set as JSONL (prompt, label)"
    )
    data.add_argument(
        "task", choices=["products"], help="products: of two digits 1-9; some pairs are held out"
    )
    data.add_argument(
        "--output-dir", type=Path, default=Path("data"), help="output folder (default: data)"
    )
    data.set_defaults(run=_make)


def _make(args: argparse.Namespace) -> None:
    for path in make_products(args.output_dir):
        print(path)


def add_init(commands: Subparsers) -> None:
    init = commands.add_parser(
        "init",
        help="write a folder to start from: reward.py, data.jsonl and a run.sh that trains on two "
        "CPU cores",
    )
    init.add_argument("folder", type=Path, help="new or empty folder")
    init.add_argument(
        "--task",
        choices=list(TASKS),
        default="single-turn",
        help="one response per prompt; a tool between the model's turns; an agent on the OpenAI "
        "API; pairs of responses; a teacher; several data sets (default: single-turn)",
    )
    init.set_defaults(run=_init)


def _init(args: argparse.Namespace) -> None:
    for path in init(args.folder, args.task):
        print(path)
    script = quote(str(args.folder / "run.sh"))
    print(f"next: bash {script} --dry-run, then bash {script}")


def make_products(output_dir: Path, seed: int = 1) -> tuple[Path, Path]:
    """Write ``products_train.jsonl`` and ``products_eval.jsonl``: "What is 3 times 4?" → "12".

    The 81 ordered pairs of digits 1–9 are shuffled with the seed. :data:`HELD_OUT` of them go to the
    evaluation file and the others to the training file, so the files have no pair in common.

    Args:
        output_dir: Output folder, which is created if necessary.
        seed: Random seed; the same seed always gives the same files.

    Returns:
        The paths of the training file and the evaluation file.

    Raises:
        CommandError: The files cannot be written.
    """
    train, evaluation = (output_dir / f"products_{name}.jsonl" for name in ("train", "eval"))
    with writing(output_dir):
        for path, rows in zip((train, evaluation), _products(seed), strict=True):
            with replacing(path) as temporary:
                temporary.write_text(_lines(rows), encoding="utf-8")
    return train, evaluation


def _products(seed: int = 1) -> tuple[list[Row], list[Row]]:
    """Return the rows of the training file and of the evaluation file."""
    pairs = [(a, b) for a in DIGITS for b in DIGITS]
    Random(derive_seed(seed, "make-data products")).shuffle(pairs)
    held_out = sorted(pairs[:HELD_OUT])
    rows = [_row(a, b, "times", a * b) for a, b in (*pairs[HELD_OUT:], *held_out)]
    return rows[:-HELD_OUT], rows[-HELD_OUT:]


def _row(a: int, b: int, what: str, label: int) -> Row:
    """Return one row: the chat prompt, the label as text, and the two numbers as metadata."""
    prompt = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"What is {a} {what} {b}?"},
    ]
    return {"prompt": prompt, "label": str(label), "metadata": {"a": a, "b": b}}


def _lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def init(folder: Path, task: str) -> list[Path]:
    """Write reward.py, run.sh, heldout.jsonl and the data of the task; returns their paths.

    Args:
        folder: Is created; it may exist if it is empty.
        task: One of :data:`TASKS`.

    Raises:
        CommandError: The folder is not empty, is a file, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} is there already and not empty: name another folder")
    starter = STARTERS / task.replace("-", "_")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Tasks that learn from no reward share one for held-out answers.
        files = {path.name: path for path in (STARTERS / "reward.py", *sorted(starter.glob("*.*")))}
        for name, path in files.items():
            shutil.copyfile(path, folder / name)
        (folder / "run.sh").chmod(0o755)
        data = TASKS[task]()
        for name, lines in data.items():
            (folder / name).write_text(lines, encoding="utf-8")
    return [folder / name for name in (*files, *data)]


def _plain() -> dict[str, str]:
    return dict(zip(DATA, map(_lines, _products()), strict=True))


def _calculations() -> dict[str, str]:
    """Products of two-digit numbers, which a small model cannot compute, with two calls of the tool
    as examples.
    """
    draw = Random(derive_seed(1, "init tool-use"))
    pairs = sorted({(draw.randint(12, 98), draw.randint(12, 98)) for _ in range(2 * SUMS)})
    draw.shuffle(pairs)
    rows = [_tool_row(a, b) for a, b in pairs[: SUMS + HELD_OUT]]
    return {DATA[0]: _lines(rows[HELD_OUT:]), DATA[1]: _lines(rows[:HELD_OUT])}


def _tool_row(a: int, b: int) -> Row:
    # Two finished calls show a small model how to use the tool.
    messages = [{"role": "system", "content": TOOL_PROMPT}]
    for x, y in ((31, 14), (25, 67)):
        messages += [
            {"role": "user", "content": f"What is {x} * {y}?"},
            {"role": "assistant", "content": f"<calc>{x} * {y}</calc>"},
            {"role": "user", "content": str(x * y)},
            {"role": "assistant", "content": str(x * y)},
        ]
    return {
        "prompt": [*messages, {"role": "user", "content": f"What is {a} * {b}?"}],
        "label": str(a * b),
    }


def _said(row: Row, wrong: int = 0) -> str:
    """Return the answer to a product as a sentence, off by ``wrong``."""
    a, b = row["metadata"].values()
    return f"{a} times {b} is {a * b + wrong}."


def _pairs() -> dict[str, str]:
    """The right product as the chosen answer, and another number as the rejected one."""
    draw = Random(derive_seed(1, "init preference"))
    pairs = [
        {**row, "chosen": _said(row), "rejected": _said(row, draw.choice((-2, -1, 1, 2, 10)))}
        for row in _products()[0]
    ]
    return _plain() | {DATA[0]: _lines(pairs)}


def _lessons() -> dict[str, str]:
    """Products, and conversations from which the model becomes a teacher."""
    talks = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": _said(row)}]}
        for row in _products()[0]
    ]
    return _plain() | {"lessons.jsonl": _lines(talks)}


def _two_sets() -> dict[str, str]:
    """Products, and sums of the same numbers."""
    pairs = [row["metadata"].values() for row in _products()[0]]
    return _plain() | {"sums.jsonl": _lines(_row(a, b, "plus", a + b) for a, b in pairs)}


TASKS: dict[str, Callable[[], dict[str, str]]] = {
    "single-turn": _plain,
    "tool-use": _calculations,
    "agent": _plain,
    "preference": _pairs,
    "distill": _lessons,
    "mixture": _two_sets,
}
"""The kinds of tasks, and what makes their data: texts by the names of the files."""
