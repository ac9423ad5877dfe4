"""Flags of Megatron: those of its backend that need one another, and those that only Megatron-LM's
own parser has.

A small parser of its form stands on PYTHONPATH, since the real one does not import without triton.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
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
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_flags_are_taken_for_the_users_functions(tmp_path: Path) -> None:
    words = [
        "--log-throughput",
        "--no-data-sharding",
        "--data-path",
        "a",
        "b",
        "--train-samples=7",
        "--lr",
        "1e-5",
    ]
    said = read(tmp_path, *words)
    assert said.startswith("[True, False, ['a', 'b'], 7, 1e-05]\n[] [")
    assert "--data-path, --log-throughput, --no-data-sharding, --train-samples: " in said


def test_a_misspelt_flag_is_an_error_with_a_suggestion_from_both(tmp_path: Path) -> None:
    assert "mean --log-throughput?" in read(tmp_path, "--log-throughputs")


@pytest.mark.parametrize("source", ["import a_package_that_is_not_there", "raise SystemExit(3)"])
def test_one_that_cannot_be_asked_is_said(tmp_path: Path, source: str) -> None:
    said = read(tmp_path, "--log-throughput", source=source)
    assert "--log-throughput: " in said and "PYTHONPATH" in said


def run_beside(checkout: Path, program: str, place: str = "first") -> str:
    """The output of a program with ``checkout`` on PYTHONPATH."""
    paths = [str(checkout), str(CHECKOUT)] if place == "first" else [str(CHECKOUT), str(checkout)]
    environment = {"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )
    return done.stdout + done.stderr


def fake_checkout(folder: Path, is_regular: bool) -> Path:
    """A Megatron-LM checkout with a core of another release."""
    for package in ("core", "training"):
        (folder / "megatron" / package).mkdir(parents=True)
        (folder / "megatron" / package / "__init__.py").write_text("__version__ = '0.99.0'\n")
    if is_regular:
        (folder / "megatron" / "__init__.py").write_text("")
    return folder


WHICH = """
import importlib.util
from slime.plugins.megatron.flags import prefer_installed_core, shadowing_notices
print(*shadowing_notices())
print(prefer_installed_core(), prefer_installed_core())
print(importlib.util.find_spec("megatron.core").origin)
training = importlib.util.find_spec("megatron.training")
print("training", training and training.origin)
"""


@pytest.mark.megatron
@pytest.mark.parametrize(("is_regular", "place"), [(False, "first"), (True, "last")])
def test_the_installed_core_is_imported_beside_a_checkout(
    tmp_path: Path, is_regular: bool, place: str
) -> None:
    pytest.importorskip("megatron.core.package_info")
    checkout = fake_checkout(tmp_path, is_regular)
    said = run_beside(checkout, WHICH, place).splitlines()
    assert str(checkout) in said[0] and "the installed megatron-core 0.16" in said[0]
    assert said[1] == f"[{str(checkout)!r}] []"
    assert "site-packages" in said[2] or str(checkout) not in said[2]
    assert said[3] == (
        "training None" if is_regular else f"training {checkout}/megatron/training/__init__.py"
    )


@pytest.mark.megatron
def test_no_notice_without_a_checkout(tmp_path: Path) -> None:
    assert run_beside(tmp_path, WHICH).startswith("\n[] []\n")


IMPORTED = """
import megatron.core
from slime.plugins.megatron.core import prepare
try:
    prepare()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.megatron
def test_a_core_that_was_imported_before_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    said = run_beside(fake_checkout(tmp_path, False), IMPORTED)
    assert (
        f"MegatronError megatron.core 0.99.0 was imported from {tmp_path}/megatron/core, but "
        "megatron-core"
    ) in said
    assert "from PYTHONPATH" in said
