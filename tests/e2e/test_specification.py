"""The table of the original specification names only what exists, and claims of a test no more than
it runs.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("README.md")
TEXT = PAGE.read_text(encoding="utf-8")


def rows(columns: int) -> list[list[str]]:
    """The rows of all tables with so many columns, without their heads."""
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TEXT.splitlines()]
    return [
        row
        for row in cells
        if len(row) == columns and row[0] not in ("item", "test", "word", "flag")
    ]


ROWS = rows(4)
TESTS = {path.name: path for path in CHECKOUT.glob("tests/**/test_*.py")}
PAIRS = ("FSDP + embedded", "Megatron + embedded", "FSDP + SGLang", "Megatron + SGLang")


def named_tests(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", cell)


@functools.cache
def functions_of(file: str) -> dict[str, ast.stmt]:
    return {
        node.name: node for node in ast.parse(TESTS[file].read_text()).body if hasattr(node, "name")
    }


@functools.cache
def marks(file: str, function: str) -> frozenset[str]:
    """Marks of one test, or of a whole file (function ``""``): those for all tests in it."""
    marked = [node.value for node in ast.parse(TESTS[file].read_text()).body
              if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]  # fmt: skip
    marked += getattr(functions_of(file).get(function), "decorator_list", [])
    return frozenset(re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, marked))))


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_where_it_lives_and_what_runs_it_exist(row: list[str]) -> None:
    item, where, tests, _ = row
    for link in re.findall(r"\]\(([^)#]+)", where):
        assert (PAGE.parent / link).exists(), f"{item}: {link}"
    for symbol in re.findall(r"`(slime\.[\w.]+)`", where):
        module, _, name = symbol.rpartition(".")
        assert hasattr(importlib.import_module(module), name), f"{item}: {symbol}"
    named = named_tests(tests)
    assert named and len(named) == tests.count("`") // 2, f"{item}: which test?"
    for file, function in named:
        assert file in TESTS, f"{item}: {file}"
        assert not function or function in functions_of(file), f"{item}: {file} has no {function}"


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_what_it_runs_is_what_its_tests_are_marked_to_run(row: list[str]) -> None:
    """A row must name its trainer and engine, and may claim a pair only where a test that it names
    has the marks.
    """
    item, _, tests, runs = row
    found = [marks(file, function) for file, function in named_tests(tests)]
    claims = re.findall(r"\*\*(\w+)\*\*([^*]*)", runs)
    kinds = {kind for kind, _ in claims}
    assert (
        kinds and kinds <= {"Typed", "Run", "Called", "Parsed", "Read"} and runs.startswith("**")
    ), item
    assert ("Typed" in kinds) == any("seeds" in marked for marked in found), item
    if "Run" in kinds and "test_seed_install.py" not in tests:  # it starts pip, hf and ls
        assert any("real" in marked and "seeds" not in marked for marked in found), item
    for kind, text in claims:
        if kind in ("Typed", "Run"):
            assert any(words in text for words in (*PAIRS, "no training")), (
                f"{item}: {kind} of which backends?"
            )
        else:
            assert not any(pair in text for pair in PAIRS), f"{item}: {kind} starts no backends"
    assert ("+ SGLang" in runs) == any("sglang" in marked for marked in found), item
    if "Megatron +" in runs:
        assert any({"megatron", "sglang"} & marked for marked in found), item


@pytest.mark.parametrize("file", ["test_seed_commands.py", "test_seed_conversions.py"])
def test_whatever_a_test_adds_to_a_typed_command_is_listed(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags in its strings and settings of the override, beside those that hold for all."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "tests" / "e2e"))
    from seed_desk import SCALE, TYPED

    from slime.config.args import FLAGS

    common, _, single = TEXT.partition("## What the tests replace")[2].partition(
        "Single tests replace more"
    )
    assert all(f"`--{name.replace('_', '-')}`" in common for name in {"hf_checkpoint", *SCALE})
    listed = dict(re.findall(r"^\| `(test_\w+)` \| (.*) \|$", single, re.MULTILINE))
    for name, node in functions_of(file).items():
        if not name.startswith("test_"):
            continue
        strings = {
            n.value
            for n in ast.walk(node)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        entries = strings & set(TYPED)
        settings = strings - entries | {
            n.arg for n in ast.walk(node) if isinstance(n, ast.keyword) and n.arg
        }
        options = {
            "--" + n.replace("_", "-")
            for n in settings
            if n in FLAGS or n == "tensor_model_parallel_size"
        }
        added = flags_in(*(strings - entries)) | options
        typed = flags_in(*(text for entry in entries for text in TYPED[entry].values()))
        missing = added - typed - flags_in(listed.get(name, ""))
        assert not missing, f"{name} also gives {sorted(missing)}"
        listed.pop(name, None)
    others = {"test_seed_commands.py", "test_seed_conversions.py"} - {file}
    assert all(set(listed) <= set(functions_of(other)) for other in others), (
        "a row for a test that is not there"
    )


def flags_in(*texts: str) -> set[str]:
    return {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}


def test_every_flag_of_the_specification_is_in_the_table_and_exists() -> None:
    """Flags of the verbatim commands, those of ray, torchrun, pip, hf, tensorboard and the tools
    left aside.
    """
    from slime.config.parser import build_parser

    typed = yaml.safe_load((CHECKOUT / "tests" / "e2e" / "seed_commands.yaml").read_text())
    known = set(build_parser()._option_string_actions)
    table = PAGE.read_text(encoding="utf-8")
    for entry in typed.values():
        text = " ".join(str(entry.get(kind, "")) for kind in ("text", "fragment", "flag"))
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
            if re.search(r"train(_async)?\.py", text) or "fragment" in entry or "flag" in entry:
                assert flag in known or flag in {"--address", "--runtime-env-json"}, flag
            if flag in known:
                assert flag in table, f"{flag} is not in the table"
