"""Procedural data sets with known answers, which are small enough to learn in minutes on two cores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

from slime.cli.errors import CommandError, writing
from slime.config.seeds import derive_seed

SYSTEM_PROMPT = "Answer briefly."
DIGITS = range(1, 10)


def make_products(output_dir: Path, seed: int = 1, held_out: int = 16) -> tuple[Path, Path]:
    """Write ``products_train.jsonl`` and ``products_eval.jsonl``: "What is 3 times 4?" → "12".

    The 81 ordered pairs of digits 1–9 are shuffled with the seed. ``held_out`` of them go to the evaluation file and
    the others to the training file, so the files have no pair in common.

    Args:
        output_dir: Output folder, which is created if necessary.
        seed: Random seed; the same seed always gives the same files.
        held_out: Number of held-out pairs, 1 to 80.

    Returns:
        The paths of the training file and the evaluation file.

    Raises:
        CommandError: ``held_out`` leaves one of the files empty, or the files cannot be written.
    """
    pairs = [(a, b) for a in DIGITS for b in DIGITS]
    if not 1 <= held_out < len(pairs):
        raise CommandError(f"--held-out {held_out}: must be from 1 to {len(pairs) - 1}, one less than all pairs")
    Random(derive_seed(seed, "make-data products")).shuffle(pairs)
    with writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        train = _write(output_dir / "products_train.jsonl", pairs[held_out:])
        return train, _write(output_dir / "products_eval.jsonl", sorted(pairs[:held_out]))


def product_row(a: int, b: int) -> dict[str, object]:
    """Return one row: the chat prompt, the label as text, and the two factors as metadata."""
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"What is {a} times {b}?"}]
    return {"prompt": prompt, "label": str(a * b), "metadata": {"a": a, "b": b}}


def _write(path: Path, pairs: list[tuple[int, int]]) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(product_row(a, b)) + "\n" for a, b in pairs), encoding="utf-8")
    temporary.replace(path)
    return path
