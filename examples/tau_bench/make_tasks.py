"""Tasks of the shop, and transcripts to warm a small model up.

    python examples/tau_bench/make_tasks.py OUT_DIR [--seed 1]

Writes ``train.jsonl``, ``eval.jsonl`` and ``transcripts.jsonl``; in two of three transcripts the
assistant looks at an order before it changes it, in the others it changes what it must not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
from shop import task, transcript  # a file beside this one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = Random(args.seed)
    taught = [transcript(task(draw), looks=i % 3 > 0) for i in range(192)]
    files = {
        "transcripts": taught,
        "train": [task(draw) for _ in range(256)],
        "eval": [task(draw) for _ in range(16)],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (args.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    print(args.out)


if __name__ == "__main__":
    main()
