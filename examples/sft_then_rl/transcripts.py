"""Conversations to imitate: products worked out as sums.

    python examples/sft_then_rl/transcripts.py PRODUCTS.jsonl OUT.jsonl

For each row of ``slime make-data products`` one row with ``messages``: its prompt, and an assistant
that answers ``3 times 4 = 4 + 4 + 4 = 12``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def worked(a: int, b: int) -> str:
    """The answer with its working: a times b as a sum of the smaller number of terms."""
    count, term = sorted((a, b))
    # longer sums are longer than a response
    terms = f" = {' + '.join([str(term)] * count)}" if 1 < count < 4 else ""
    return f"{a} times {b}{terms} = {a * b}"


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """One row of products as a conversation to learn from."""
    a, b = row["metadata"]["a"], row["metadata"]["b"]
    answer = {"role": "assistant", "content": worked(a, b)}
    return {"messages": [*row["prompt"], answer], "metadata": row["metadata"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("products", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.products.read_text(encoding="utf-8").splitlines()]
    args.out.write_text(
        "".join(json.dumps(conversation(row)) + "\n" for row in rows), encoding="utf-8"
    )
    print(args.out)


if __name__ == "__main__":
    main()
