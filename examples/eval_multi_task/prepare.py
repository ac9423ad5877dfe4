"""Write the evaluation sets and the ``eval.yaml`` that names them, each with settings of its own.

    python prepare.py OUTPUT_DIR [--datasets DIR] [--rows 8] [--max-response-len N]

With ``--datasets`` (a folder with gsm8k/, math500/ and aime/) the first rows of those; without,
arithmetic at three lengths of answer, made here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from slime.config.seeds import derive_seed

Row = dict[str, Any]

# Sampling differs by set: one greedy answer where the answer is short, several warm ones where
# pass@k is of interest.
GREEDY = {"n_samples_per_eval_prompt": 1, "temperature": 0.0}
WARM = {"n_samples_per_eval_prompt": 4, "temperature": 0.8, "top_p": 0.95}


def gsm8k(row: Row) -> Row:
    return {
        "prompt": ask(row["question"]),
        "label": row["answer"].rpartition("####")[2].strip().replace(",", ""),
    }


def math500(row: Row) -> Row:
    return {
        "prompt": ask(row["problem"] + " Put the answer into \\boxed{}."),
        "label": str(row["answer"]),
    }


def aime(row: Row) -> Row:
    return {
        "prompt": ask(row["problem"] + " Put the answer into \\boxed{}."),
        "label": str(row["answer"]),
    }


SHARED: dict[str, tuple[str, Callable[[Row], Row], Row]] = {
    "gsm8k": (
        "gsm8k/test.jsonl",
        gsm8k,
        {"rm_type": "last_number", "max_response_len": 96, **GREEDY},
    ),
    "math500": (
        "math500/math500.jsonl",
        math500,
        {"rm_type": "math", "max_response_len": 64, **WARM},
    ),
    "aime": ("aime/aime24.jsonl", aime, {"rm_type": "math", "max_response_len": 64, **WARM}),
}
OWN: dict[str, tuple[str, Row]] = {
    "sum": ("{a} plus {b}", {"max_response_len": 16, **GREEDY}),
    "difference": ("{a} minus {b}", {"max_response_len": 16, **WARM}),
    "product": ("{a} times {b}", {"max_response_len": 24, **WARM, "n_samples_per_eval_prompt": 8}),
}


def ask(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def made(name: str, template: str, rows: int) -> Iterator[Row]:
    """Questions on two digits, the same in each call."""
    random = Random(derive_seed(1, f"eval_multi_task {name}"))
    for _ in range(rows):
        b, a = sorted((random.randint(1, 9), random.randint(1, 9)))
        answer = {"sum": a + b, "difference": a - b, "product": a * b}[name]
        yield {"prompt": ask(f"What is {template.format(a=a, b=b)}?"), "label": str(answer)}


def read(file: Path, rows: int) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(rows), strict=False):
            yield json.loads(line)


def prepare(
    output_dir: Path, datasets: Path | None, rows: int, max_response_len: int | None = None
) -> Path:
    """Write all sets below ``output_dir``; returns the path of ``eval.yaml``. With
    ``max_response_len`` the answers of every set may have so many tokens.

    Raises:
        FileNotFoundError: ``datasets`` lacks one of :data:`SHARED`.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    entries: list[Row] = []
    longest = {} if max_response_len is None else {"max_response_len": max_response_len}

    def add(name: str, made_rows: Iterable[Row], settings: Row) -> None:
        path = output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made_rows), encoding="utf-8")
        entries.append({"name": name, "path": str(path), **settings, **longest})

    if datasets is not None:
        for name, (file, convert, settings) in SHARED.items():
            add(name, map(convert, read(datasets / file, rows)), settings)
    else:
        for name, (template, settings) in OWN.items():
            add(name, made(name, template, rows), settings)
    config = {
        "eval": {
            "defaults": {"rm_type": "last_number", "apply_chat_template": True},
            "datasets": entries,
        }
    }
    path = output_dir / "eval.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--datasets", type=Path, help="folder with gsm8k/, math500/ and aime/")
    parser.add_argument("--rows", type=int, default=8, help="of each set (default: 8)")
    parser.add_argument(
        "--max-response-len", type=int, help="tokens of an answer (default: little, by set)"
    )
    args = parser.parse_args()
    print(prepare(args.output_dir, args.datasets, args.rows, args.max_response_len))


if __name__ == "__main__":
    main()
