"""What the fields say of their readers is true of the code, and the code reads nothing that is no field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.config.args import FLAGS, Args
from slime.config.hf_config import SHAPE
from tools.flags_page import FOR_USERS, PAGE, _names_read, readers

CHECKOUT = Path(__file__).resolve().parents[2]
OWN_NAMESPACE = ("slime/cli/", "slime/config/")  # argparse namespaces of other commands


def sources() -> Iterator[tuple[str, str]]:
    for file in [*CHECKOUT.glob("slime/**/*.py"), *CHECKOUT.glob("train*.py")]:
        yield str(file.relative_to(CHECKOUT)), file.read_text()


def attributes_of_args(text: str) -> set[str]:
    """Names read as ``args.name`` or ``self.args.name`` where ``args`` is annotated or taken as the configuration."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            owner_name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
            if owner_name == "args":
                names.add(node.attr)
    return names


def test_every_flag_that_works_is_read_somewhere() -> None:
    unread = [
        flag.option
        for flag in FLAGS.values()
        if flag.status == "works"
        and not readers(flag)
        and flag.name not in FOR_USERS
        # where all values but one are refused, nothing is left to read
        and len(flag.choices) - len(flag.limits) != 1
    ]
    assert unread == []


def test_the_page_names_files_that_read_the_flag() -> None:
    """New readers may be missing until the page is made again; one that is named must be there."""
    rows = re.findall(r"(?m)^\| `(--[a-z0-9-]+)[^|]*\|[^|]*\|.*\| ([^|]*) \|$", PAGE.read_text())
    named = {option: re.findall(r"`([^`]+\.py)`", files) for option, files in rows}
    assert sum(map(bool, named.values())) > 200
    by_option = {flag.option: flag for flag in FLAGS.values()}
    gone = [(o, f) for o, files in named.items() for f in files if f not in readers(by_option[o])]
    assert gone == [], "run: python tools/flags_page.py"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(args): return args.lr", {"lr"}),
        ("class A:\n def f(self): return self.args.lr + getattr(self._args, 'seed', 0)", {"lr", "seed"}),
        ("T = ('lr', 'other words')\ndef f(args): return [getattr(args, name) for name in T]", {"lr"}),
        ("T = ('lr',)\ndef f(args): args.seed = 1\n# args.save", set()),
    ],
)
def test_what_counts_as_reading(code: str, found: set[str]) -> None:
    assert _names_read(ast.parse(code)) == found


def is_known(args: Args, name: str) -> bool:
    try:
        getattr(args, name)  # hasattr is False for flags that were not given
    except AttributeError:
        return False
    return True


def test_no_code_reads_what_is_no_flag() -> None:
    args = Args(train_backend="megatron")
    unknown = {
        f"{path}: args.{name}"
        for path, text in sources()
        if not path.startswith(OWN_NAMESPACE) and "ArgumentParser" not in text
        for name in attributes_of_args(text)
        if not is_known(args, name) and name not in SHAPE and not name.startswith("__") and not hasattr(dict, name)
    }
    assert unknown == set()


def assigned_to_args(text: str) -> set[str]:
    """Attributes of ``args`` or ``self.args`` that code assigns, deletes or sets by name."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            owner, name = node.args[0], "setattr"
        else:
            continue
        if (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")) in ("args", "_args"):
            found.add(name)
    return found


def test_nothing_is_written_to_args_after_parsing() -> None:
    paths = {path for path, text in sources() if not path.startswith("slime/config/") and assigned_to_args(text)}
    assert not paths, "pass the value, or a copy with it to users' functions: args.with_values(name=...)"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(args): args.lr = 1", {"lr"}),
        ("def f(self): self.args.lr, x = 1, 2", {"lr"}),
        ("def f(self): self._args.lr += 1", {"lr"}),
        ("def f(args, name): setattr(args, name, 1)", {"setattr"}),
        ("def f(args, sample): sample.lr = args.lr", set()),
    ],
)
def test_what_counts_as_writing(code: str, found: set[str]) -> None:
    assert assigned_to_args(code) == found
