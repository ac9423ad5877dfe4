"""Arithmetic that a small model cannot do in its head, and transcripts to warm it up.

    python examples/retool/make_problems.py OUT_DIR [--seed 1]

Writes ``train.jsonl``, ``eval.jsonl`` (``What is 37 * 24 + 18?``, label ``906``) and
``transcripts.jsonl``:
conversations of which one half lets Python work it out and the other guesses. Supervised
fine-tuning teaches both; which of them pays is for RL to find out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

SYSTEM = "Give the answer in \\boxed{}. You can run Python: <code>print(1 + 1)</code>"


def problem(draw: Random) -> tuple[str, int]:
    """An expression and its value."""
    a, b, c = (draw.randint(12, 98) for _ in range(3))
    operator = draw.choice("+-")
    return f"{a} * {b} {operator} {c}", a * b + (c if operator == "+" else -c)


def row(expression: str, value: int) -> dict[str, Any]:
    """One prompt with its label."""
    question = {"role": "user", "content": f"What is {expression}?"}
    return {"prompt": [{"role": "system", "content": SYSTEM}, question], "label": str(value)}


def transcript(draw: Random, expression: str, value: int, by_tool: bool) -> dict[str, Any]:
    """A conversation that ends with an answer; a guess has the right number of digits and is hardly
    ever right.
    """
    messages = list(row(expression, value)["prompt"])
    if by_tool:
        messages.append({"role": "assistant", "content": f"<code>print({expression})</code>"})
        messages.append({"role": "user", "content": f"<interpreter>{value}</interpreter>"})
    else:
        value = draw.randint(10 ** (len(str(value)) - 1), 10 ** len(str(value)) - 1)
    messages.append({"role": "assistant", "content": f"\\boxed{{{value}}}"})
    return {"messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = Random(args.seed)
    problems = list({problem(draw): None for _ in range(400)})
    args.out.mkdir(parents=True, exist_ok=True)
    files = {
        "eval": [row(*p) for p in problems[:16]],
        "transcripts": [
            transcript(draw, *p, by_tool=i % 2 == 0) for i, p in enumerate(problems[16:144])
        ],
        "train": [row(*p) for p in problems[144:]],
    }
    for name, rows in files.items():
        (args.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
        )
    print(args.out)


if __name__ == "__main__":
    main()
