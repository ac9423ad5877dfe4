"""Flags that only Megatron-LM's own parser has; a small parser of its form stands on PYTHONPATH, since the real one
does not import without triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PARSER = """
def add_megatron_arguments(parser):
    group = parser.add_argument_group("logging")
    group.add_argument("--log-throughput", action="store_true")
    group.add_argument("--no-data-sharding", action="store_false", dest="data_sharding")
    group.add_argument("--data-path", nargs="*", default=None)
    group.add_argument("--train-samples", type=int, default=None)
    group.add_argument("--lr", type=float, default=None)
    return parser
"""
PROGRAM = """
import sys
from slime.config.parser import read_command_line
args, problems = read_command_line(sys.argv[1:])
print([getattr(args, n, None) for n in ("log_throughput", "data_sharding", "data_path", "train_samples", "lr")])
print(problems, args.notices)
"""


def read(folder: Path, *words: str, source: str = PARSER) -> str:
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "arguments.py").write_text(source)
    environment = {"PYTHONPATH": f"{folder}:{CHECKOUT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_flags_are_taken_for_the_users_functions(tmp_path: Path) -> None:
    words = ["--log-throughput", "--no-data-sharding", "--data-path", "a", "b", "--train-samples=7", "--lr", "1e-5"]
    said = read(tmp_path, *words)
    assert said.startswith("[True, False, ['a', 'b'], 7, 1e-05]\n[] [")
    assert "--data-path, --log-throughput, --no-data-sharding, --train-samples: Megatron-LM's own" in said


def test_a_misspelt_flag_is_an_error_with_a_suggestion_from_both(tmp_path: Path) -> None:
    assert "--log-throughputs: no such flag; did you mean --log-throughput?" in read(tmp_path, "--log-throughputs")


@pytest.mark.parametrize("source", ["import a_package_that_is_not_there", "raise SystemExit(3)"])
def test_one_that_cannot_be_asked_is_said(tmp_path: Path, source: str) -> None:
    said = read(tmp_path, "--log-throughput", source=source)
    assert "--log-throughput: no such flag" in said and "Megatron-LM on PYTHONPATH could not be asked" in said
