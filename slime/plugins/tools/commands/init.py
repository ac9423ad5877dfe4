"""``slime init``: a commented folder to start from, with a reward, data and a script that trains on two CPU cores."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from slime.cli.errors import CommandError, writing
from slime.config.seeds import derive_seed
from slime.plugins.tools.commands.make_data import make_products

STARTERS = Path(__file__).parents[1] / "starters"
SEED = 1
HELD_OUT = 16
SUMS = 96
TOOL_PROMPT = "Use the calculator for every question, then give the number."


def init(folder: Path, task: str) -> list[Path]:
    """Write reward.py, run.sh, data.jsonl and heldout.jsonl; returns their paths.

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
        for name in ("reward.py", "run.sh"):
            shutil.copyfile(starter / name, folder / name)
        (folder / "run.sh").chmod(0o755)
        for name, lines in zip(("data.jsonl", "heldout.jsonl"), TASKS[task](), strict=True):
            (folder / name).write_text(lines, encoding="utf-8")
    return [folder / name for name in ("reward.py", "data.jsonl", "heldout.jsonl", "run.sh")]


def _products() -> tuple[str, str]:
    """Products of two digits: the text of the training file and of the held-out one."""
    with tempfile.TemporaryDirectory() as folder:
        train, held_out = make_products(Path(folder), SEED, HELD_OUT)
        return train.read_text(encoding="utf-8"), held_out.read_text(encoding="utf-8")


def _calculations() -> tuple[str, str]:
    """Products of two-digit numbers, which a small model cannot compute, with two calls of the tool as examples."""
    draw = Random(derive_seed(SEED, "init tool-use"))
    pairs = sorted({(draw.randint(12, 98), draw.randint(12, 98)) for _ in range(2 * SUMS)})
    draw.shuffle(pairs)
    lines = [json.dumps(_tool_row(a, b)) + "\n" for a, b in pairs[: SUMS + HELD_OUT]]
    return "".join(lines[HELD_OUT:]), "".join(lines[:HELD_OUT])


def _tool_row(a: int, b: int) -> dict[str, object]:
    messages = [{"role": "system", "content": TOOL_PROMPT}]
    for x, y in ((31, 14), (25, 67)):
        messages += [
            {"role": "user", "content": f"What is {x} * {y}?"},
            {"role": "assistant", "content": f"<calc>{x} * {y}</calc>"},
            {"role": "user", "content": str(x * y)},
            {"role": "assistant", "content": str(x * y)},
        ]
    return {"prompt": [*messages, {"role": "user", "content": f"What is {a} * {b}?"}], "label": str(a * b)}


TASKS: dict[str, Callable[[], tuple[str, str]]] = {
    "single-turn": _products,
    "tool-use": _calculations,
    "agent": _products,
}
"""The kinds of tasks, and what makes their data."""
