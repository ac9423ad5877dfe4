"""The table of the original specification names only files, flags, symbols and tests that exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "en" / "reference" / "specification.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| item")
]
TESTS = {path.name: path for path in CHECKOUT.glob("tests/**/test_*.py")}


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_where_it_lives_and_what_runs_it_exist(row: list[str]) -> None:
    item, where, tests = row
    for link in re.findall(r"\]\(([^)#]+)", where):
        assert (PAGE.parent / link).exists(), f"{item}: {link}"
    for symbol in re.findall(r"`(slime\.[\w.]+)`", where):
        module, _, name = symbol.rpartition(".")
        assert hasattr(importlib.import_module(module), name), f"{item}: {symbol}"
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", tests)
    assert named and len(named) == tests.count("`") // 2, f"{item}: which test?"
    for file, function in named:
        assert file in TESTS, f"{item}: {file}"
        functions = {node.name for node in ast.walk(ast.parse(TESTS[file].read_text())) if hasattr(node, "name")}
        assert not function or function in functions, f"{item}: {file} has no {function}"


def test_every_flag_of_the_specification_is_in_the_table_and_exists() -> None:
    """Flags of the verbatim commands, those of ray, torchrun, pip, hf, tensorboard and the tools left aside."""
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
